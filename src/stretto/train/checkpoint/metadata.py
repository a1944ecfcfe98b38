# SPDX-License-Identifier: Apache-2.0
"""The index of a checkpoint, `metadata.json`: which tensors it has and where, as plain data, checked before use; and
which tensors of a model are saved."""

import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stretto.cluster import read_bounded
from stretto.huggingface.config_json import first_entry_that_differs
from stretto.suggestions import did_you_mean, did_you_mean_file
from stretto.train.checkpoint.integrity import PATTERN, DamagedError, check_seal, seal, to_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

METADATA_FILE = "metadata.json"
FORMAT_VERSION = 2
WITHOUT_CHECKSUMS = 1  # the format of older versions, which is still read, and of what is read of torch's folders
MAX_METADATA_BYTES = 1 << 28  # a box of a tensor takes about 100
# Options of the model that a resumed run may change, because the parameters' meaning does not depend on them. With
# learned positions, another max_seq_len changes a shape, which is checked anyway.
FREE_MODEL_OPTIONS = ("dropout", "max_seq_len", "balance_loss", "bias_rate", "z_loss", "capacity_factor")

_FOLDER_NAME = re.compile(r"step-[0-9]{8,}")
StoredDtype = Literal["float64", "float32", "float16", "bfloat16", "uint8", "int64", "int32", "int16", "int8", "bool"]
# Bytes, by dtype: of weights, of masks of pruned parameters (uint8), and of buffers in torch's folders.
ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
ITEMSIZES |= {"uint8": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "bool": 1}
_Index = Annotated[int, Field(ge=0)]
_Checksum = Annotated[str, Field(pattern=PATTERN)]


def is_checkpoint_name(name: str) -> bool:
    """True if a folder's name is that of a checkpoint of a run."""
    return _FOLDER_NAME.fullmatch(name) is not None


class StoredBox(BaseModel):
    """One box of a tensor, and the bytes of a shard file to which torch.save has written it.

    checksum: of these bytes, "crc32:1a2b3c4d"; None in format 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    offsets: tuple[_Index, ...]
    sizes: tuple[_Index, ...]
    # Only names that torch gives: a path could lead out of the checkpoint.
    file: Annotated[str, Field(pattern=r"^__[0-9]+_[0-9]+\.distcp$")]
    start: _Index
    bytes: _Index
    checksum: _Checksum | None = None

    @classmethod
    def of(
        cls, place: Any, offsets: Sequence[int] = (), sizes: Sequence[int] = (), checksum: str | None = None
    ) -> "StoredBox":
        """A box at a place that torch's index has."""
        at = {"file": place.relative_path, "start": place.offset, "bytes": place.length}
        return cls(offsets=tuple(offsets), sizes=tuple(sizes), checksum=checksum, **at)


class StoredFile(BaseModel):
    """A file of a checkpoint that is no shard: torch's own index."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bytes: _Index
    checksum: _Checksum


class TensorEntry(BaseModel):
    """A tensor of the checkpoint: its whole shape, its dtype, and its boxes (`chunks` in the file)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    shape: tuple[_Index, ...]
    dtype: StoredDtype
    chunks: tuple[StoredBox, ...]

    @classmethod
    def of(cls, entry: Any, boxes: Iterable[StoredBox]) -> "TensorEntry":
        """A tensor that torch's index has."""
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        return cls.model_validate({"shape": tuple(entry.size), "dtype": dtype, "chunks": tuple(boxes)})

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch  # not at the module's import: indices are also checked where nothing is loaded

        return getattr(torch, self.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return ITEMSIZES[self.dtype]

    def fault(self) -> str | None:
        """Describe an error in the boxes, if any: each element of the tensor must be in exactly one of them."""
        for chunk in self.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(self.shape) or any(
                offset + size > end for offset, size, end in zip(chunk.offsets, chunk.sizes, self.shape, strict=True)
            ):
                return f"has a piece outside of its shape {list(self.shape)}"
            if chunk.bytes < prod(chunk.sizes) * self.itemsize:
                return "has a piece that is too short for its size"
        if sum(prod(chunk.sizes) for chunk in self.chunks) != prod(self.shape):
            return "is not whole: its pieces do not add up to its shape"
        if not _covers(self.shape, self.chunks):
            return "is not whole: its pieces overlap"
        return None


class OperatorChoices(BaseModel):
    """A group's kernels of overlapped operators: encoded, by call; and the seconds that were measured in calls."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    choices: dict[str, str]
    confirmed: dict[str, dict[str, float]]


_PRIME = (1 << 127) - 1


@cache
def _point(dim: int) -> int:
    return secrets.randbelow(_PRIME - 2) + 2


@lru_cache(maxsize=1 << 16)
def _power(dim: int, exponent: int) -> int:
    return pow(_point(dim), exponent, _PRIME)


def _covers(shape: Sequence[int], boxes: Iterable[StoredBox]) -> bool:
    """Check that boxes inside a shape cover each of its numbers once, in time proportional to their count.

    A box is the polynomial that has, for each of its numbers at (i, j, ...), the term x^i y^j ...: a product over its
    dims of (x^stop - x^start) / (x - 1). The sum over the boxes is compared with the whole tensor's at a random point
    modulo a prime (Schwartz and Zippel): other coverings agree with a probability below 2^-80.
    """

    def evaluate(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        value = 1
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            value = value * (_power(dim, offset + size) - _power(dim, offset)) % _PRIME
        return value

    covered = sum(evaluate(box.offsets, box.sizes) for box in boxes)
    return (covered - evaluate((0,) * len(shape), shape)) % _PRIME == 0


class CheckpointMetadata(BaseModel):
    """The contents of `metadata.json`. `checksum`: of the whole file, in which it stands as zeros (`integrity.seal`).

    `files` has the files other than shards, by name. `tensors` has parameters as `model.<name>` and optimizer state as
    `optimizer.<name>.<key>`; `model` is the model's configuration and `run` the run's; `data` identifies the data and
    its order; `evaluation` is that of this step, if there was one; `operators` has groups' choices, by their ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    checksum: _Checksum | None = None
    format: int
    step: _Index
    torch: str
    optimizer: str
    model: dict[str, Any]
    run: dict[str, Any]
    data: dict[str, Any]
    evaluation: dict[str, float | None] = Field(default_factory=dict)
    operators: dict[str, OperatorChoices] = Field(default_factory=dict)
    # Only the name that torch gives: a path could lead out of the checkpoint.
    files: dict[Literal[".metadata"], StoredFile] = Field(default_factory=dict)
    tensors: dict[str, TensorEntry]

    def to_bytes(self) -> bytes:
        if self.format == WITHOUT_CHECKSUMS:
            return self.model_dump_json(exclude_none=True, exclude={"files"}).encode()
        return seal(self.model_copy(update={"checksum": to_text(0)}).model_dump_json().encode())

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and whole shapes of the model's parameters."""
        return {
            name.removeprefix("model."): entry.shape
            for name, entry in self.tensors.items()
            if name.startswith("model.")
        }


def read_metadata(path: Path) -> CheckpointMetadata:
    """Read and verify a checkpoint's index, and that its shard files are there, whole.

    Raises ValueError for a folder without a checkpoint, an index larger than MAX_METADATA_BYTES, another format, and a
    shard file that is missing or too short; DamagedError where the disk has lost a file's bytes, or where the run has
    deleted the checkpoint since; PermissionError for files that this user may not read.
    """
    file = path / METADATA_FILE
    try:
        if not file.is_file():
            if not path.is_dir():
                raise ValueError(f"there is no checkpoint at {path}{did_you_mean_file(path)}")
            raise ValueError(f"{path} is not a complete checkpoint: it has no {METADATA_FILE}")
        metadata = parse_metadata(file, read_bounded(file, MAX_METADATA_BYTES, "a checkpoint's index"))
        check_files(path, metadata)
    except PermissionError:
        raise
    except OSError as error:
        raise DamagedError(f"{error.filename or file} cannot be read: {error.strerror or error}") from error
    return metadata


def parse_metadata(file: Path, text: bytes) -> CheckpointMetadata:
    """Verify the text of an index, which is that of `file`, and its content. Raises ValueError.

    A text that is not what was written raises DamagedError.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # thousands of brackets
        raise DamagedError(f"{file} is damaged: {error}") from error
    version = content.get("format") if isinstance(content, dict) else None
    differs = "" if version == WITHOUT_CHECKSUMS else check_seal(text)
    if type(version) is not int or version not in (WITHOUT_CHECKSUMS, FORMAT_VERSION):
        raise (DamagedError if differs else ValueError)(
            f"{file} has checkpoint format {version!r}, and this version of Stretto reads {WITHOUT_CHECKSUMS} and "
            f"{FORMAT_VERSION}{'; or it is damaged' if differs else ''}"
        )
    if differs:
        raise DamagedError(f"{file} is damaged: its {differs}")
    try:
        metadata = CheckpointMetadata.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DamagedError(f"{file} is damaged: {where}: {first['msg']}") from error
    for name, entry in metadata.tensors.items():
        if fault := entry.fault():
            raise DamagedError(f"{file} is damaged: {name} {fault}")
        if version != WITHOUT_CHECKSUMS and any(chunk.checksum is None for chunk in entry.chunks):
            raise DamagedError(f"{file} is damaged: {name} has a piece without a checksum")
    return metadata


def check_files(path: Path, metadata: CheckpointMetadata) -> None:
    """Compare each shard file's length with the index. Raises DamagedError."""
    needed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for entry in metadata.tensors.values():
        for chunk in entry.chunks:
            needed[chunk.file] = max(needed[chunk.file], chunk.start + chunk.bytes)
            total[chunk.file] += chunk.bytes
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            raise DamagedError(f"the checkpoint {path} is missing its file {name}")
        if file.stat().st_size < size:
            raise DamagedError(
                f"the checkpoint's file {file} is truncated: {file.stat().st_size} bytes of {size} are there"
            )
        if total[name] > size:  # otherwise a small file could demand any amount of memory
            raise DamagedError(f"{path / METADATA_FILE} is damaged: pieces in {name} overlap")


def check_description(
    path: Path, metadata: CheckpointMetadata, model: Mapping[str, Any] | None, optimizer: str | None
) -> None:
    """Raise ValueError unless a checkpoint is, by its index, of this model and this optimizer (None: any).

    model: as an index describes it. One that torch.distributed.checkpoint has written without Stretto says nothing of
    its model, and may have no state of an optimizer: missing entries are not compared.
    """
    if model is not None and metadata.model and (difference := first_option_that_differs(metadata.model, model)):
        raise ValueError(f"the checkpoint {path} is of another model: {difference}")
    if metadata.optimizer and optimizer not in (None, metadata.optimizer):
        raise ValueError(
            f"the checkpoint {path} was written with {metadata.optimizer}, and train.optimizer is "
            f"{optimizer!r}: set train.optimizer={metadata.optimizer!r}"
        )


def first_option_that_differs(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Describe the first option in which a checkpoint's model (`found`, from `metadata.json`) differs from a model.

    Equal shapes of parameters do not suffice: 4 and 8 heads have the same weights and compute different things. An
    option that `found` lacks, because an older version wrote it, is not compared. Of a Hugging Face model its
    config.json is compared.
    """
    kinds = found.get("kind", "gpt"), wanted.get("kind", "gpt")
    if kinds[0] != kinds[1]:
        return f"it is of kind {kinds[0]!r} there and {kinds[1]!r} here"
    if kinds[0] == "huggingface":
        there = found.get("config")
        return first_entry_that_differs(there if isinstance(there, dict) else {}, wanted["config"])
    found, wanted = _with_defaults(found), _with_defaults(wanted)
    for name, value in wanted.items():
        if name in found and name not in FREE_MODEL_OPTIONS and found[name] != value:
            return f"model.{name} is {found[name]!r} there and {value!r} here; model.{name}={found[name]!r} would do"
    return None


def _with_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """Replace None in a model's options by its meaning, so that two spellings of one model are equal."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in model.items()}
    if options.get("kv_heads", 0) is None and "heads" in options:
        options["kv_heads"] = options["heads"]
    if options.get("ffn", 0) is None and isinstance(options.get("hidden"), int):
        options["ffn"] = 4 * options["hidden"]
    return options


def differences(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Describe the parameters in which a file (`found`: names and shapes) differs from a model."""
    unexpected = [name for name in found if name not in wanted]
    for name, shape in wanted.items():
        if name not in found:
            yield f"{name} is missing{did_you_mean(name, unexpected)}".removesuffix("?")
        elif tuple(found[name]) != tuple(shape):
            yield f"{name} has shape {list(found[name])} there, and the model's is {list(shape)}"
    for name in unexpected:
        yield f"{name} is unexpected: the model has no such parameter"


def persistent_buffers(model: "nn.Module") -> "dict[str, Tensor]":
    """The buffers that belong to a model's state, by name: the bias of each expert's score, say. None is complex."""
    return {
        f"{name}.{key}".removeprefix("."): buffer
        for name, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set and not buffer.is_complex()
    }


def saved_tensors(model: "nn.Module") -> dict[str, "Tensor"]:
    """The parameters of a model and its persistent buffers, by name; a parameter held twice has its first name."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def first_names(model: "nn.Module") -> dict[str, str]:
    """The first name of each parameter and buffer, by all of its names: those of a tied parameter have one."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    own = {alias: first[id(parameter)] for alias, parameter in model.named_parameters(remove_duplicate=False)}
    return own | {name: name for name in persistent_buffers(model)}
