# SPDX-License-Identifier: Apache-2.0
"""The shapes of GPTs, including those of Table 5.1 (Singh). Imports no torch: the planner needs only the numbers."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from stretto.suggestions import did_you_mean


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. All numbers are the whole model's, on any grid.

    ffn: the MLP's inner width (default 4 x hidden). kv_heads: fewer than `heads` is grouped-query attention. Raises
    ValueError when the numbers do not fit together.
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

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocab", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}, but must be at least 1")
        if self.ffn is not None and self.ffn < 1:
            raise ValueError(f"model.ffn is {self.ffn}, but must be at least 1")
        if self.hidden % self.heads:
            nearest = max(1, round(self.hidden / self.heads)) * self.heads
            raise ValueError(
                f"model.hidden is {self.hidden}, which {self.heads} heads do not divide; "
                f"the nearest hidden size that would do is {nearest}"
            )
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - (self.kv_heads or 0)))
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

    def flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of a training step for each token of sequences of that length, forward and backward pass.

        6 for each weight of the linears and the head, and 12 x layers x hidden x seq_len for attention, which counts
        the whole square of positions. Recomputation, norms and look-ups count nothing (PaLM, appendix B, whose model
        FLOPs utilization this defines).
        """
        attention = self.hidden * (2 * self.hidden + 2 * self.num_kv_heads * self.head_dim)
        mlp = (3 if self.activation == "swiglu" else 2) * self.hidden * self.ffn_width
        weights = self.layers * (attention + mlp) + self.vocab * self.hidden
        return 6 * weights + 12 * self.layers * self.hidden * seq_len

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> "GPTConfig":
        """Make a named shape: gpt2-small, or gpt-5b to gpt-640b of Table 5.1; `overrides` replace single fields."""
        if name not in PRESETS:
            near = did_you_mean(name, PRESETS) or "."
            raise ValueError(f"no model is named {name!r}{near} Known: {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)}
        for option in overrides:
            if option not in known:
                near = did_you_mean(option, known) or f": it has {', '.join(sorted(known))}"
                raise ValueError(f"a GPT has no option {option!r}{near}")
        return replace(PRESETS[name], **overrides)


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
