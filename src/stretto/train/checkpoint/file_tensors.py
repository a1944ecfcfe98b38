# SPDX-License-Identifier: Apache-2.0
"""Reads parts of a parameter from safetensors files: from one tensor, from one scaled by blocks, or from many.

A mixture of experts has one tensor for each expert and projection in its file, and one parameter for all of them in
transformers' model. A rank reads only its experts, and only its rows and columns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from stretto.huggingface.refusals import FP8_BLOCK
from stretto.train.checkpoint.safetensors_checksums import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FP8 = "F8_E4M3"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
INTEGERS = {f"{sign[0].upper()}{bits}": f"{sign}{bits}" for sign in ("int", "uint") for bits in (8, 16, 32, 64)}
INTEGERS["BOOL"] = "bool"
_BYTES_AT_ONCE = 1 << 26


class FileTensor(Protocol):
    """A tensor that files hold. `shape`: the whole one's."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtypes(self) -> frozenset[str]:
        """The dtypes, as safetensors calls them, of what `copy_into` reads."""

    def copy_into(self, values: "Tensor", offsets: Sequence[int]) -> None:
        """Fill `values`, in its dtype, with the box of the whole tensor that begins at `offsets`."""


@dataclass(frozen=True)
class PlainTensor:
    """A tensor of a file. opened: what safetensors' `get_slice` returns."""

    opened: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.opened.get_shape())

    @property
    def dtypes(self) -> frozenset[str]:
        return frozenset((self.opened.get_dtype(),))

    @property
    def is_fp8(self) -> bool:
        return bool(self.opened.get_dtype() == _FP8)

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> "Tensor":
        box = zip(offsets, sizes, strict=True)
        return self.opened[tuple(slice(start, start + length) for start, length in box)]

    def copy_into(self, values: "Tensor", offsets: Sequence[int]) -> None:
        values.copy_(self.read(offsets, values.shape))


@dataclass(frozen=True)
class CheckedTensor(PlainTensor):
    """A tensor of a file that has checksums: the blocks that are read are checked. stored: where its bytes are."""

    stored: StoredTensor

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> "Tensor":
        import torch

        dtype = getattr(torch, (FLOATS | INTEGERS)[self.stored.dtype])
        shape = self.stored.shape or (1,)
        # Rows at a time, so that a rank that reads a few columns of each takes little memory.
        row = math.prod(shape[1:]) * dtype.itemsize
        values = torch.empty(tuple(sizes) or (1,), dtype=dtype, device="cpu")
        first = offsets[0] if offsets else 0
        at_once = max(1, _BYTES_AT_ONCE // max(1, row))
        box = tuple(slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))
        for begin in range(0, len(values), at_once) if values.numel() else ():
            end = min(begin + at_once, len(values))
            content = self.stored.read((first + begin) * row, (first + end) * row)
            rows = torch.frombuffer(content, dtype=dtype).view(end - begin, *shape[1:])
            values[begin:end] = rows[(slice(None), *box)]
        return values.view(tuple(sizes))


@dataclass(frozen=True)
class BlockScaledTensor:
    """A matrix in fp8 (e4m3) of which each block of 128 x 128 has a scale: the values times their block's, in fp32.

    scales: fp32 [ceil(rows / 128), ceil(columns / 128)], in the file `<name>_scale_inv`.
    """

    values: PlainTensor
    scales: PlainTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtypes(self) -> frozenset[str]:
        return self.scales.dtypes

    def copy_into(self, values: "Tensor", offsets: Sequence[int]) -> None:
        sizes = tuple(values.shape)
        first = [offset // FP8_BLOCK for offset in offsets]
        count = [
            -(-(offset + size) // FP8_BLOCK) - block for offset, size, block in zip(offsets, sizes, first, strict=True)
        ]
        scales = self.scales.read(first, count).float()
        for dim, (offset, size, block) in enumerate(zip(offsets, sizes, first, strict=True)):
            scales = scales.repeat_interleave(FP8_BLOCK, dim).narrow(dim, offset - block * FP8_BLOCK, size)
        values.copy_(self.values.read(offsets, sizes).float() * scales)


@dataclass(frozen=True)
class StackedTensor:
    """Matrices as one tensor [experts, rows, columns]: an expert's rows are those of its parts, one after another.

    parts: of each expert, all of one shape (the gate's and the up projection's, say).
    """

    parts: tuple[tuple[FileTensor, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.parts[0][0].shape
        return len(self.parts), len(self.parts[0]) * rows, columns

    @property
    def dtypes(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.dtypes for parts in self.parts for part in parts))

    def copy_into(self, values: "Tensor", offsets: Sequence[int]) -> None:
        first, start, column = offsets
        stop = start + values.shape[1]
        for parts, expert in zip(self.parts[first : first + values.shape[0]], values, strict=True):
            begin = 0
            for part in parts:
                end = begin + part.shape[0]
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    part.copy_into(expert[low - start : high - start], (low - begin, column))
                begin = end


def stack(tensors: Mapping[str, FileTensor], names: Sequence[Sequence[str]]) -> FileTensor:
    """Stack the matrices of these names, of each expert its parts. Raises ValueError for those of another shape."""
    first = names[0][0]
    if len(tensors[first].shape) != 2:
        raise ValueError(f"{first} has shape {list(tensors[first].shape)} there, and is to be a matrix")
    for name in (name for parts in names for name in parts):
        if tensors[name].shape != tensors[first].shape:
            raise ValueError(
                f"{name} has shape {list(tensors[name].shape)} there, and {first} has {list(tensors[first].shape)}"
            )
    return StackedTensor(tuple(tuple(tensors[name] for name in parts) for parts in names))


def with_scales(tensors: Mapping[str, PlainTensor]) -> dict[str, FileTensor]:
    """The tensors of files by their names, those in fp8 with their scales.

    Raises ValueError for fp8 without scales, or with those of other blocks.
    """
    found: dict[str, FileTensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_fp8:
            scaled = tensors.get(name.removesuffix("_scale_inv"))
            if not (name.endswith("_scale_inv") and scaled is not None and scaled.is_fp8):
                found[name] = tensor
            continue
        scales = tensors.get(f"{name}_scale_inv")
        blocks = tuple(-(-size // FP8_BLOCK) for size in tensor.shape)
        if scales is None or len(tensor.shape) != 2 or scales.shape != blocks:
            there = "none" if scales is None else f"some of shape {list(scales.shape)}"
            raise ValueError(
                f"{name} is in fp8 and needs scales {name}_scale_inv of shape {list(blocks)}, one for each block of "
                f"{FP8_BLOCK} x {FP8_BLOCK}, and there are {there}: dequantize it with transformers, and write it in "
                "bfloat16"
            )
        found[name] = BlockScaledTensor(tensor, scales)
    return found


def refusal_of_dtypes(name: str, found: frozenset[str], wanted: "torch.dtype") -> str | None:
    """Say why a tensor stored in these dtypes cannot be copied into a parameter of dtype `wanted`; None if it can.

    Integers in place of floating-point weights are quantized weights, whose scales are stored separately.
    """
    if wanted.is_complex:
        return None
    known = FLOATS.keys() if wanted.is_floating_point else INTEGERS.keys()
    if not (odd := sorted(found - known)):
        return None
    what = "floating-point" if wanted.is_floating_point else "integer"
    return (
        f"{name} is stored as {', '.join(odd)}, but the model needs {what} values ({', '.join(sorted(known))}): "
        "dequantize it with the library that wrote it"
    )
