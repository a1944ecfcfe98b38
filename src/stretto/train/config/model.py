# SPDX-License-Identifier: Apache-2.0
"""The options of a GPT's shape, `[model]`. Imports no torch."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.quantities import MAX_LAYERS, MAX_LENGTH, MAX_VOCAB, MAX_WIDTH
from stretto.suggestions import are_missing
from stretto.train.config.options import PRESETS, Section, option

if TYPE_CHECKING:
    from stretto.models import GPTConfig

MAX_EXPERTS = 1 << 14


class ModelConfig(Section):
    """The model to train: a GPT, given by a preset, by its sizes, or by both; a public model, by its name; or a Hugging
    Face model, by its folder."""

    path: str | None = option(
        None, "a Hugging Face folder in place of a GPT's shape: config.json, weights (safetensors), tokenizer; of the "
        "options below it takes only `model.dropout = 0`",
    )  # fmt: skip
    name: str | None = option(
        None,
        "a preset: gpt2-small, gpt-5b, gpt-10b, gpt-20b, gpt-40b, gpt-60b, gpt-80b, gpt-160b, gpt-320b, "
        "gpt-640b; or a public model, which is transformers' with random weights, and takes no other option but "
        f"`model.dropout = 0`: {', '.join(PUBLIC_MODELS)}",
    )
    layers: int | None = option(None, "transformer blocks", unset=PRESETS, ge=1, le=MAX_LAYERS)
    hidden: int | None = option(None, "width of a token's vector", unset=PRESETS, ge=1, le=MAX_WIDTH)
    heads: int | None = option(None, "attention heads", unset=PRESETS, ge=1, le=MAX_WIDTH)
    kv_heads: int | None = option(
        None, "heads of keys and values; fewer than `model.heads` is grouped-query attention", unset="`model.heads`",
        ge=1, le=MAX_WIDTH,
    )  # fmt: skip
    ffn: int | None = option(None, "inner width of the MLP", unset="4 x `model.hidden`", ge=1, le=4 * MAX_WIDTH)
    vocab: int | None = option(
        None, "vocabulary size", unit="tokens", unset="the preset's, else the data's", ge=1, le=MAX_VOCAB
    )
    max_seq_len: int | None = option(
        None, "longest sequence", unit="tokens", unset="the preset's, else `train.seq_len`", ge=1, le=MAX_LENGTH
    )
    positions: Literal["learned", "rotary"] | None = option(None, "position embedding", unset="`learned`")
    activation: Literal["gelu", "swiglu"] | None = option(None, "the MLP's activation", unset="`gelu`")
    norm: Literal["layernorm", "rmsnorm"] | None = option(None, "kind of norm", unset="`layernorm`")
    bias: bool | None = option(None, "whether linears and norms have biases", unset="`true`")
    tie_embeddings: bool | None = option(
        None, "whether the output layer shares the embedding's weights", unset="`true`"
    )
    dropout: float | None = option(
        None, "dropout probability", unset="`0`, or the value in the folder of `model.path`", ge=0, lt=1
    )
    num_experts: int | None = option(
        None, "number of experts in a block with a mixture of experts ([experts.md](experts.md)); the options below "
        "apply only to mixtures of experts", unset="a dense model", ge=1, le=MAX_EXPERTS,
    )  # fmt: skip
    experts_per_token: int | None = option(
        None, "number of experts that process each token", unset="2", ge=1, le=MAX_EXPERTS
    )
    expert_ffn: int | None = option(None, "inner width of an expert", unset="`model.ffn`", ge=1, le=4 * MAX_WIDTH)
    shared_ffn: int | None = option(
        None, "inner width of an additional MLP that processes every token (shared experts)", ge=1,
        le=4 * MAX_WIDTH,
    )  # fmt: skip
    shared_expert_gate: bool | None = option(
        None, "whether a sigmoid of a linear scales the output of the shared experts", unset="`false`"
    )
    moe_layers: str | list[int] | None = option(
        None, "blocks that have experts: `all`, `every:N` (`every:2`: 1, 3, 5, ...), `from:N` (N and all after it) or "
        "a list of their numbers, from 0", unset="`all`",
    )  # fmt: skip
    router_scores: Literal["softmax", "sigmoid"] | None = option(
        None, "function that computes scores from the router's logits", unset="`softmax`"
    )
    normalize_expert_weights: bool | None = option(
        None,
        "whether the weights of a token's experts are divided by their sum",
        unset="true with several experts per token",
    )
    expert_weight_scale: float | None = option(None, "factor of the weights of a token's experts", unset="`1`", gt=0)
    expert_groups: int | None = option(
        None, "number of groups of experts; for each token the router first chooses `model.groups_per_token` of them",
        unset="`1`", ge=1, le=MAX_EXPERTS,
    )  # fmt: skip
    groups_per_token: int | None = option(
        None, "number of groups from which a token's experts are chosen", unset="`1`", ge=1, le=MAX_EXPERTS
    )
    balance: Literal["switch", "sequence", "bias", "none"] | None = option(  # "none" is a value of its own
        None, "load balancing: the `switch` loss over all tokens of a micro-batch, a loss over each `sequence`, or a "
        "`bias` that is added to scores only when experts are chosen, without a loss", unset="`switch`",
    )  # fmt: skip
    balance_loss: float | None = option(
        None, "coefficient of that loss; with `bias`, of an additional loss over each sequence",
        unset="`0.01` for switch, `0.0001` for sequence, `0` for bias", ge=0,
    )  # fmt: skip
    bias_rate: float | None = option(
        None, "balance bias: how much a bias changes in an optimizer step", unset="`0.001`", ge=0
    )
    z_loss: float | None = option(
        None, "coefficient of the router's z-loss, which keeps its logits small", unset="`0`", ge=0
    )
    capacity_factor: float | None = option(
        None, "most tokens of an expert in a training step's micro-batch, as a multiple of the mean over experts; "
        "others are dropped", unset="no token is dropped", gt=0,
    )  # fmt: skip

    def to_gpt(self, *, data_vocab: int, seq_len: int) -> "GPTConfig":
        """Build the model's shape. `data_vocab` and `seq_len` apply where neither the file nor the preset says.

        Raises ValueError when the numbers do not fit together.
        """
        from stretto.models import GPTConfig  # torch is imported here and not when a file is read

        given = self._shape()
        if self.name is not None:
            return GPTConfig.preset(self.name, **given)
        return GPTConfig(**{"vocab": data_vocab, "max_seq_len": seq_len} | given)

    def known_vocab(self) -> int | None:
        """The vocabulary size that the file or the preset sets; None leaves it to the data."""
        if self.vocab is not None or self.name is None:
            return self.vocab
        if self.name in PUBLIC_MODELS:
            return int(PUBLIC_MODELS[self.name]["vocab_size"])
        from stretto.models import GPTConfig

        return GPTConfig.preset(self.name).vocab

    def _shape(self) -> dict[str, Any]:
        """The options of a GPT that the file sets."""
        return {name: value for name, value in self if value is not None and name not in ("name", "path")}

    @model_validator(mode="after")
    def _has_a_shape(self) -> "ModelConfig":
        if self.path is not None or self.name in PUBLIC_MODELS:
            shape = {name: value for name, value in self._shape().items() if (name, value) != ("dropout", 0)}
            given = f"model.name is {self.name!r}, a public model"
            if self.path is not None:
                shape |= {} if self.name is None else {"name": self.name}
                given = f"model.path is {self.path!r}, whose config.json describes the model"
            if shape:
                others = ", ".join(f"model.{name}={value!r}" for name, value in shape.items())
                raise ValueError(
                    f"{given}, and {others} would change it: leave out one of the two (of dropout, model.dropout=0 "
                    "would do)"
                )
            return self
        missing = [f"model.{name}" for name in ("layers", "hidden", "heads") if getattr(self, name) is None]
        if self.name is None and missing:
            raise ValueError(
                f"{are_missing(missing)}: give model.layers, model.hidden and model.heads, "
                "or a preset such as model.name='gpt2-small'"
            )
        return self
