# SPDX-License-Identifier: Apache-2.0
"""Captures a training step as one CUDA graph: with a small batch, launching takes longer than running."""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.memory import failures
from stretto.parallel.low_precision_weights import CapturedWeights, capturing_weights
from stretto.parallel.state import require_state

WARM_UP = 3  # the first step allocates, the second runs in the learned order, the third uses all of it
REGISTERS = "NCCL_GRAPH_REGISTER"
"""NCCL's switch for registering the tensors of a captured graph, so that peers access them directly."""


class CapturedStep:
    """Calls `step(*tensors)`, captures it after a few calls, and replays it as one CUDA graph from then on.

    `step` takes tensors and returns a tuple of tensors. It must run the same kernels for all values, must never wait
    for the GPU, and must keep every number that changes between steps in a tensor, including the learning rate. Every
    call runs one step, also the calls before the capture and the one that captures. All ranks must call it equally
    often. warm_up: number of calls before the capture. Raises ValueError without a GPU, and RuntimeError for a step
    that cannot be captured, and if the allocator uses expandable segments without `NCCL_GRAPH_REGISTER=0`, because
    replays would hang.

    Which parameters of a parallelized model are frozen, `no_sync` and `eval` around the call are captured, too: a call
    with others raises ValueError.

    The next call does not change the results of earlier calls. Call `close`, or drop the object, before the process
    group is destroyed: NCCL waits for graphs that contain its collectives.
    """

    def __init__(self, step: Callable[..., tuple[Tensor, ...]], *, warm_up: int = WARM_UP) -> None:
        if not torch.cuda.is_available():
            raise ValueError("a CUDA graph needs a GPU, and there is none")
        self._step: Callable[..., tuple[Tensor, ...]] | None = step
        self._remaining = warm_up
        # One stream from the first step on: autograd sums a parameter's gradients on the stream that first used it.
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._outputs: tuple[Tensor, ...] = ()
        self._weights = CapturedWeights()
        self._models: list[_CapturedModel] = []

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
        """Free the graph and its memory."""
        if self._graph is not None:
            self._stream.synchronize()
            self._graph.reset()
        self._graph = self._step = None
        self._inputs = self._outputs = ()
        self._weights, self._models = CapturedWeights(), []

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
        for model in self._models:
            model.check()
        self._weights.refresh()
        self._graph.replay()
        self._weights.note_replay()
        return tuple(output.clone() for output in self._outputs)

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        assert self._step is not None
        _require_replayable()
        self._inputs = tuple(tensor.clone() for tensor in tensors)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # thread_local: other threads (NCCL's watchdog) may call CUDA during capture.
        with (
            _explaining_failures(self._stream),
            _keeping_garbage(),
            _owning_workspaces(),
            _noting_models() as models,
            capturing_weights() as weights,
            torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._outputs = self._step(*self._inputs)
        self._graph, self._weights, self._models = graph, weights, [_CapturedModel(model) for model in models]


@contextmanager
def _explaining_failures(stream: torch.cuda.Stream) -> Iterator[None]:
    """Say what to look for where CUDA or torch refuses to capture an operation, after which random numbers work."""
    try:
        yield
    except RuntimeError as error:
        # Torch leaves its generator capturing where a capture fails, and ends that with the next one that does not.
        small = torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local")
        with suppress(RuntimeError), warnings.catch_warnings(), small:
            warnings.simplefilter("ignore")  # the graph is empty
        first: BaseException = error  # torch's end of the capture fails after it, and hides it
        while first.__context__ is not None:
            first = first.__context__
        if "captur" not in str(first):
            raise first from None
        raise RuntimeError(
            "the step cannot be captured as a CUDA graph: something in it makes the host wait for the GPU or draw "
            "random numbers (.item(), a branch on a tensor, dropout of a model on x or y). The error's cause says "
            f"where: {first}"
        ) from first


class _CapturedModel:
    """State of a parallelized model, other than tensors, that a captured step depends on, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mode = _mode_of(model)
        self._trainable = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]

    def check(self) -> None:
        """Raise ValueError if the step would not do now what it did."""
        now = _mode_of(self._model)
        changed = [name for name, was in self._mode.items() if now[name] is not was]
        changed += [name for name, parameter, was in self._trainable if parameter.requires_grad is not was]
        if changed:
            raise ValueError(
                f"{changed[0]} was changed after the step was captured, whose graph would run as before: make another "
                "CapturedStep once parameters are frozen or thawed, and outside of no_sync and eval()"
            )


def _mode_of(model: nn.Module) -> dict[str, bool]:
    return {"training": model.training, "no_sync": not require_state(model, "CapturedStep").gradient_reducer.is_syncing}


_noted: list[dict[nn.Module, None]] = []  # the models of the captures that are running


def note_forward(model: nn.Module) -> None:
    """Let the running captures, if there are any, know of a parallelized model's forward pass."""
    for models in _noted:
        models[model] = None


@contextmanager
def _noting_models() -> Iterator[dict[nn.Module, None]]:
    _noted.append({})
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


@contextmanager
def _keeping_garbage() -> Iterator[None]:
    """Collect garbage before, and none inside: freeing may wait for the device, which breaks a capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _owning_workspaces() -> Iterator[None]:
    """Have cuBLAS take its workspaces from the graph's memory, where nobody can free them under its replays.

    A workspace that a warm-up left belongs to torch, which frees it when Inductor records graphs of its own
    (`torch.compile(mode="reduce-overhead")`, transformers' `generate`); replays would then write to others' memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _require_replayable() -> None:
    """RuntimeError if NCCL would register a tensor that spans several memory segments: replays would hang."""
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
