# SPDX-License-Identifier: Apache-2.0
"""Loads the architecture of a model from its name, a TOML file, a config.json, or the model itself.

No torch, no transformers: a configuration is read as data.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from stretto.cluster import check_depth, read_bounded, reading
from stretto.huggingface.config_json import read_sizes
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.models.gpt_config import PRESETS, GPTConfig
from stretto.planner.architecture import Architecture
from stretto.planner.experts.layers import LatentShape, MoeShape
from stretto.quantities import check_count
from stretto.suggestions import are_missing, did_you_mean, require_known_options

MAX_FILE_BYTES = 1 << 20


def read_architecture(model: Any, seq_len: int) -> Architecture:
    """The architecture of what `stretto.plan` is given.

    A name (`gpt-20b`, `llama-3-8b`), a GPTConfig, a path (a TOML with [model] or its keys, a Hugging Face config.json
    or the folder of one), a transformers config, or a model that has a `config`. Raises ValueError for what is none of
    these, or is unsupported.
    """
    match model:
        case Architecture():
            return model
        case GPTConfig():
            return from_gpt("model", model)
        case Path():
            return _from_file(model / "config.json" if model.is_dir() else model, seq_len)
        case str() if model in PRESETS:
            return from_gpt(model, PRESETS[model])
        case str() if model in PUBLIC_MODELS:
            return from_hugging_face(model, PUBLIC_MODELS[model])
        case str() if Path(model).suffix in (".toml", ".json") or (Path(model).exists() and not Path(model).is_dir()):
            return _from_file(Path(model), seq_len)
        case str() if (Path(model) / "config.json").is_file():  # a folder of Hugging Face's
            return _from_file(Path(model) / "config.json", seq_len)
        case str():
            names = (*PRESETS, *PUBLIC_MODELS)
            near = did_you_mean(model, names) or "."
            raise ValueError(
                f"no model is named {model!r}{near} Known: {', '.join(names)}; or give the path of a .toml or of a "
                "Hugging Face config.json"
            )
        case Mapping():
            return from_hugging_face("config", model)
    config = getattr(model, "config", model)
    if isinstance(config, GPTConfig):
        return from_gpt(type(model).__name__, config)
    if callable(to_dict := getattr(config, "to_dict", None)):
        return from_hugging_face(type(model).__name__, to_dict(), [each.__name__ for each in type(model).__mro__])
    raise ValueError(
        f"a {type(model).__name__} does not say its sizes: give a name, a GPTConfig, a config.json, or a model that "
        "has one of these as its .config"
    )


def from_hugging_face(name: str, config: Mapping[str, Any], classes: Sequence[str] = ()) -> Architecture:
    """Read a transformers configuration, as its config.json has it, and the head that its `architectures` say.

    classes: names of a model's class and its bases, which say it in place of `architectures`. Raises ValueError
    for a model type whose blocks, or a class whose head, are not known, and for a missing or impossible number.
    """
    sizes = read_sizes(name, config, classes)
    moe, latent = sizes.get("moe"), sizes.get("latent")
    shapes = {"moe": moe and MoeShape(**moe), "latent": latent and LatentShape(**latent)}
    return Architecture(**sizes | shapes)


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
        has_fused_kernels=True,
        takes_sharded_sequence=not config.balances_sequences,
        adds_output=config.dropout == 0,
        positions=config.max_seq_len if config.positions == "learned" else 0,
        **_experts_of_gpt(config),
    )


def _experts_of_gpt(config: GPTConfig) -> dict[str, Any]:
    if config.num_experts is None:
        return {}
    shape = MoeShape(
        config.num_experts,
        config.experts_per_token,
        config.expert_width,
        config.activation == "swiglu",
        config.shared_ffn or 0,
        config.shared_expert_gate,
        has_fused_gates=True,
    )
    blocks = set(config.moe_blocks)
    return {"moe": shape, "moe_pattern": tuple(block in blocks for block in range(config.layers))}


def _from_file(path: Path, seq_len: int) -> Architecture:
    with reading(path, (".toml", ".json")):
        raw = read_bounded(path, MAX_FILE_BYTES, "a model's configuration")
    try:
        text = raw.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    check_depth(values, str(path))
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
    require_known_options(f"{where}: a model", given, types)
    for key, value in given.items():
        _check_option(f"{where}: model.{key}", value, types[key])
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{where}: model.name is {name!r}, but must be a text")
    try:
        if name in PUBLIC_MODELS:
            if given:
                raise ValueError(f"{where}: model.name is {name!r}, a public model, which takes no other options")
            return from_hugging_face(name, PUBLIC_MODELS[name])
        if name is not None:
            config = GPTConfig.preset(name, **given)
        else:
            if missing := [f"model.{key}" for key in ("layers", "hidden", "heads", "vocab") if key not in given]:
                raise ValueError(f"{are_missing(missing)}: without model.name, a model must have them")
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
        check_count(where, value)
    elif isinstance(value, bool) != (kind is bool) or not isinstance(value, int | float if kind is float else kind):
        raise ValueError(f"{where} is {value!r}, but must be a {'number' if kind is float else 'truth value'}")
