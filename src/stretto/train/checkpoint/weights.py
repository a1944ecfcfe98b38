# SPDX-License-Identifier: Apache-2.0
"""Exports and imports weights as safetensors, which other libraries read, under the model's own names and shapes.

torch is imported once a checkpoint or a file has been found, so that a wrong path is refused at once.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cluster import read_bounded
from stretto.train.checkpoint.folders import resolve_checkpoint
from stretto.train.checkpoint.metadata import TensorEntry, first_difference
from stretto.train.checkpoint.torch_format import read_index

if TYPE_CHECKING:
    from torch import nn

FOLDER_FILE_BYTES = 5 * 10**9
MAX_INDEX_BYTES = 1 << 26  # a tensor takes about 100
_SAFETENSORS_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes
# What a folder has beside weights and config.json: tokenizer and chat template, and how to generate.
_COPIED = ("*token*", "*.model", "vocab*", "merges.txt", "*chat_template*", "tekken.json", "generation_config.json")


@dataclass(frozen=True)
class _Weight:
    """A tensor of a checkpoint and the dtype in which it is written."""

    entry: TensorEntry
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.entry.shape) * _ITEMSIZES[self.dtype]


def export_safetensors(
    checkpoint: Path,
    file: Path,
    *,
    max_file_bytes: int | None = None,
    dtype: str | None = None,
    names: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a checkpoint's weights to `file`, and return the paths of all files written.

    Runs in one process and holds one tensor at a time. checkpoint: the folder of a checkpoint, or of a run whose newest
    one is taken. max_file_bytes: larger models are split over several files with an index, as Hugging Face's libraries
    write it. dtype: "float64", "float32", "float16" or "bfloat16" (default: the checkpoint's). names: in the file, of
    weights whose names are to be others. Tied weights are written once. Raises ValueError for an incomplete checkpoint.
    """
    if file.suffix != ".safetensors":
        raise ValueError(f"{file} does not end in .safetensors; {file.with_suffix('.safetensors')} would do")
    if dtype is not None and dtype not in _SAFETENSORS_DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but must be one of {', '.join(_SAFETENSORS_DTYPES)}")
    path = resolve_checkpoint(checkpoint)
    own = {
        name.removeprefix("model."): _Weight(entry, dtype or entry.dtype)
        for name, entry in read_index(path).tensors.items()
        if name.startswith("model.")
    }
    weights = {(names or {}).get(name, name): weight for name, weight in own.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = _split(weights, max_file_bytes)
    if len(parts) == 1:
        _write_file(path, file, parts[0])
        return [file]
    files = [f"{file.stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(files, parts, strict=True):
        _write_file(path, file.with_name(name), part)
    index = file.with_name(f"{file.name}.index.json")
    weight_map = {tensor: name for name, part in zip(files, parts, strict=True) for tensor in part}
    total = sum(weight.num_bytes for weight in weights.values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    return [*(file.with_name(name) for name in files), index]


def export_folder(
    checkpoint: Path,
    folder: Path,
    *,
    max_file_bytes: int | None = None,
    dtype: str | None = None,
    pretrained: Path | None = None,
) -> list[Path]:
    """Write a fine-tuned Hugging Face model as a folder that `from_pretrained` loads, and return the files' paths.

    The weights (see `export_safetensors`), config.json from the checkpoint, and the files of tokenizer and generation
    from the folder that training started from, or from `pretrained`. dtype: by default that of config.json, float32
    where it says none. max_file_bytes: by default FOLDER_FILE_BYTES. The folder appears once it is complete.

    Raises ValueError for a folder that exists and is not empty, for a checkpoint of another kind of model, and if the
    folder that training started from is not there.
    """
    path = resolve_checkpoint(checkpoint)
    index = read_index(path)
    model = index.model
    if model.get("kind") != "huggingface":
        raise ValueError(
            f"{path} is not of a Hugging Face model, whose folder could be written: --to {folder.name}.safetensors "
            "would do"
        )
    if not isinstance(model.get("config"), dict) or not isinstance(model.get("path"), str):
        raise ValueError(f"{path} is damaged: its index does not have the model's config and path")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: name another one")
    source = Path(model["path"]) if pretrained is None else pretrained
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} is not the Hugging Face folder that training started from, which has the tokenizer's files: "
            "name where it is with --pretrained"
        )
    names = _names_to_export(index.tensors, source)
    config = dict(model["config"])
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = dtype or config.get(key) or "float32"
    unfinished = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    export_safetensors(
        path,
        unfinished / "model.safetensors",
        max_file_bytes=max_file_bytes or FOLDER_FILE_BYTES,
        dtype=config[key],
        names=names,
    )
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in _COPIED:
        for each in source.glob(pattern):
            if each.is_dir():
                shutil.copytree(each, unfinished / each.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(each, unfinished / each.name)
    unfinished.replace(folder)
    return sorted(each for each in folder.rglob("*") if each.is_file())


def import_safetensors(model: "nn.Module", file: Path) -> None:
    """Fill the model's parameters from `file`: a .safetensors file, or the .index.json of several.

    `model` is plain or returned by `parallelize`: each rank reads only its own part, and converts it to the dtype of
    its parameters. A tied weight may have any of its names in the file. Of a Hugging Face model, names may have or lack
    the prefix of the model without its head, as in files of either of the two, and what its class says to ignore is
    ignored. Raises ValueError, before anything is changed, for a file that is not safetensors, and for the first
    parameter that is missing, unexpected or of another shape.
    """
    import torch

    from stretto.parallel.pipeline.stages import whole_model
    from stretto.train.checkpoint.state import sharded_state_of

    with _open_weights(whole_model(model), file) as sources, torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, source in sources:
            if name not in parameters:  # another pipeline stage has it
                continue
            for held in sharded_state_of(parameters[name]).boxes:
                box = zip(held.offsets, held.values.shape, strict=True)
                held.values.copy_(source[tuple(slice(start, start + length) for start, length in box)])


def check_safetensors(model: "nn.Module", file: Path) -> None:
    """Raise the ValueError that `import_safetensors` would. Reads no weights; the model may be on the meta device."""
    with _open_weights(model, file):
        pass


@contextmanager
def _open_weights(model: "nn.Module", file: Path) -> Iterator[list[tuple[str, Any]]]:
    """Open the slices of the file's tensors, each with the name of the model's parameter that it is for."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        sources: dict[str, Any] = {}
        for part in _files_of(file):
            try:
                opened = stack.enter_context(safe_open(part, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{part} cannot be read as safetensors: {error}") from error
            sources |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  (no mapping)
        names = _names_in_file(model, sources)
        ignored = _ignored_names(model)
        found = {
            names.get(name, name): tuple(source.get_shape())
            for name, source in sources.items()
            if name in names or not any(re.search(pattern, name) for pattern in ignored)
        }
        wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        if difference := first_difference(found, wanted):
            raise ValueError(f"{file} is of another model: {difference}")
        yield [(name, sources[name_there]) for name_there, name in names.items()]


def _names_in_file(model: "nn.Module", sources: Mapping[str, Any]) -> dict[str, str]:
    """Map the file's names of the model's parameters to the names that `named_parameters` gives them."""
    own_name = {parameter: name for name, parameter in model.named_parameters()}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # of Hugging Face's models
    names = {}
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        for spelling in (alias, f"{prefix}{alias}", alias.removeprefix(prefix)):
            if spelling in sources:
                names[spelling] = own_name[parameter]
                break
    return names | _renamed_in_file(model, [name for name in sources if name not in names])


def _renamed_in_file(model: "nn.Module", names: Iterable[str]) -> dict[str, str]:
    """Map names of a file to those of the model's parameters, where transformers renames them as it loads the file.

    GPT-NeoX's files say embed_out for lm_head. Conversions that compute with tensors are not applied.
    """
    if not hasattr(model, "base_model_prefix"):
        return {}
    try:
        from transformers.conversion_mapping import WeightRenaming, get_model_conversion_mapping
    except ImportError:  # transformers before 5, which has no such names
        return {}
    transformers_model: Any = model
    renamings = [each for each in get_model_conversion_mapping(transformers_model) if type(each) is WeightRenaming]
    own_name = {parameter: name for name, parameter in model.named_parameters()}
    own = {alias: own_name[parameter] for alias, parameter in model.named_parameters(remove_duplicate=False)}
    found = {}
    for name in names:
        renamed = name
        for each in renamings:
            renamed = each.rename_source_key(renamed)[0]
        if renamed != name and renamed in own:
            found[name] = own[renamed]
    return found


def _names_to_export(tensors: Mapping[str, Any], source: Path) -> dict[str, str]:
    """The names in the folder that training started from of parameters that have been renamed when it was read."""
    from safetensors import safe_open

    from stretto.train.gpt.model_source import WEIGHTS, FolderSource

    file = next((source / name for name in WEIGHTS if (source / name).is_file()), None)
    if file is None:
        return {}
    names: list[str] = []
    for part in _files_of(file):
        with safe_open(part, framework="pt", device="cpu") as opened:
            names += opened.keys()
    left = [name for name in names if f"model.{name}" not in tensors]
    renamed = _renamed_in_file(FolderSource(str(source)).build(), left) if left else {}
    return {own: name for name, own in renamed.items()}


def _ignored_names(model: "nn.Module") -> list[str]:
    """Patterns of tensors that a Hugging Face model's files may have beside its parameters, as its class says."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def _files_of(file: Path) -> list[Path]:
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    if file.suffix != ".json":
        return [file]
    text = read_bounded(file, MAX_INDEX_BYTES, "an index of safetensors files")
    try:
        weight_map = json.loads(text)["weight_map"]
        names = sorted({Path(str(name)).name for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not an index of safetensors files: {error!r}") from error
    return [file.with_name(name) for name in names]


def _split(weights: Mapping[str, _Weight], max_bytes: int | None) -> Sequence[Mapping[str, _Weight]]:
    """Split tensors in order into as few parts of at most `max_bytes` as possible; a larger tensor is a part alone."""
    parts: list[dict[str, _Weight]] = [{}]
    size = 0
    for name, weight in weights.items():
        if max_bytes is not None and parts[-1] and size + weight.num_bytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = weight
        size += weight.num_bytes
    return parts


def _write_file(checkpoint: Path, file: Path, weights: Mapping[str, _Weight]) -> None:
    """Write one safetensors file: the length of the header, the header, then each tensor's bytes in order.

    The library's own writer needs all tensors in memory at once.
    """
    import torch

    from stretto.train.checkpoint.storage import read_tensor

    header = json.dumps({"__metadata__": {"format": "pt"}} | dict(_header(weights))).encode()
    header += b" " * (-len(header) % 8)  # aligns the tensors' bytes
    unfinished = file.with_name(f".{file.name}.writing")
    with open(unfinished, "wb") as out:
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        for weight in weights.values():
            tensor = read_tensor(checkpoint, weight.entry).to(getattr(torch, weight.dtype))
            out.write(tensor.flatten().view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(unfinished, file)


def _header(weights: Mapping[str, _Weight]) -> Iterator[tuple[str, dict[str, Any]]]:
    start = 0
    for name, weight in weights.items():
        stop = start + weight.num_bytes
        dtype = _SAFETENSORS_DTYPES[weight.dtype]
        yield name, {"dtype": dtype, "shape": list(weight.entry.shape), "data_offsets": [start, stop]}
        start = stop
