# SPDX-License-Identifier: Apache-2.0
"""Exports a checkpoint's weights as safetensors, which other libraries read, or as a folder of Hugging Face's.

torch is imported only after a checkpoint has been found, so that a wrong path is reported immediately.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.atomic_files import naming_file, write_atomically
from stretto.huggingface.folder import (
    OTHER_FILES,
    build_causal_lm,
    config_of_export,
    find_weights,
    require_transformers,
    require_weights,
)
from stretto.huggingface.weight_names import is_kept_in_fp32, match_names
from stretto.suggestions import require_one_of
from stretto.train.checkpoint.file_tensors import FLOATS, INTEGERS, PlainTensor, with_scales
from stretto.train.checkpoint.folders import checkpoint_before, resolve_checkpoint, warn_once
from stretto.train.checkpoint.integrity import DamagedError
from stretto.train.checkpoint.metadata import ITEMSIZES, TensorEntry, first_names, saved_tensors
from stretto.train.checkpoint.safetensors_checksums import digits_of, make_header, read_header, seal_index
from stretto.train.checkpoint.torch_format import read_index
from stretto.train.checkpoint.weights import files_of_index, untie_as_in

if TYPE_CHECKING:
    from torch import Tensor

FOLDER_FILE_BYTES = 5 * 10**9
_SAFETENSORS_DTYPES = {name: code for code, name in FLOATS.items()}
_INTEGERS = {name: code for code, name in INTEGERS.items()}


@dataclass(frozen=True)
class _Weight:
    """A tensor to write: a tensor of a checkpoint, or a part of one, and the dtype in which it is written.

    name: in the checkpoint. part: of the rows of one index of dim 0, which ones: (index, start, length); None for the
    whole tensor.
    """

    name: str
    entry: TensorEntry
    dtype: str
    part: tuple[int, int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape if self.part is None else (self.part[2], *self.entry.shape[2:])

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEMSIZES[self.dtype]

    def of(self, whole: "Tensor") -> "Tensor":
        if self.part is None:
            return whole
        index, start, length = self.part
        return whole[index, start : start + length]


def export_safetensors(
    checkpoint: Path, file: Path, *, max_file_bytes: int | None = None, dtype: str | None = None
) -> list[Path]:
    """Write a checkpoint's weights to `file`, and return the paths of all files written.

    Runs in one process and holds one tensor at a time. checkpoint: the folder of a checkpoint, or of a run whose newest
    one is taken. max_file_bytes: larger models are split over several files with an index, as Hugging Face's libraries
    write it. dtype: "float64", "float32", "float16" or "bfloat16" (default: the checkpoint's). Tied weights are
    written once. What is read is checked: of a run, a damaged checkpoint is passed over with a warning. Raises
    ValueError for one that is incomplete, or named and damaged.
    """
    if file.suffix != ".safetensors":
        raise ValueError(f"{file} does not end in .safetensors; {file.with_suffix('.safetensors')} would do")
    if dtype is not None:
        require_one_of(_SAFETENSORS_DTYPES, dtype=dtype)

    def write(path: Path) -> list[Path]:
        return _write_files(path, file, _weights_of(read_index(path).tensors, dtype), max_file_bytes)

    return _export_newest(checkpoint, write)


def _export_newest(checkpoint: Path, write: Callable[[Path], list[Path]]) -> list[Path]:
    """Call `write` with a checkpoint: the one that is named, or of a run the newest that turns out to be whole."""
    path = resolve_checkpoint(checkpoint)
    while True:
        try:
            return write(path)
        except DamagedError as error:
            message, before = str(error), checkpoint_before(path)
            if path == checkpoint or before is None:
                advice = "there is none before it" if before is None else f"the checkpoint before it is {before}"
                raise DamagedError(f"{message}; {advice}") from error
        warn_once(f"passing over a checkpoint that is damaged, and taking {before}: {message}")
        path = before


def _weights_of(tensors: Mapping[str, TensorEntry], dtype: str | None) -> dict[str, _Weight]:
    return {
        name.removeprefix("model."): _Weight(
            name, entry, dtype if dtype and entry.dtype not in _INTEGERS else entry.dtype
        )
        for name, entry in tensors.items()
        if name.startswith("model.")
    }


def _write_files(path: Path, file: Path, weights: Mapping[str, _Weight], max_file_bytes: int | None) -> list[Path]:
    """Write weights of the checkpoint at `path` to `file`, or to several files like it with an index."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = _split(weights, max_file_bytes)
    names = [file.name]
    if len(parts) > 1:
        names = [f"{file.stem}-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    files = [file.with_name(name) for name in names]
    unfinished = [file.with_name(f".{name}.writing") for name in names]
    try:
        for each, final, part in zip(unfinished, files, parts, strict=True):
            with naming_file(final):
                _write_file(path, each, part)
    except BaseException:
        for each in unfinished:
            each.unlink(missing_ok=True)
        raise
    for each, final in zip(unfinished, files, strict=True):
        os.replace(each, final)
    if len(parts) == 1:
        return files
    index = file.with_name(f"{file.name}.index.json")
    weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
    total = sum(weight.num_bytes for weight in weights.values())
    write_atomically(index, seal_index({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return [*files, index]


def export_folder(
    checkpoint: Path,
    folder: Path,
    *,
    max_file_bytes: int | None = None,
    dtype: str | None = None,
    pretrained: Path | None = None,
) -> list[Path]:
    """Write a fine-tuned Hugging Face model as a folder that `from_pretrained` loads, and return the files' paths.

    The weights (see `export_safetensors`) under the names that they had in the folder that training started from, or
    in `pretrained`, with one tensor for each expert where it has that; config.json from the checkpoint; and the
    folder's files of tokenizer and generation. dtype: by default that of config.json, float32 where it says none;
    weights that the model's class keeps in fp32 remain fp32. A folder whose weights were quantized is written in
    bfloat16, without its quantization_config. max_file_bytes: by default FOLDER_FILE_BYTES. The folder appears once it
    is complete.

    Raises ValueError for a folder that exists and is not empty, for a checkpoint of another kind of model, and if the
    folder that training started from is not there.
    """
    return _export_newest(
        checkpoint, lambda path: _export_folder(path, folder, max_file_bytes or FOLDER_FILE_BYTES, dtype, pretrained)
    )


def _export_folder(
    path: Path, folder: Path, max_file_bytes: int, dtype: str | None, pretrained: Path | None
) -> list[Path]:
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
    config, dtype = config_of_export(model["config"], dtype)
    weights, has_dropped_layers = _weights_under_names_of(source, _weights_of(index.tensors, dtype))
    if has_dropped_layers:
        config["num_nextn_predict_layers"] = 0
    unfinished = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with naming_file(folder):
            _write_files(path, unfinished / "model.safetensors", weights, max_file_bytes)
            (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for pattern in OTHER_FILES:
                for each in source.glob(pattern):
                    if each.is_dir():
                        shutil.copytree(each, unfinished / each.name, dirs_exist_ok=True)
                    else:
                        shutil.copyfile(each, unfinished / each.name)
            unfinished.replace(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return sorted(each for each in folder.rglob("*") if each.is_file())


def _weights_under_names_of(source: Path, own: Mapping[str, _Weight]) -> tuple[dict[str, _Weight], bool]:
    """Name weights as the files of a Hugging Face folder do, in as many tensors as these have.

    Returns them, and whether the folder has layers that the model does not have (see `weights.import_safetensors`).
    """
    from safetensors import safe_open

    file = find_weights(source)
    names: dict[str, PlainTensor] = {}
    for part in [] if file is None else files_of_index(file):
        read_header(part)
        with safe_open(part, framework="pt", device="cpu") as opened:
            names |= {name: PlainTensor(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
    if all(name in own for name in names):
        return dict(own), False
    require_transformers("path", str(source))
    model = build_causal_lm(str(source), source)
    untie_as_in(model, require_weights(source))
    first = first_names(model)
    matched = match_names(model, with_scales(names), first, saved_tensors(model))
    there = {first[name]: in_file for in_file, name in matched.own_names.items()}
    weights: dict[str, _Weight] = {}
    for name, weight in own.items():
        shape = weight.entry.shape
        if name in matched.stacked and len(shape) == 3:
            for expert, parts in enumerate(matched.stacked[name]):
                rows = shape[1] // len(parts)
                weights |= {part: replace(weight, part=(expert, at * rows, rows)) for at, part in enumerate(parts)}
        else:
            weights[name if name in names else there.get(name, name)] = (
                replace(weight, dtype="float32") if is_kept_in_fp32(model, name) else weight
            )
    return weights, bool(matched.dropped)


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

    The library's own writer needs all tensors in memory, and writes no checksums.
    """
    import torch

    from stretto.train.checkpoint.storage import read_tensor

    entries, checksums = dict(_header(weights)), dict[str, str]()
    with open(file, "wb") as out:
        out.write(make_header(entries, None))
        last, whole = None, torch.empty(0, device="cpu")
        for name, weight in weights.items():
            if weight.entry is not last:  # parts of one tensor follow each other
                last, whole = weight.entry, read_tensor(checkpoint, weight.entry, weight.name)
            tensor = weight.of(whole).to(getattr(torch, weight.dtype))
            content = tensor.flatten().view(torch.uint8).numpy().data
            out.write(content)
            checksums[name] = digits_of(content)
        out.seek(0)
        out.write(make_header(entries, checksums))
        out.flush()
        os.fsync(out.fileno())


def _header(weights: Mapping[str, _Weight]) -> Iterator[tuple[str, dict[str, Any]]]:
    start = 0
    for name, weight in weights.items():
        stop = start + weight.num_bytes
        dtype = (_SAFETENSORS_DTYPES | _INTEGERS)[weight.dtype]
        yield name, {"dtype": dtype, "shape": list(weight.shape), "data_offsets": [start, stop]}
        start = stop
