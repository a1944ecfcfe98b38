# SPDX-License-Identifier: Apache-2.0
"""Opens folders as `save_pretrained` writes them: configuration, weights and tokenizer. Builds models of them.

torch and transformers are imported only before a model is built, so that a wrong folder raises an error immediately.
Nothing is ever downloaded, and no code of a folder is run.
"""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cluster import read_bounded

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

MAX_CONFIG_BYTES = 1 << 20
WEIGHTS_FILES = ("model.safetensors", "model.safetensors.index.json")
# Other files of a folder besides weights and config.json: tokenizer, chat template and generation configuration.
OTHER_FILES = ("*token*", "*.model", "vocab*", "merges.txt", "*chat_template*", "tekken.json", "generation_config.json")


def require_transformers(option: str, value: str) -> None:
    """Raise ValueError if an option of `model` needs transformers, and it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"model.{option} is {value!r}, but the package transformers is not installed: "
            "pip install 'stretto[huggingface]'"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json. Raises ValueError for a folder without one, and for another file."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: is no Hugging Face folder: it has no config.json")
    try:
        config = json.loads(read_bounded(path, MAX_CONFIG_BYTES, "a model's configuration"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is no configuration: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path}: is no configuration of a model: it has no text model_type")
    return config


def find_weights(folder: Path) -> Path | None:
    """The file with a folder's weights, or the index of several; None if it has neither."""
    return next((folder / name for name in WEIGHTS_FILES if (folder / name).is_file()), None)


def require_weights(folder: Path) -> Path:
    """Find a folder's weights. Raises ValueError if it has none that are safetensors."""
    found = find_weights(folder)
    if found is None:
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = (
            f"; {others[0]} is a pickle, which can run code and is not read: load it with transformers where you trust "
            "it, and write it with save_pretrained"
            if others
            else ""
        )
        raise ValueError(f"{folder}: has no weights: neither {' nor '.join(WEIGHTS_FILES)}{hint}")
    return found


def config_of_export(config: Mapping[str, Any], dtype: str | None) -> tuple[dict[str, Any], str]:
    """The config.json of a folder that is written anew, and the dtype of its weights (by default the configuration's).

    Weights that were quantized are written in bfloat16, without their quantization_config.
    """
    config = dict(config)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    default = "float32" if config.pop("quantization_config", None) is None else "bfloat16"
    config[key] = dtype or config.get(key) or default
    return config, config[key]


def build_causal_lm(origin: str, source: Path | Mapping[str, Any], *, without_dropout: bool = False) -> "nn.Module":
    """Build transformers' causal language model of a folder, or of the entries of a config.json: on meta, in fp32.

    origin: what messages call it. without_dropout: set all dropout probabilities of the configuration to 0. Raises
    ValueError where transformers cannot build it, and for a model whose loss does not take the targets of the global
    batch.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stretto.huggingface.loss import require_given_targets

    try:
        if isinstance(source, Path):
            config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        else:
            config = AutoConfig.for_model(**source)
        if hasattr(config, "quantization_config"):  # weights are dequantized as they are read
            del config.quantization_config
        if without_dropout:
            for name, value in config.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(config, name, 0.0)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{origin}: transformers builds no causal language model of it: {reason}") from error
    require_given_targets(model)
    return model.train()


def load_tokenizer_of(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a Hugging Face model's folder, as transformers does. Nothing is downloaded, no code run.

    Raises ValueError for a folder without one, for one that is not of the package tokenizers, and without transformers.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"the tokenizer of the folder {folder} needs the package transformers: pip install 'stretto[huggingface]'"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of any kind, as the files are
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{folder}: transformers loads no tokenizer from this folder: {reason}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(
            f"{folder}: its {type(tokenizer).__name__} is not of the package tokenizers: write a tokenizer.json, and "
            "name it as the tokenizer"
        )
    return tokenizer
