"""What a planner has to know of a transformer: the numbers, whether or not there is a model.

They come from a name of Table 5.1, from a TOML file, from a Hugging Face config.json, or from a model that is there.
No torch, no transformers: a configuration is read as data.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, get_args, get_type_hints

from stretto.cluster import read_bounded
from stretto.models.config import PRESETS, GPTConfig

MAX_FILE_BYTES = 1 << 20
LARGEST = 10**9  # of any count: products of a few stay exact and cheap

_GPT2 = ("gpt2",)


@dataclass(frozen=True)
class _Family:
    """What a model_type adds to Llama's block: attention of four linears (q, k, v, o), then a gated MLP, and norms.

    Biases are there always (True), never, or as the entry of this name in the configuration says. `block_norms` counts
    a block's norms of hidden features that have weights. `head_norms`: whether queries and keys are normalized, over
    one head ("head") or all of them ("all", or as the entry of this name says). `defaults`: what transformers takes
    where a configuration is silent.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    block_norms: int = 2
    head_norms: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)


_GATED = {
    "llama": _Family("attention_bias", "attention_bias", "mlp_bias"),
    "mistral": _Family(defaults={"num_key_value_heads": 8}),
    "qwen2": _Family(True, defaults={"num_key_value_heads": 32}),
    "qwen3": _Family(
        "attention_bias", "attention_bias", head_norms="head", defaults={"num_key_value_heads": 32, "head_dim": 128}
    ),
    "gemma": _Family(
        "attention_bias",
        "attention_bias",
        defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    ),
    "gemma2": _Family(
        "attention_bias",
        "attention_bias",
        block_norms=4,
        defaults={"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    ),
    "phi3": _Family(),
    "olmo": _Family("attention_bias", "attention_bias", block_norms=0),
    "olmo2": _Family("attention_bias", "attention_bias", head_norms="all"),
    "granite": _Family("attention_bias", "attention_bias", "mlp_bias"),
    "cohere": _Family(
        "attention_bias",
        "attention_bias",
        block_norms=1,
        head_norms="use_qk_norm",
        defaults={"tie_word_embeddings": True},
    ),
    "glm": _Family("attention_bias", defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True}),
}


@dataclass(frozen=True)
class Linear:
    """One linear of a block: `inputs` is k and `outputs` is n of paper 003's equations.

    A swapped one ("transposed" in the paper) sums its output over x and its input's gradient over y. Outputs stand in
    `units` that are not cut (heads), or are as many as they (1 feature a unit).
    """

    name: str
    inputs: int
    outputs: int
    is_swapped: bool
    has_bias: bool
    units: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder-only transformer. Whole-model counts, whatever grid it will run on.

    `fuses_qkv`: one linear makes queries, keys and values, otherwise three do. `positions` counts the rows of a learned
    position embedding (0: none). `is_rotary`: queries and keys are turned, which copies them. `block_norms` counts a
    block's norms of hidden features that have weights (where there are none, the last norm has none either), and
    `head_norm_weights` the weights of those of its queries and keys.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    is_gated: bool = False
    fuses_qkv: bool = True
    has_qkv_bias: bool = True
    has_out_bias: bool = True
    has_mlp_bias: bool = True
    has_norm_bias: bool = True
    is_tied: bool = True
    is_rotary: bool = False
    positions: int = 0
    block_norms: int = 2
    head_norm_weights: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 0 if each.default is not MISSING else 1
            if each.type is int and not least <= value <= LARGEST:
                raise ValueError(f"{self.name}: {each.name} is {value}, but must be from {least} to {LARGEST}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.kv_heads} KV heads do not divide {self.heads} heads")

    @property
    def queries(self) -> int:
        """Features of all queries: heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Features of all keys, and of all values: KV heads x head_dim."""
        return self.kv_heads * self.head_dim

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linears of one block, in order. The head is not among them."""
        hidden, kv = self.hidden, self.kv_heads
        if self.fuses_qkv:
            attention = [Linear("qkv", hidden, self.queries + 2 * self.keys, False, self.has_qkv_bias, kv)]
        else:
            attention = [
                Linear("q", hidden, self.queries, False, self.has_qkv_bias, self.heads),
                Linear("k", hidden, self.keys, False, self.has_qkv_bias, kv),
                Linear("v", hidden, self.keys, False, self.has_qkv_bias, kv),
            ]
        ups = ("gate", "up") if self.is_gated else ("up",)
        return (
            *attention,
            Linear("out", self.queries, hidden, True, self.has_out_bias, hidden),
            *(Linear(name, hidden, self.ffn, False, self.has_mlp_bias, self.ffn) for name in ups),
            Linear("down", self.ffn, hidden, True, self.has_mlp_bias, hidden),
        )

    @property
    def linear_weights(self) -> int:
        """Weights of all blocks' linears, without head and biases."""
        return self.layers * sum(linear.weights for linear in self.linears)

    @property
    def parameters(self) -> int:
        """All of the model's parameters; tied weights count once."""
        biases = sum(linear.outputs for linear in self.linears if linear.has_bias)
        embeddings = self.vocab * self.hidden * (1 if self.is_tied else 2) + self.positions * self.hidden
        return self.linear_weights + self.layers * (biases + self.head_norm_weights) + self.norm_parameters + embeddings

    @property
    def norm_parameters(self) -> int:
        """Weights and biases of all norms of hidden features."""
        norms = self.layers * self.block_norms + (1 if self.block_norms else 0)
        return norms * self.hidden * (2 if self.has_norm_bias else 1)


def read_architecture(model: Any, seq_len: int) -> Architecture:
    """The architecture of what `stretto.plan` is given.

    A name (`gpt-20b`), a GPTConfig, a path (a TOML with [model] or its keys, or a Hugging Face config.json), a
    transformers config, or a model that has a `config`. Raises ValueError for what is none of these, or is unsupported.
    """
    match model:
        case Architecture():
            return model
        case GPTConfig():
            return from_gpt("model", model)
        case Path():
            return _from_file(model, seq_len)
        case str() if model in PRESETS:
            return from_gpt(model, PRESETS[model])
        case str() if Path(model).suffix in (".toml", ".json") or Path(model).exists():
            return _from_file(Path(model), seq_len)
        case str():
            near = get_close_matches(model, PRESETS, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"no model is named {model!r}; did you mean {near!r}? Known: {', '.join(PRESETS)}; or give the path of "
                "a .toml or of a Hugging Face config.json"
            )
        case Mapping():
            return from_hugging_face("config", model)
    config = getattr(model, "config", model)
    if isinstance(config, GPTConfig):
        return from_gpt(type(model).__name__, config)
    if callable(to_dict := getattr(config, "to_dict", None)):
        return from_hugging_face(type(model).__name__, to_dict())
    raise ValueError(
        f"a {type(model).__name__} does not say its sizes: give a name, a GPTConfig, a config.json, or a model that "
        "has one of these as its .config"
    )


def from_gpt(name: str, config: GPTConfig) -> Architecture:
    """Stretto's own GPT."""
    return Architecture(
        name=name,
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn_width,
        vocab=config.vocab,
        is_gated=config.activation == "swiglu",
        has_qkv_bias=config.bias,
        has_out_bias=config.bias,
        has_mlp_bias=config.bias,
        has_norm_bias=config.bias and config.norm == "layernorm",
        is_tied=config.tie_embeddings,
        is_rotary=config.positions == "rotary",
        positions=config.max_seq_len if config.positions == "learned" else 0,
    )


def from_hugging_face(name: str, config: Mapping[str, Any]) -> Architecture:
    """A language model's transformers configuration, as its config.json has it.

    Raises ValueError for a model type whose blocks are not known here, and for a missing or impossible number.
    """
    kind = config.get("model_type")
    if any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise ValueError(f"{name}: a mixture of experts cannot be planned yet")
    if config.get("per_layer_config"):
        raise ValueError(f"{name}: layers of different sizes (per_layer_config) cannot be planned yet")
    if config.get("add_cross_attention"):
        raise ValueError(f"{name}: cross-attention cannot be planned yet")
    if kind in _GPT2:
        hidden, heads = _count(config, "n_embd", name), _count(config, "n_head", name)
        return Architecture(
            name=name,
            layers=_count(config, "n_layer", name),
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=_divide(hidden, heads, name),
            ffn=_count(config, "n_inner", name, 4 * hidden),
            vocab=_count(config, "vocab_size", name),
            is_tied=_is_set(config, "tie_word_embeddings", name, True),
            positions=_count(config, "n_positions", name),
        )
    if kind not in _GATED:
        known = ", ".join((*_GPT2, *_GATED))
        raise ValueError(f"{name}: model_type is {kind!r}, whose blocks are not known to the planner; known: {known}")
    return _from_gated(name, _GATED[kind], {**_GATED[kind].defaults, **config})


def _from_gated(name: str, family: _Family, config: Mapping[str, Any]) -> Architecture:
    hidden, heads = _count(config, "hidden_size", name), _count(config, "num_attention_heads", name)
    kv_heads = _count(config, "num_key_value_heads", name, heads)
    head_dim = _count(config, "head_dim", name) if config.get("head_dim") else _divide(hidden, heads, name)

    def has(bias: bool | str) -> bool:
        return _is_set(config, bias, name) if isinstance(bias, str) else bias

    match family.head_norms:
        case "head":
            head_norm_weights = 2 * head_dim
        case "all":
            head_norm_weights = (heads + kv_heads) * head_dim
        case option:
            head_norm_weights = (heads + kv_heads) * head_dim if _is_set(config, option, name) else 0
    return Architecture(
        name=name,
        layers=_count(config, "num_hidden_layers", name),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_count(config, "intermediate_size", name),
        vocab=_count(config, "vocab_size", name),
        is_gated=True,
        fuses_qkv=False,
        has_qkv_bias=has(family.qkv_bias),
        has_out_bias=has(family.out_bias),
        has_mlp_bias=has(family.mlp_bias),
        has_norm_bias=False,
        is_tied=_is_set(config, "tie_word_embeddings", name),
        is_rotary=True,
        block_norms=family.block_norms,
        head_norm_weights=head_norm_weights,
    )


def _from_file(path: Path, seq_len: int) -> Architecture:
    try:
        raw = read_bounded(path, MAX_FILE_BYTES, "a model's configuration")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    try:
        text = raw.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: holds no table of options")
    if path.suffix == ".json":
        return from_hugging_face(str(path), values)
    section = values.get("model", values)
    if not isinstance(section, dict):
        raise ValueError(f"{path}: model = {section!r}, but must be a table")
    return _from_table(str(path), section, seq_len)


def _from_table(where: str, table: dict[str, Any], seq_len: int) -> Architecture:
    """A [model] section as `stretto train` has it; a vocabulary that it leaves to the data is not known here."""
    given = {key: value for key, value in table.items() if value != "none"}
    name = given.pop("name", None)
    types = get_type_hints(GPTConfig)
    for key, value in given.items():
        if key not in types:
            near = get_close_matches(key, types, n=1, cutoff=0.0)[0]
            raise ValueError(f"{where}: a model has no option {key!r}; did you mean {near!r}?")
        _check_option(f"{where}: model.{key}", value, types[key])
    try:
        if name is not None:
            config = GPTConfig.preset(str(name), **given)
        else:
            if missing := [key for key in ("layers", "hidden", "heads", "vocab") if key not in given]:
                raise ValueError(f"model.{missing[0]} is missing, and without model.name it must be there")
            config = GPTConfig(**{"max_seq_len": seq_len} | given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return from_gpt(str(name or Path(where).stem), config)


def _check_option(where: str, value: Any, annotation: Any) -> None:
    """Raise ValueError unless a value is of the type that GPTConfig declares for it."""
    choices = [argument for argument in get_args(annotation) if argument is not type(None)]
    if choices and not isinstance(choices[0], type):
        if value not in choices:
            raise ValueError(f"{where} is {value!r}, but must be one of {', '.join(map(repr, choices))}")
        return
    kind = choices[0] if choices else annotation
    if kind is int:
        _check_count(where, value)
    elif isinstance(value, bool) != (kind is bool) or not isinstance(value, int | float if kind is float else kind):
        raise ValueError(f"{where} is {value!r}, but must be a {'number' if kind is float else 'truth value'}")


def _check_count(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise ValueError(f"{where} is {value!r}, but must be a whole number from 1 to {LARGEST}")


def _count(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    _check_count(f"{where}: {key}", value)
    assert value is not None
    return value


def _is_set(config: Mapping[str, Any], key: str, where: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {key} is {value!r}, but must be a truth value")
    return default if value is None else value


def _divide(hidden: int, heads: int, where: str) -> int:
    if hidden % heads:
        raise ValueError(f"{where}: {heads} heads do not divide the hidden size {hidden}")
    return hidden // heads
