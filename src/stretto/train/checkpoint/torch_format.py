# SPDX-License-Identifier: Apache-2.0
"""Folders that torch.distributed.checkpoint has written without Stretto, as FSDP2's and torchtitan's users do.

Their index, `.metadata`, is a pickle. torch reads it by `pickle.load`, which can run code, and torch's weights-only
unpickler lacks the protocol in which torch writes it (4). So it is read by an unpickler that makes nothing but the
index's own data classes, and then described as an index of Stretto's (`CheckpointMetadata`).
"""

import io
import os
import pickle
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationError

from stretto.cluster import read_bounded
from stretto.train.checkpoint.integrity import DamagedError
from stretto.train.checkpoint.metadata import (
    ITEMSIZES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    WITHOUT_CHECKSUMS,
    CheckpointMetadata,
    StoredBox,
    TensorEntry,
    check_files,
    differences,
    is_checkpoint_name,
    persistent_buffers,
    read_metadata,
    saved_tensors,
)
from stretto.train.checkpoint.pieces import StoredPiece

if TYPE_CHECKING:
    from torch import nn

INDEX_FILE: Literal[".metadata"] = ".metadata"  # torch's own
SHOWN = 4  # names in a message

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": (
        *("Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("uint64", "uint32", "uint16", "complex128", "complex64", "complex32", "float8_e8m0fnu", "float8_e4m3fn"),
        *("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"),
    ),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    "collections": ("OrderedDict",),
}
# An optimizer's tensors, whatever the name of its entry in the state: <entry>.state.<parameter>.<key>.
_SLOT = re.compile(r"(?:.*\.)?(?:optim|optimizer|optimizers|opt)\.(?:\d+\.)?state\.(?P<parameter>.+)\.(?P<key>\w+)")
_OPTIMIZERS = {"exp_avg": "adamw", "momentum_buffer": "sgd"}  # by a key of their states
_KEYS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer")
_WEIGHTS = ("app.model.", "state.model.", "model.", "module.", "state_dict.")  # prefixes of the weights' names


def read_index(path: Path) -> CheckpointMetadata:
    """Read the index of a checkpoint written by Stretto, or else by torch.distributed.checkpoint.

    Raises ValueError as `read_metadata` does, and for a folder without tensors of a training run.
    """
    if (path / METADATA_FILE).exists() or not is_torch_checkpoint(path):
        return read_metadata(path)
    return _read_torch_index(path)


def is_torch_checkpoint(path: Path) -> bool:
    """True if a folder has torch's index but not Stretto's, and is not an incomplete checkpoint of Stretto."""
    is_there = (path / INDEX_FILE).is_file() and not (path / METADATA_FILE).exists()
    real = Path(os.path.realpath(path))  # "." and links may lead to a checkpoint of Stretto's
    return is_there and not (is_checkpoint_name(real.name) and real.parent.name == "checkpoints")


class _IndexUnpickler(pickle._Unpickler):
    """Makes data classes of torch's index alone.

    The unpickler in Python takes 3 times as long as that in C, which allocates 16 bytes for each number up to the one
    that a pickle of ten bytes gives to an object: up to 64 GB.
    """

    # An array of bytes would be allocated with the length that the pickle states.
    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it has {module}.{name}, which is no part of an index of torch's")
        return super().find_class(module, name)


def _load_index(content: bytes) -> tuple[Any, dict[tuple[str, tuple[int, ...]], Any]]:
    """torch's index, and the place of each box by the tensor's name and the box's offsets."""
    index = _IndexUnpickler(io.BytesIO(content)).load()
    return index, {(key.fqn, tuple(key.offset or ())): place for key, place in index.storage_data.items()}


def read_pieces(path: Path) -> list[StoredPiece]:
    """List all that a folder's index says is in its files: pieces of tensors, and objects. Raises DamagedError.

    An index that contradicts itself is damaged: pieces that do not add up to a tensor, or of which one has no place.
    """
    file = path / INDEX_FILE
    content = read_bounded(file, MAX_METADATA_BYTES, "a checkpoint's index")
    try:
        index, places = _load_index(content)
        pieces = []
        for name, entry in index.state_dict_metadata.items():
            boxes = _boxes(name, entry, places) if hasattr(entry, "chunks") else [StoredBox.of(places[name, ()])]
            if hasattr(entry, "chunks") and sum(prod(box.sizes) for box in boxes) != prod(entry.size):
                raise DamagedError(f"{file} is damaged: the pieces of {name} do not add up to its shape")
            pieces += [StoredPiece(name, box) for box in boxes]
    except DamagedError:
        raise
    except Exception as error:  # whatever a damaged pickle may raise
        raise DamagedError(f"{file} is no index of torch.distributed.checkpoint: {error}") from error
    return pieces


def _read_torch_index(path: Path) -> CheckpointMetadata:
    content = read_bounded(path / INDEX_FILE, MAX_METADATA_BYTES, "a checkpoint's index")
    try:
        index, places = _load_index(content)
        entries = {name: entry for name, entry in index.state_dict_metadata.items() if hasattr(entry, "chunks")}
        names, optimizer = _read_names(path, {name: tuple(entry.size) for name, entry in entries.items()})
        tensors = {new: _entry(path, old, entries[old], places) for old, new in names.items()}
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path / INDEX_FILE} cannot be used: {first['loc'][-1]}: {first['msg']}") from error
    except ValueError:
        raise
    except Exception as error:  # whatever a damaged pickle may raise
        raise DamagedError(f"{path / INDEX_FILE} is no index of torch.distributed.checkpoint: {error}") from error
    for name, entry in tensors.items():
        if fault := entry.fault():
            raise DamagedError(f"{path / INDEX_FILE} is damaged: {name} {fault}")
    metadata = CheckpointMetadata(
        format=WITHOUT_CHECKSUMS,
        step=0,
        torch=str(index.version) if hasattr(index, "version") else "",
        optimizer=optimizer,
        model={},
        run={},
        data={},
        tensors=tensors,
    )
    check_files(path, metadata)
    return metadata.model_copy(update={"step": _read_step(path, metadata)})


def _read_names(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, str], str]:
    """Translate the names of a folder's tensors, weights and optimizer state, to Stretto's; and name the optimizer."""
    slots = {name: match for name in shapes if (match := _SLOT.fullmatch(name))}
    numbered = next((name for name, match in slots.items() if match["parameter"].isdigit()), None)
    if numbered is not None:
        raise ValueError(
            f"{path} has {numbered}: its optimizer's state is keyed by numbers and not by parameter names: save the "
            "result of get_optimizer_state_dict of torch.distributed.checkpoint.state_dict"
        )
    if other := next((name for name, match in slots.items() if match["key"] not in _KEYS), None):
        raise ValueError(f"{path} has {other}: of optimizers' states, those of AdamW and SGD with momentum are read")
    kinds = {_OPTIMIZERS[match["key"]] for match in slots.values() if match["key"] in _OPTIMIZERS}
    if len(kinds) > 1:
        raise ValueError(f"{path} has the states of two optimizers, AdamW and SGD, and one is read")
    others = [name for name in shapes if name not in slots]
    trained = {match["parameter"] for match in slots.values()}
    prefix = next((each for each in _WEIGHTS if _has_prefix(each, others, shapes, trained)), "")
    # Numbers outside of the weights, such as a step count, do not belong to the model.
    weights = [name for name in others if name.startswith(prefix) and shapes[name] and ".param_groups." not in name]
    if not weights:
        raise ValueError(f"{path} has no weights, but {len(shapes)} other tensors")
    stored = {name: f"model.{name.removeprefix(prefix)}" for name in weights}
    stored |= {name: f"optimizer.{match['parameter']}.{match['key']}" for name, match in slots.items()}
    return stored, next(iter(kinds), "")


def _has_prefix(prefix: str, names: list[str], shapes: Mapping[str, tuple[int, ...]], trained: set[str]) -> bool:
    """True if all weights that an optimizer has state of stand under a prefix, or all arrays that are not of one."""
    arrays = [name for name in names if shapes[name] and not name.startswith(("lr_scheduler.", "dataloader."))]
    is_of_trained = bool(trained) and all(prefix + name in shapes for name in trained)
    return is_of_trained or (bool(arrays) and all(name.startswith(prefix) for name in arrays))


def _entry(path: Path, name: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> TensorEntry:
    boxes = _boxes(name, entry, places)
    if any(getattr(places[name, box.offsets], "transform_descriptors", None) for box in boxes):
        raise ValueError(f"{path} has {name} compressed, and such files are not read: write it without extensions")
    if (dtype := str(entry.properties.dtype).removeprefix("torch.")) not in ITEMSIZES:
        raise ValueError(f"{path} has {name} in {dtype}: what is read are {', '.join(ITEMSIZES)}")
    return TensorEntry.of(entry, boxes)


def _boxes(name: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> list[StoredBox]:
    """The boxes of a tensor that have numbers."""
    chunks = (chunk for chunk in entry.chunks if 0 not in chunk.sizes)
    return [StoredBox.of(places[name, tuple(chunk.offsets)], chunk.offsets, chunk.sizes) for chunk in chunks]


def _read_step(path: Path, metadata: CheckpointMetadata) -> int:
    """Read the number of steps that the optimizer has taken; 0 without its state, and for SGD, which does not count."""
    from stretto.train.checkpoint.storage import read_tensor

    for name, entry in metadata.tensors.items():
        if name.endswith(".step") and entry.shape == ():
            return max(0, int(read_tensor(path, entry, name)))
    return 0


def fit_to_model(path: Path, metadata: CheckpointMetadata, model: "nn.Module") -> CheckpointMetadata:
    """Skip entries of torch's folder other than a model's tensors: second names of shared ones, and buffers that are
    not part of its state.

    model: may be on the meta device. Returns an index of Stretto's as it is. Raises ValueError that lists the first
    parameters that are missing, unexpected or of another shape, with names like theirs; and for a shared one that the
    folder has twice with different values.
    """
    if metadata.model:
        return metadata
    first: dict[int, str] = {}
    alias = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = persistent_buffers(model)
    ignored = {name for name, _ in model.named_buffers(remove_duplicate=False)} - buffers.keys()
    tensors: dict[str, TensorEntry] = {}
    stored_names: dict[str, str] = {}
    for name, entry in metadata.tensors.items():
        kind, _, rest = name.partition(".")
        parameter, _, key = rest.rpartition(".") if kind == "optimizer" else (rest, "", "")
        if kind == "model" and parameter in ignored:
            continue
        renamed = alias.get(parameter, parameter)
        fitted_name = ".".join(filter(None, (kind, renamed, key)))
        kept = stored_names.setdefault(fitted_name, name)
        tensors.setdefault(fitted_name, entry)
        if kind == "model" and kept != name and not _are_equal(path, metadata.tensors, kept, name):
            raise ValueError(
                f"the checkpoint {path} has {kept.removeprefix('model.')} and {parameter} with different values, but "
                "they are one parameter of the model: build it with tie_word_embeddings=False in its configuration (a "
                "GPT: tie_embeddings=False)"
            )
    fitted = metadata.model_copy(update={"tensors": tensors})
    found = fitted.parameter_shapes()
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    wanted |= {name: tuple(buffer.shape) for name, buffer in buffers.items() if name in found}
    faults = [
        f"{name} is stored as {stored.dtype}"
        for name, tensor in saved_tensors(model).items()
        if (stored := tensors.get(f"model.{name}")) and tensor.is_floating_point() != ("float" in stored.dtype)
    ]
    if faults := [*differences(found, wanted), *faults]:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise ValueError(f"the checkpoint {path} is of another model: {'; '.join(faults[:SHOWN])}{more}")
    return fitted


def _are_equal(path: Path, tensors: Mapping[str, TensorEntry], one: str, other: str) -> bool:
    import torch

    from stretto.train.checkpoint.storage import read_tensor

    if tensors[one].shape != tensors[other].shape:
        return False
    return torch.equal(*(read_tensor(path, tensors[name], name) for name in (one, other)))
