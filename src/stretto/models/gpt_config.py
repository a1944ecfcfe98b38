# SPDX-License-Identifier: Apache-2.0
"""The shapes of GPTs, including those of Table 5.1 (Singh). Imports no torch: the planner needs only the numbers."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.quantities import require_least
from stretto.suggestions import did_you_mean, require_fields, require_known_options


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. All numbers are the whole model's, on any grid.

    ffn: the MLP's inner width (default 4 x hidden). kv_heads: fewer than `heads` is grouped-query attention. Raises
    ValueError when the numbers do not fit together.

    With `num_experts`, the blocks that `moe_layers` names have a mixture of experts for an MLP (`stretto.models.moe`):

    experts_per_token: how many of the `num_experts` each token passes. expert_ffn: inner width of one (default `ffn`).
    shared_ffn: inner width of an MLP beside them that every token passes; `shared_expert_gate` scales its output.
    moe_layers: "all", "every:N" (blocks N - 1, 2N - 1, ...), "from:N" (the blocks after the first N), or numbers.
    router_scores: "softmax" or "sigmoid". normalize_expert_weights: whether a token's weights sum to
        `expert_weight_scale` (default: with several experts a token).
    expert_groups, groups_per_token: a token's experts are of so many of the groups.
    balance: "switch", "sequence", "bias" or "none". balance_loss: coefficient of that loss (default 0.01 for the switch
        loss, 0.0001 for the sequence-wise one, 0 beside a bias). bias_rate: a step's change of a bias.
    z_loss: coefficient of the router's z-loss. capacity_factor: limits the tokens of an expert, in training.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int = 50257
    max_seq_len: int = 2048
    positions: Literal["learned", "rotary"] = "learned"
    activation: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    bias: bool = True
    tie_embeddings: bool = True
    dropout: float = 0.0
    num_experts: int | None = None
    experts_per_token: int = 2
    expert_ffn: int | None = None
    shared_ffn: int | None = None
    shared_expert_gate: bool = False
    moe_layers: str | tuple[int, ...] = "all"
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    normalize_expert_weights: bool | None = None
    expert_weight_scale: float = 1.0
    expert_groups: int = 1
    groups_per_token: int = 1
    balance: Literal["switch", "sequence", "bias", "none"] = "switch"
    balance_loss: float | None = None
    bias_rate: float = 0.001
    z_loss: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.moe_layers, list):  # as TOML and JSON have it
            object.__setattr__(self, "moe_layers", tuple(self.moe_layers))
        require_fields(self, "model.")
        for name in ("layers", "hidden", "heads", "vocab", "max_seq_len", "ffn"):
            require_least(1, "model.", **{name: getattr(self, name)})
        if self.hidden % self.heads:
            nearest = max(1, round(self.hidden / self.heads)) * self.heads
            raise ValueError(
                f"model.hidden is {self.hidden}, which {self.heads} heads do not divide; "
                f"the nearest hidden size that would do is {nearest}"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            nearest = _nearest_divisor(self.kv_heads, self.heads)
            raise ValueError(
                f"model.kv_heads is {self.kv_heads}, which does not divide {self.heads} heads; "
                f"the nearest number that would do is {nearest}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of features, but a head has {self.head_dim}: make hidden / heads even"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout is {self.dropout}, but must be in [0, 1)")
        self._check_experts()

    def _check_experts(self) -> None:
        if self.num_experts is None:
            given = [
                field.name
                for field in fields(self)[[field.name for field in fields(self)].index("num_experts") :]
                if getattr(self, field.name) != field.default and (field.name, self.balance) != ("balance", "none")
            ]
            if given:
                raise ValueError(
                    f"model.{given[0]} is {getattr(self, given[0])!r}, but belongs to a mixture of experts, and "
                    "model.num_experts is not set: model.num_experts=8, say, would do"
                )
            return
        for name in ("num_experts", "experts_per_token", "expert_ffn", "shared_ffn", "expert_groups"):
            require_least(1, "model.", **{name: getattr(self, name)})
        for name in ("balance_loss", "bias_rate", "z_loss"):
            require_least(0, "model.", **{name: getattr(self, name)})
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token is {self.experts_per_token}, but model.num_experts is only "
                f"{self.num_experts}; the nearest number that would do is {self.num_experts}"
            )
        if self.num_experts % self.expert_groups:
            raise ValueError(
                f"model.expert_groups is {self.expert_groups}, which does not divide model.num_experts = "
                f"{self.num_experts}; the nearest number that would do is "
                f"{_nearest_divisor(self.expert_groups, self.num_experts)}"
            )
        group = self.num_experts // self.expert_groups
        fewest = -(-self.experts_per_token // group)
        if not fewest <= self.groups_per_token <= self.expert_groups:
            raise ValueError(
                f"model.groups_per_token is {self.groups_per_token}, but must be from {fewest}, whose experts are as "
                f"many as a token's, to model.expert_groups = {self.expert_groups}"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(
                f"model.capacity_factor is {self.capacity_factor}, with which an expert has no slot: it must be more "
                "than 0; 1.25 would do, and leaving it out drops no token"
            )
        if self.expert_weight_scale <= 0:
            raise ValueError(f"model.expert_weight_scale is {self.expert_weight_scale}, but must be more than 0")
        if self.normalize_expert_weights and self.experts_per_token == 1:
            raise ValueError(
                "model.normalize_expert_weights is true, but with one expert a token it makes every weight 1, from "
                "which the router learns nothing; model.normalize_expert_weights=false would do"
            )
        if self.shared_expert_gate and self.shared_ffn is None:
            raise ValueError("model.shared_expert_gate is true, but there is no shared expert: set model.shared_ffn")
        if self.balance == "none" and self.balance_loss:
            raise ValueError(
                f"model.balance_loss is {self.balance_loss}, but model.balance is 'none': leave out one of the two"
            )
        self.moe_blocks  # noqa: B018  (raises ValueError)

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.hidden // self.heads

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values: `kv_heads`, or all."""
        return self.kv_heads or self.heads

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP: `ffn`, or 4 x `hidden`."""
        return self.ffn or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Inner width of one expert: `expert_ffn`, or that of the MLP."""
        return self.expert_ffn or self.ffn_width

    @property
    def normalizes_expert_weights(self) -> bool:
        """True if a token's weights are divided by their sum."""
        return self.experts_per_token > 1 if self.normalize_expert_weights is None else self.normalize_expert_weights

    @property
    def balance_coefficient(self) -> float:
        """The balance loss's coefficient: `balance_loss`, or what is usual for its kind."""
        return BALANCES[self.balance] if self.balance_loss is None else self.balance_loss

    @property
    def balances_sequences(self) -> bool:
        """True if there is a balance loss over each sequence, of which then no rank may have a part."""
        is_of_sequences = self.balance == "sequence" or (self.balance == "bias" and self.balance_coefficient > 0)
        return self.num_experts is not None and is_of_sequences

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        """The numbers of the blocks that have a mixture of experts, from 0; () without `num_experts`."""
        if self.num_experts is None:
            return ()
        if isinstance(self.moe_layers, str):
            kind, _, count = self.moe_layers.partition(":")
            number = int(count) if count.isdecimal() else None
            chosen: range | tuple[int, ...] | None = None
            if self.moe_layers == "all":
                chosen = range(self.layers)
            elif kind == "every" and number:
                chosen = range(number - 1, self.layers, number)
            elif kind == "from" and number is not None:
                chosen = range(number, self.layers)
            if chosen is None:
                raise ValueError(
                    f"model.moe_layers is {self.moe_layers!r}, but must be 'all', 'every:N', 'from:N' or a list of the "
                    "blocks' numbers, such as 'every:2'"
                )
        else:
            chosen = self.moe_layers
            if wrong := [number for number in chosen if not 0 <= number < self.layers]:
                raise ValueError(f"model.moe_layers has {wrong[0]}, but the model's blocks are 0 to {self.layers - 1}")
        if not chosen:
            raise ValueError(
                f"model.moe_layers is {self.moe_layers!r}, which is no block of {self.layers}: 'all' would do, and a "
                "dense model has no model.num_experts"
            )
        return tuple(sorted(set(chosen)))

    def flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of a training step for each token of sequences of that length, forward and backward pass.

        6 for each weight of the linears, of the experts that a token passes, and of the head, and 12 x layers x hidden
        x seq_len for attention, which counts the whole square of positions. Recomputation, norms and look-ups count
        nothing (PaLM, appendix B, whose model FLOPs utilization this defines).
        """
        attention = self.hidden * (2 * self.hidden + 2 * self.num_kv_heads * self.head_dim)
        matrix = (3 if self.activation == "swiglu" else 2) * self.hidden
        mlps = (self.layers - len(self.moe_blocks)) * matrix * self.ffn_width
        if self.num_experts is not None:
            active = matrix * (self.experts_per_token * self.expert_width + (self.shared_ffn or 0))
            routing = self.hidden * (self.num_experts + self.shared_expert_gate)
            mlps += len(self.moe_blocks) * (active + routing)
        weights = self.layers * attention + mlps + self.vocab * self.hidden
        return 6 * weights + 12 * self.layers * self.hidden * seq_len

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Make a named shape: gpt2-small, or gpt-5b to gpt-640b of Table 5.1; `overrides` replace single fields."""
        if name not in PRESETS:
            known_names = (*PRESETS, *PUBLIC_MODELS)
            near = did_you_mean(name, known_names) or "."
            raise ValueError(f"no model is named {name!r}{near} Known: {', '.join(known_names)}")
        require_known_options("a GPT", overrides, sorted(field.name for field in fields(cls)))
        return replace(PRESETS[name], **overrides)


# The usual coefficients of the losses: Fedus et al. (2022), section 2.2; DeepSeek-V3, section 4.2.
BALANCES = {"switch": 0.01, "sequence": 0.0001, "bias": 0.0, "none": 0.0}


def _nearest_divisor(value: int, whole: int) -> int:
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - value))


PRESETS: dict[str, GPTConfig] = {
    "gpt2-small": GPTConfig(layers=12, hidden=768, heads=12, max_seq_len=1024),
    # Table 5.1 of Singh's dissertation, which gives no vocabulary: these have GPT-2's.
    "gpt-5b": GPTConfig(layers=24, hidden=4096, heads=32),
    "gpt-10b": GPTConfig(layers=32, hidden=5120, heads=40),
    "gpt-20b": GPTConfig(layers=32, hidden=7168, heads=56),
    "gpt-40b": GPTConfig(layers=38, hidden=9216, heads=72),
    "gpt-60b": GPTConfig(layers=56, hidden=9216, heads=72),
    "gpt-80b": GPTConfig(layers=42, hidden=12288, heads=96),
    "gpt-160b": GPTConfig(layers=84, hidden=12288, heads=96),
    "gpt-320b": GPTConfig(layers=96, hidden=16384, heads=128),
    "gpt-640b": GPTConfig(layers=192, hidden=16384, heads=128),
}
