"""A training step as one CUDA graph: with a small batch, the host takes longer to launch it than GPUs to run it."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import failures
from stretto.parallel.low_precision_weights import FollowedCopies, following_copies

WARM_UP = 3  # a first step makes what later ones use, a second follows its order, and a third has it all
REGISTERS = "NCCL_GRAPH_REGISTER"
"""NCCL's switch: whether it registers the tensors that it meets in a graph, so that peers reach them directly."""


class CapturedStep:
    """Calls `step(*tensors)`; after a few calls, replays what they did to the GPU as one graph.

    `step` takes tensors and returns a tuple of tensors, does the same work whatever is in them, never waits for the
    GPU, and holds every number that changes from step to step in a tensor, the learning rate too. Every call is a step,
    those before the graph and the one that captures it included. All ranks call it equally often.
    warm_up: how many calls run as they are before one is captured. ValueError where there is no GPU,
    RuntimeError where segments of the allocator may grow and NCCL was not told (`NCCL_GRAPH_REGISTER`): it would hang.

    Results are the caller's: the next call does not change them. `close` it, or drop it, before the process group is
    destroyed: NCCL waits for the graphs that hold its collectives.
    """

    def __init__(self, step: Callable[..., tuple[Tensor, ...]], *, warm_up: int = WARM_UP) -> None:
        if not torch.cuda.is_available():
            raise ValueError("a CUDA graph needs a GPU, and there is none")
        self._step: Callable[..., tuple[Tensor, ...]] | None = step
        self._remaining = warm_up
        # One stream from the first step on: autograd sums a parameter's gradients where it first met the parameter.
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()
        self._copies = FollowedCopies()

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One step. ValueError once it was closed, and for tensors of other shapes or dtypes than the graph's.

        PeerError where a wait for another rank has failed in a step before, as far as the host can know: kernels of
        replayed graphs cannot raise. Optimizers have then skipped that step on the device (`stretto.optim.guard`).
        """
        if self._step is None:
            raise ValueError("this captured step was closed")
        failures.check()
        callers = torch.cuda.current_stream()
        self._stream.wait_stream(callers)
        with torch.cuda.stream(self._stream):
            results = self._run(tensors)
        callers.wait_stream(self._stream)
        for tensor in tensors:
            tensor.record_stream(self._stream)
        for tensor in results:
            tensor.record_stream(callers)
        return results

    def close(self) -> None:
        """Give the graph and its memory back."""
        if self._graph is not None:
            self._stream.synchronize()
            self._graph.reset()
        self._graph = self._step = None
        self._inputs = self._outputs = ()
        self._copies = FollowedCopies()

    def _run(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._remaining:
            self._remaining -= 1
            assert self._step is not None
            return self._step(*tensors)
        if self._graph is None:
            self._capture(tensors)
        assert self._graph is not None
        for kept, given in zip(self._inputs, tensors, strict=True):
            if (kept.shape, kept.dtype) != (given.shape, given.dtype):
                raise ValueError(
                    f"the step was captured with {_describe(self._inputs)} and cannot run with {_describe(tensors)}"
                )
            kept.copy_(given)
        self._copies.refresh()
        self._graph.replay()
        self._copies.note_replay()
        return tuple(output.clone() for output in self._outputs)

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        assert self._step is not None
        _require_replayable()
        self._inputs = tuple(tensor.clone() for tensor in tensors)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads (NCCL's watchdog) may talk to the GPU meanwhile.
        with (
            _keeping_garbage(),
            following_copies() as copies,
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._outputs = self._step(*self._inputs)
        self._graph, self._copies = graph, copies


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Collect it before, and none inside: what is freed may wait for the device, which no capture survives."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _require_replayable() -> None:
    """RuntimeError where NCCL would take a tensor for one piece of memory that is several, and replays hang."""
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    if is_alone or REGISTERS in os.environ:
        return
    if any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
        raise RuntimeError(
            "the allocator's segments may grow (expandable_segments:True), and NCCL's collectives on such memory hang "
            f"when a CUDA graph of them is replayed: set {REGISTERS}=0 before the job starts"
        )


def _describe(tensors: tuple[Any, ...]) -> str:
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in tensors)
