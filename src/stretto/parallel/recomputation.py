# SPDX-License-Identifier: Apache-2.0
"""Recomputation (activation checkpointing): which activations of its blocks a model keeps for the backward pass.

`checkpoint_activations` has each block, a child of the model's longest nn.ModuleList, run by a function in the place of
torch's `checkpoint`, which takes several times as many calls; in a model without such a list, each block that is
gathered by itself. It runs the blocks in segments (`_BlockSegment`), which are computed again together:

    full                     a segment is one block, whose input is kept
    every:k                  k blocks, from the input of the first
    products, communication  one block, in contexts that keep outputs (`stretto.parallel.comm.kept_outputs`)
    host                     a function that finds one block's input in pinned host memory

In every mode weights that were gathered over z are gathered again for the recomputation. transformers' layers
checkpoint themselves: there the function takes the place of their `_gradient_checkpointing_func`.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from stretto.execution import Recomputation
from stretto.huggingface.pretrained_model import (
    checkpoint_layers,
    checkpoints_itself,
    is_pretrained_model,
    refusal_of_checkpointing,
)
from stretto.parallel.blocks import find_blocks
from stretto.parallel.comm.kept_outputs import recomputation_contexts
from stretto.parallel.layers.block_shard import BlockShard
from stretto.parallel.layers.linear import ParallelLinear
from stretto.parallel.layers.sharded_module import ShardedModule
from stretto.parallel.pipeline.cutting import PassedBy
from stretto.parallel.state import state_of
from stretto.suggestions import require_type

# Runs a block as torch's `checkpoint` does: its forward, or a part of that, and its arguments.
_Runner = Callable[..., Any]


def checkpoint_activations(model: nn.Module, recompute: str = "full", names: Sequence[str] = ()) -> None:
    """Recompute every block of the model in the backward pass: each child of its longest nn.ModuleList.

    recompute: a mode of `parallelize(recompute=...)` ("none" leaves the model as it is). names: the blocks of a model
    without an nn.ModuleList, by default the repeated ones (`stretto.parallel.blocks.find_blocks`). Names do not change.
    Weights gathered over z are freed after use, and gathered again when a block is recomputed. Raises ValueError for an
    unknown mode, if there are no blocks, or if they cannot be computed again together.
    """
    require_type(model, nn.Module, "model")
    mode = Recomputation.parse(recompute)
    if not mode.is_on:
        return
    blocks = check_blocks(model, recompute, names)
    for module in model.modules():
        if isinstance(module, ShardedModule) and not mode.sums_again:
            module.is_local = False  # plain products are no outputs for a mode to keep
            module.followed = None
        if isinstance(module, ParallelLinear):
            module.plan.shard.gatherer.stop_keeping()
    if checkpoint_layers(model):
        _run_layers_by(model, recompute)
        return
    for together in _computed_together(model, blocks):
        for block, run in zip(together, _make_runners(recompute, len(together)), strict=True):
            block.forward = partial(run, block.forward)


def _computed_together(model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The runs of blocks among which segments are cut: all blocks, or those of each pipeline stage of this rank."""
    state = state_of(model)
    if state is None or (stages := state.stages) is None:
        return [list(blocks)]
    modules = dict(model.named_modules())
    own = {id(modules[name]): index for index, name in enumerate(stages.block_names)}
    here = {own[id(block)]: block for block in blocks if id(block) in own}
    return [[here[index] for index in run if index in here] for run in stages.local_runs()]


def check_blocks(model: nn.Module, recompute: str, names: Sequence[str] = ()) -> list[nn.Module]:
    """Find the blocks that are recomputed in this mode. Raises ValueError as `checkpoint_activations` does.

    Of transformers' layers, every:k takes those that checkpoint themselves one by one.
    """
    mode, name = Recomputation.parse(recompute), type(model).__name__
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    # The forward of what has none, a list or a holder of modules, is never called.
    lists = [blocks for blocks in lists if all(type(block).forward is not nn.Module.forward for block in blocks)]
    if not any(lists):
        lists = [[model.get_submodule(block) for block in names or find_blocks(model)]]
    if not any(lists):
        raise ValueError(
            f"recompute is {recompute!r}, but {name} has no nn.ModuleList or nn.Sequential of blocks, so its blocks "
            "are not known: name them, parallelize(..., blocks=[...]); recompute='none' would do"
        )
    if refusal := refusal_of_checkpointing(model):
        raise ValueError(f"recompute is {recompute!r}, but {refusal}; recompute='none' would do")
    if is_pretrained_model(model) and mode.kind == "every":
        lists = [layers for layers in lists if layers and all(map(_checkpoints_itself, layers))]
        if not lists:
            raise ValueError(
                f"recompute is {recompute!r}, but the code of {name} checkpoints its layers in a loop of its own, "
                "which computes each again by itself; recompute='full' would do"
            )
    blocks = max(lists, key=len)
    mode.check_blocks(len(blocks))
    return blocks


def _checkpoints_itself(layer: nn.Module) -> bool:
    """True for a transformers layer whose forward checkpoints itself."""
    return isinstance(layer, PassedBy) or checkpoints_itself(layer)  # PassedBy: on another rank of a pipeline


def _make_runners(recompute: str, blocks: int) -> list[_Runner]:
    """The function that runs each block.

    A compiler traces neither it nor the block: the recomputation, which no compiler calls, has to save what the forward
    pass has saved. torch's `checkpoint` does the same. What was compiled before, say a block's MLP, stays so.
    """
    mode = Recomputation.parse(recompute)
    loop = _SegmentedLoop(mode.blocks, blocks, partial(recomputation_contexts, recompute))
    runners: list[_Runner] = [partial(loop.run, number) for number in range(blocks)]
    if mode.kind == "host":
        runners = [_InputsOnHost(runners[0]).run] * blocks
    return [torch.compiler.disable(runner) for runner in runners]


def _run_layers_by(model: nn.Module, recompute: str) -> None:
    """Have the modules of a transformers model that checkpoint themselves run by the mode's functions."""
    runners: dict[int, _Runner] = {}
    is_segmented = Recomputation.parse(recompute).kind == "every"
    for layers in model.modules() if is_segmented else ():
        if isinstance(layers, nn.ModuleList) and all(map(_checkpoints_itself, layers)):
            for together in _computed_together(model, list(layers)):
                runners |= zip(map(id, together), _make_runners(recompute, len(together)), strict=True)
    state = state_of(model)
    found = {} if state is None else state.block_shards
    shards = {name: found[module] for name, module in model.named_modules() if module in found}
    for name, module in model.named_modules():
        held = [shard for block, shard in shards.items() if f"{name}.".startswith(f"{block}.")]
        if held and id(module) in runners:
            runners[id(module)] = _gathering(runners[id(module)], held)
    # Layers that no segment has are computed again by themselves.
    (alone,) = _make_runners("full" if is_segmented else recompute, 1)
    for module in model.modules():
        if getattr(module, "_gradient_checkpointing_func", None) is not None:
            module._gradient_checkpointing_func = runners.get(id(module), alone)  # type: ignore[assignment]


def _gathering(run: _Runner, shards: Sequence[BlockShard]) -> _Runner:
    """Have a layer's function gather its blocks, which are held only once the backward pass comes to them: the last
    layer of a segment has those before it computed again, too."""

    def run_gathering(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        function, args, kwargs = _without_partial(function, args, kwargs)

        def gather_and_call(*inputs: Any, **options: Any) -> Any:
            with ExitStack() as stack:
                for shard in shards:
                    stack.enter_context(shard.running())
                return function(*inputs, **options)

        return run(gather_and_call, *args, **kwargs)

    return run_gathering


def _without_partial(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The same call with a functools.partial's arguments among its own: transformers' layers pass some in one."""
    if not isinstance(function, partial):
        return function, args, kwargs
    return function.func, (*function.args, *args), {**function.keywords, **kwargs}


class _SegmentedLoop:
    """Runs the blocks of a model's loop, of which each run of `length` is a segment."""

    def __init__(self, length: int, blocks: int, contexts: Callable[[], Any]) -> None:
        self._length = length
        self._blocks = blocks
        self._contexts = contexts
        self._open: _BlockSegment | None = None

    def run(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run block `number`. ValueError if it continues a segment, and its input is not the last output."""
        function, args, kwargs = _without_partial(function, args, kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        segment, self._open = self._open, None
        if number % self._length == 0:
            segment = _BlockSegment(self._contexts())
        elif segment is None or segment.next_block != number or not segment.continues_with(args, kwargs):
            raise ValueError(
                f"recompute='every:{self._length}' computes blocks {number - 1} and {number} again together, but block "
                f"{number} was not given what block {number - 1} returned; recompute='full' would do"
            )
        segment.next_block = number + 1
        output = segment.run(function, args, kwargs)
        if segment.next_block % self._length and segment.next_block < self._blocks:
            self._open = segment
        else:
            segment.last_output = ()
        return output


@dataclass(frozen=True)
class _FromLast:
    """Stands for an argument: a tensor that the block before returned, by its number among the tensors."""

    number: int


@dataclass(frozen=True)
class _Input:
    """Stands for a tensor argument: the tensor without its graph, and its version."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Input":
        return cls(tensor.detach().requires_grad_(tensor.requires_grad), tensor._version)

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "an input of a block was overwritten in place after the block had run, so that the block cannot be "
                "computed again: write to a copy, or parallelize with recompute='none'"
            )
        return self.tensor


class _Call:
    """One block's call in a segment: its function, its arguments, and the state of random numbers and autocast."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any, last_output: Sequence[Tensor]) -> None:
        self.function = function
        leaves, self.structure = tree_flatten((args, kwargs))
        places = {id(tensor): number for number, tensor in enumerate(last_output)}

        def keep(leaf: Any) -> Any:
            if id(leaf) in places:
                return _FromLast(places[id(leaf)])
            return _Input.of(leaf) if isinstance(leaf, Tensor) else leaf

        self.leaves = list(map(keep, leaves))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.device = next((each.device.type for each in tensors if each.device.type != "cpu"), "cpu")
        self.random_state = torch.get_rng_state()
        self.device_states = get_device_states(*tensors) if self.device != "cpu" else ([], [])
        self.autocasts = [
            partial(
                torch.autocast,
                kind,
                dtype=torch.get_autocast_dtype(kind),
                enabled=torch.is_autocast_enabled(kind),
                cache_enabled=torch.is_autocast_cache_enabled(),
            )
            for kind in dict.fromkeys((self.device, "cpu"))
        ]

    def run_again(self, last_output: Sequence[Tensor]) -> Any:
        def find(leaf: Any) -> Any:
            if isinstance(leaf, _FromLast):
                return last_output[leaf.number]
            return leaf.get() if isinstance(leaf, _Input) else leaf

        args, kwargs = tree_unflatten(list(map(find, self.leaves)), self.structure)
        devices, states = self.device_states
        device_type = "cuda" if self.device == "cpu" else self.device
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices, device_type=device_type))
            torch.set_rng_state(self.random_state)
            if devices:
                set_device_states(devices, states, device_type=device_type)
            for autocast in self.autocasts:
                stack.enter_context(autocast())
            return self.function(*args, **kwargs)


class _AllSaved(BaseException):  # no error, and not for a block's own `except Exception`
    """Raised once a recomputation has saved the last tensor, since the rest is not needed."""


class _BlockSegment:
    """Blocks that are computed again together, as one is by torch's `checkpoint`. Saved tensors are their numbers."""

    def __init__(self, contexts: tuple[Any, Any]) -> None:
        self.next_block = 0
        self.last_output: Sequence[Tensor] = ()
        self._forward, self._again = contexts
        self._calls: list[_Call] = []
        self._saved: list[tuple[torch.Size, torch.dtype]] = []
        self._found: dict[int, Tensor] = {}

    def continues_with(self, args: Any, kwargs: Any) -> bool:
        """True if these arguments have a tensor that the last block returned."""
        own = {id(tensor) for tensor in self.last_output}
        return any(id(leaf) in own for leaf in tree_leaves((args, kwargs)))

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._calls.append(_Call(function, args, kwargs, self.last_output))
        with saved_tensors_hooks(self._pack, self._unpack), self._forward:
            output = function(*args, **kwargs)
        self.last_output = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return output

    def _pack(self, tensor: Tensor) -> int:
        self._saved.append((tensor.shape, tensor.dtype))
        return len(self._saved) - 1

    def _unpack(self, number: int) -> Tensor:
        if number not in self._found:  # a second backward pass through the same graph computes all again
            self._compute_again()
        return self._found.pop(number)

    def _compute_again(self) -> None:
        self._found.clear()

        def collect(tensor: Tensor) -> Tensor:
            number = len(self._found)
            if (tensor.shape, tensor.dtype) != self._saved[number]:  # one more tensor would not show in their number
                raise RuntimeError(
                    f"blocks that were computed again saved a tensor {list(tensor.shape)} of {tensor.dtype} for the "
                    f"backward pass where they had saved {list(self._saved[number][0])} of {self._saved[number][1]} in "
                    "their forward pass: they must run the same code again"
                )
            tensor = tensor.detach()  # with its graph, a node that saves its output would keep itself alive
            self._found[number] = tensor
            if len(self._found) == len(self._saved):
                raise _AllSaved
            return tensor

        output: Sequence[Tensor] = ()
        with suppress(_AllSaved), saved_tensors_hooks(collect, lambda tensor: tensor), self._again, torch.enable_grad():
            for call in self._calls:
                output = [leaf for leaf in tree_leaves(call.run_again(output)) if isinstance(leaf, Tensor)]
        if len(self._found) != len(self._saved):
            raise RuntimeError(
                f"blocks that were computed again saved {len(self._found)} tensors for the backward pass, and "
                f"{len(self._saved)} in their forward pass: they must run the same code again"
            )


class _HostInputs:
    """One block's inputs in host memory, and on the device again once the backward pass needs them, or soon will.

    before: those of the block before, which the backward pass needs next.
    """

    def __init__(
        self, tensors: Sequence[Tensor], stream: "torch.cuda.Stream | None", before: "_HostInputs | None"
    ) -> None:
        self._stream = stream
        self._before = (lambda: None) if before is None else weakref.ref(before)
        self._need_gradients = [tensor.requires_grad for tensor in tensors]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._fetched: list[Tensor] | None = None
        with torch.no_grad():
            if stream is None:
                self._host = [tensor.clone() for tensor in tensors]
                return
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                self._host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
                for host, tensor in zip(self._host, tensors, strict=True):
                    host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
                self._done = stream.record_event()

    def wait(self) -> None:
        """Have the current stream wait until what was started last has been copied."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def start_fetching(self) -> None:
        """Begin to copy the inputs to the device."""
        if self._fetched is not None:
            return
        if self._stream is None:
            self._fetched = [host.clone() for host in self._host]
            return
        with torch.cuda.stream(self._stream):
            self._fetched = [host.to(self._device, non_blocking=True) for host in self._host]
            self._done = self._stream.record_event()

    def get(self) -> list[Tensor]:
        """The inputs on the device, which the current stream may use; those of the block before are fetched next."""
        self.start_fetching()
        self.wait()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        for tensor, needs_gradient in zip(fetched, self._need_gradients, strict=True):
            tensor.requires_grad_(needs_gradient)
            if self._stream is not None:
                tensor.record_stream(torch.cuda.current_stream(self._device))
        before = self._before()
        if before is not None:
            before.start_fetching()
        return fetched


class _InputsOnHost:
    """Runs blocks whose inputs are in pinned host memory from the forward to the backward pass.

    Both ways are copies on a side stream. A block's forward pass ends when its input has left, so that no more than
    one block's is on its way. Tensors that need no gradient stay where they are, but for a block's first one: blocks
    share them.
    """

    def __init__(self, run: _Runner) -> None:
        self._run = run
        self._last: Callable[[], _HostInputs | None] = lambda: None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block. RuntimeError if it overwrites its input in place, which is being copied."""
        function, args, kwargs = _without_partial(function, args, kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        floating = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        moved = [place for place in floating if place == floating[0] or leaves[place].requires_grad]
        tensors = [leaves[place] for place in moved]
        inputs = _HostInputs(tensors, self._stream_of(tensors), self._last())
        self._last = weakref.ref(inputs)
        given = [tensors]  # to the forward pass, and not kept after it

        def call(*others: Any) -> Any:
            found = list(others)
            for place, tensor in zip(moved, given.pop() if given else inputs.get(), strict=True):
                found[place] = tensor
            args, kwargs = tree_unflatten(found, structure)
            return function(*args, **kwargs)

        versions = [tensor._version for tensor in tensors]
        for place in moved:  # an empty tensor shows on which device random numbers are drawn
            leaves[place] = leaves[place].new_empty(0)
        output = self._run(call, *leaves)
        inputs.wait()
        if versions != [tensor._version for tensor in tensors]:
            raise RuntimeError(
                "a block has overwritten its input in place, which recompute='host' copies to the host meanwhile: "
                "recompute='full' keeps it on the device"
            )
        return output

    def _stream_of(self, tensors: Sequence[Tensor]) -> "torch.cuda.Stream | None":
        """The side stream of the tensors' GPU; None on a CPU."""
        if not tensors or not tensors[0].is_cuda:
            return None
        device = tensors[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
