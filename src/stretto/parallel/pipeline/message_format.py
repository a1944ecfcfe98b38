# SPDX-License-Identifier: Apache-2.0
"""The header of a message (its key, and of each tensor the dtype, the shape and where it belongs), and its memory.

A header is int64 words, the same on every kind of transport:

    step, operation, stage, micro-batch, choice of the transport, number of tensors, then of each tensor
        -1                                                        for None
        0 or 1 (of a GPU), index of the dtype, number of dims, sizes
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
MAX_BYTES_OF_HEADER = 1 << 15
"""Enough for 500 tensors of 4 dims."""

SMALLEST_REUSED = 1 << 16
"""Bytes of the smallest tensor whose memory is used again."""

_ALIGNMENT = 64
_FIXED_WORDS = 6
_MAX_DIMS = 64  # torch's own
_MAX_NUMBERS = 1 << 40
_OPERATIONS = ("F", "B")


class MessageKey(NamedTuple):
    """Identity of a message between stages.

    operation: "F" for an activation that the forward pass of `stage` needs, "B" for a gradient that its backward pass
    needs. stage: the virtual stage that will consume it.
    """

    operation: Literal["F", "B"]
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = "activation for the forward" if self.operation == "F" else "gradient for the backward"
        return f"the {what} of stage {self.stage}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class TensorLayout:
    """Shape and dtype of a tensor in a message. is_on_gpu: the sender's was, so it goes to the receiver's device."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_on_gpu: bool

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, data: Tensor) -> Tensor:
        """The tensor whose bytes uint8 `data`, aligned to the dtype, begins with."""
        return data[: self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class MessageHeader:
    """A message's header. choice: a number that the transport defines."""

    CHOICE: ClassVar[int] = 4
    """The word that holds `choice`."""

    step: int
    key: MessageKey
    tensors: tuple[TensorLayout | None, ...]
    choice: int = 0

    @classmethod
    def of(cls, step: int, key: MessageKey, tensors: Sequence[Tensor | None], choice: int = 0) -> "MessageHeader":
        """The header of a message of these tensors. ValueError for a tensor that no message can hold, or too many."""
        dims = sum(tensor.dim() for tensor in tensors if tensor is not None)
        if 8 * (_FIXED_WORDS + 3 * len(tensors) + dims) > MAX_BYTES_OF_HEADER:
            raise ValueError(f"{key}: {len(tensors)} tensors of {dims} dims in all are too many for one message")
        layouts: list[TensorLayout | None] = []
        for tensor in tensors:
            if tensor is None:
                layouts.append(None)
                continue
            if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
                raise ValueError(
                    f"messages hold dense tensors of PyTorch's plain dtypes, not {tensor.dtype} ({tensor.layout})"
                )
            layouts.append(TensorLayout(tensor.dtype, tuple(tensor.shape), tensor.device.type != "cpu"))
        return cls(step, key, tuple(layouts), choice)

    def pack(self) -> Tensor:
        """The header as uint8."""
        operation, stage, micro_batch = self.key
        words = [self.step, _OPERATIONS.index(operation), stage, micro_batch, self.choice, len(self.tensors)]
        for layout in self.tensors:
            if layout is None:
                words.append(-1)
            else:
                words += (int(layout.is_on_gpu), DTYPES.index(layout.dtype), len(layout.shape), *layout.shape)
        return torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)

    @classmethod
    def unpack(cls, data: Tensor) -> tuple["MessageHeader", int]:
        """Read the header at the beginning of uint8 data; returns it and its size in bytes.

        ValueError for words that are no header.
        """
        words = data[: data.numel() // 8 * 8].view(torch.int64)
        step, operation, stage, micro_batch, choice, count = words[:_FIXED_WORDS].tolist()
        at = _FIXED_WORDS
        layouts: list[TensorLayout | None] = []
        try:
            for _ in range(count):
                if words[at] < 0:
                    layouts.append(None)
                    at += 1
                    continue
                is_on_gpu, dtype, dims = words[at : at + 3].tolist()
                if not 0 <= dims <= min(_MAX_DIMS, len(words) - at - 3):
                    raise ValueError(f"a tensor has {dims} dims")
                shape = tuple(words[at + 3 : at + 3 + dims].tolist())
                if min(shape, default=0) < 0 or prod(shape) > _MAX_NUMBERS:
                    raise ValueError(f"a tensor is {shape}")
                layouts.append(TensorLayout(_at(DTYPES, dtype), shape, bool(is_on_gpu)))
                at += 3 + dims
            key = MessageKey(_at(_OPERATIONS, operation), stage, micro_batch)
        except (ValueError, IndexError) as error:
            raise ValueError(f"the header of a message is damaged: {error}") from error
        return cls(step, key, tuple(layouts), choice), 8 * at


def _at(table: Sequence[Any], number: int) -> Any:
    if number < 0:
        raise IndexError(f"there is no entry {number}")
    return table[number]


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as uint8 [num_bytes]."""
    # A tensor of one element counts as contiguous with any strides, and `view` wants the last one to be 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class ReceiveBuffers:
    """Host memory for the tensors of messages, used again once these tensors have died.

    New memory is slow: the system clears each page at its first use. A buffer is a numpy array, and a tensor refers to
    a view of it as long as any tensor on the same memory lives, so a weak reference to the view tells. Threads may
    share this object.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []

    def take(self, num_bytes: int) -> Tensor:
        """Memory as uint8 [num_bytes], aligned to 64 bytes, with any contents."""
        if num_bytes < SMALLEST_REUSED:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        with self._lock:
            free = (each for each in self._buffers if each.view() is None and num_bytes <= each.size <= 2 * num_bytes)
            buffer = next(free, None)
            if buffer is None:
                buffer = _Buffer(np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8))
                self._buffers.append(buffer)
            start = -buffer.array.ctypes.data % _ALIGNMENT
            view = buffer.array[start : start + num_bytes]
            buffer.view, buffer.is_used = weakref.ref(view), True
            return torch.from_numpy(view)

    def trim(self) -> None:
        """Give back what has not been taken since the last call."""
        with self._lock:
            self._buffers = [buffer for buffer in self._buffers if buffer.is_used]
            for buffer in self._buffers:
                buffer.is_used = False


@dataclass
class _Buffer:
    """Memory for one tensor. view: of the array, which the tensor refers to; dead once the tensor is."""

    array: NDArray[np.uint8]
    view: Callable[[], NDArray[np.uint8] | None] = lambda: None
    is_used: bool = False

    @property
    def size(self) -> int:
        return self.array.size - _ALIGNMENT
