# SPDX-License-Identifier: Apache-2.0
"""Orders what this package keeps between the CUDA streams of a model whose forward pass uses several.

Autograd runs a backward function on the stream of its forward one, and orders streams along the graph's edges alone.
Gradients that wait for others in a bucket, and weights that are gathered ahead or kept, follow no edge.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class ReductionStream:
    """The stream on which all gradients of a model are reduced: that of its last forward pass.

    index: of its GPU; None on CPUs. handle: CUDA's; None before the first pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.index = device.index if device.type == "cuda" else None
        self.handle: int | None = None
        self._stream: torch.cuda.Stream | None = None

    def follow(self, stream: torch.cuda.Stream | None) -> None:
        """Reduce on this stream from now on."""
        self._stream, self.handle = stream, None if stream is None else stream.cuda_stream

    def is_elsewhere(self) -> bool:
        """True if another stream is current."""
        if self.index is None or torch._C._cuda_getCurrentRawStream(self.index) == self.handle:
            return False
        if self._stream is None:  # a part of the model was called alone
            self.follow(torch.cuda.current_stream(self.index))
            return False
        return True

    def enter(self, *gradients: Tensor) -> AbstractContextManager[object]:
        """Context in which this stream is current, and may read gradients that the one before has made.

        Their memory is not used again before this stream has read it.
        """
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.index))
        for gradient in gradients:
            gradient.record_stream(self._stream)
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Have the current stream wait for this one."""
        if self.is_elsewhere() and self._stream is not None:
            torch.cuda.current_stream(self.index).wait_stream(self._stream)


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which work is enqueued now; None on other devices than GPUs."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def use_here(tensor: Tensor, made_on: torch.cuda.Stream | None) -> None:
    """Have the current stream wait for a tensor that another one has made, and keep its memory until it has read it."""
    if made_on is not None and (current := torch.cuda.current_stream(tensor.device)) != made_on:
        current.wait_stream(made_on)
        tensor.record_stream(current)


def bound_to_stream(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The function, to be run later on the stream that is current now, which has what it reads."""
    stream = current_stream(device)
    if stream is None:
        return function

    def run() -> None:
        with torch.cuda.stream(stream):
            function()

    return run
