# SPDX-License-Identifier: Apache-2.0
"""Exports and imports weights as safetensors, which other libraries read, under the model's own names and shapes.

torch is imported once a checkpoint or a file has been found, so that a wrong path is refused at once.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cluster import read_bounded
from stretto.train.checkpoint.folders import resolve_checkpoint
from stretto.train.checkpoint.metadata import TensorEntry, first_difference, read_metadata

if TYPE_CHECKING:
    from torch import nn

MAX_INDEX_BYTES = 1 << 26  # a tensor takes about 100
_SAFETENSORS_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16"}


def export_safetensors(checkpoint: Path, file: Path, *, max_file_bytes: int | None = None) -> list[Path]:
    """Write a checkpoint's weights to `file`, and return the paths of all files written.

    Runs in one process and holds one tensor at a time. checkpoint: the folder of a checkpoint, or of a run whose newest
    one is taken. max_file_bytes: larger models are split over several files with an index, as Hugging Face's libraries
    write it. Tied weights are written once. Raises ValueError for an incomplete checkpoint.
    """
    if file.suffix != ".safetensors":
        raise ValueError(f"{file} does not end in .safetensors; {file.with_suffix('.safetensors')} would do")
    path = resolve_checkpoint(checkpoint)
    entries = {
        name.removeprefix("model."): entry
        for name, entry in read_metadata(path).tensors.items()
        if name.startswith("model.")
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = _split(entries, max_file_bytes)
    if len(parts) == 1:
        _write_file(path, file, parts[0])
        return [file]
    names = [f"{file.stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        _write_file(path, file.with_name(name), part)
    index = file.with_name(f"{file.name}.index.json")
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    total = sum(_num_bytes(entry) for entry in entries.values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")
    return [*(file.with_name(name) for name in names), index]


def import_safetensors(model: "nn.Module", file: Path) -> None:
    """Fill the model's parameters from `file`: a .safetensors file, or the .index.json of several.

    `model` is plain or returned by `parallelize`: each rank reads only its own part, and converts it to the dtype of
    its parameters. A tied weight may have any of its names in the file. Of a Hugging Face model, names may have or lack
    the prefix of the model without its head, as in files of either of the two, and what its class says to ignore is
    ignored. Raises ValueError, before anything is changed, for a file that is not safetensors, and for the first
    parameter that is missing, unexpected or of another shape.
    """
    import torch

    from stretto.train.checkpoint.state import sharded_state_of

    with _open_weights(model, file) as sources, torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, source in sources:
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
    return names


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


def _split(entries: Mapping[str, TensorEntry], max_bytes: int | None) -> Sequence[Mapping[str, TensorEntry]]:
    """Split tensors in order into as few parts of at most `max_bytes` as possible; a larger tensor is a part alone."""
    parts: list[dict[str, TensorEntry]] = [{}]
    size = 0
    for name, entry in entries.items():
        if max_bytes is not None and parts[-1] and size + _num_bytes(entry) > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = entry
        size += _num_bytes(entry)
    return parts


def _write_file(checkpoint: Path, file: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Write one safetensors file: the length of the header, the header, then each tensor's bytes in order.

    The library's own writer needs all tensors in memory at once.
    """
    import torch

    from stretto.train.checkpoint.storage import read_tensor

    header = json.dumps({"__metadata__": {"format": "pt"}} | dict(_header(entries))).encode()
    header += b" " * (-len(header) % 8)  # aligns the tensors' bytes
    unfinished = file.with_name(f".{file.name}.writing")
    with open(unfinished, "wb") as out:
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        for entry in entries.values():
            tensor = read_tensor(checkpoint, entry)
            out.write(tensor.flatten().view(torch.uint8).numpy().data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(unfinished, file)


def _header(entries: Mapping[str, TensorEntry]) -> Iterator[tuple[str, dict[str, Any]]]:
    start = 0
    for name, entry in entries.items():
        stop = start + _num_bytes(entry)
        dtype = _SAFETENSORS_DTYPES[entry.dtype]
        yield name, {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [start, stop]}
        start = stop


def _num_bytes(entry: TensorEntry) -> int:
    return prod(entry.shape) * entry.itemsize
