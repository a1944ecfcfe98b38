# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: a model is cut between its blocks, and each rank keeps the blocks of its stages, under their names.

A stage runs the model's own forward. Around its blocks that code runs unchanged, but what the rank does not
have is passed by: a module of an earlier stage, a block or an embedding, returns zeros in the shapes of its results,
and the first block of the stage gets the activations that the stage before has sent in the place of its arguments. When
the code reaches the first block after the stage, `_EndOfStage` ends the forward, and the arguments that were meant for
that block are sent. Masks, positions and rotary angles are computed by each stage from the model's
inputs.

    model code of a stage that has blocks 2 and 3:

    x = embedding(ids)      passed by        x = blocks[2](x)     gets the activations that were received
    x = blocks[0](x)        passed by        x = blocks[3](x)     computes
    x = blocks[1](x)        passed by        x = blocks[4](x)     ends the forward; x is sent to the next stage
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.grid import Grid
from stretto.parallel.layers.token_shards import TokenShards
from stretto.parallel.pipeline.activations import Activations, OutputLayouts, StandIns, depend_on, tensors_of
from stretto.parallel.state import state_of


class PassedOver(NamedTuple):
    """Output that a module returns in place of its forward, which another rank has."""

    output: Any


class _EndOfStage(BaseException):
    """Ends a stage's forward with its output to send. No model code catches it by `except Exception`."""

    def __init__(self, activations: Activations) -> None:
        super().__init__("a pipeline stage has ended")
        self.activations = activations


@dataclass
class StagePass:
    """One forward pass of one stage, and its backward pass, which may run blocks again.

    received: of the stage before; None on the first stage. is_given: whether a hook has given it to the first block.
    gradients: of what was received, after the backward pass.
    layouts: of what this stage's modules, and those before, have returned. stand_ins: for the modules before. made:
    while the stage learns what to send, the tensors that it has received and that its blocks have returned.
    last_block: the number of the block that was called last.
    """

    stage: int
    first: int
    end: int
    sends_random_state: bool
    received: Activations | None = None
    is_given: bool = False
    gradients: list[Tensor | None] = field(default_factory=list)
    layouts: OutputLayouts = field(default_factory=OutputLayouts)
    stand_ins: StandIns | None = None
    made: list[Tensor] | None = None
    has_entered: bool = False
    last_block: int = -1
    batch_shape: tuple[int, int] = (0, 0)


@dataclass
class ModelPart:
    """A module outside of the blocks that has parameters, and which stage has it."""

    name: str
    is_before: bool


@dataclass
class ModelStages:
    """The stages of a parallelized model.

    cuts: stage s has the blocks cuts[s]:cuts[s + 1]. stage_ranks: the pipe rank of each stage. rank: this one's.
    block_names: of all blocks. current: the pass that runs now. is_tied: whether this rank holds parameters that
    another stage's rank has too. checked: stages that were found to have no connections across their cuts. unsent: of a
    stage that has learned what to send, the arguments of the next block that every stage makes by itself. tokens: of a
    model with sequence sharding. has_roles: whether the model is sharded by roles, of which this rank's stages may have
    none. skeleton: the whole model on the meta device, for names and shapes.
    """

    cuts: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    rank: int
    block_names: tuple[str, ...]
    placement: str
    parts: tuple[ModelPart, ...] = ()
    is_tied: bool = False
    needs_random_state: bool = False
    tokens: TokenShards | None = None
    has_roles: bool = False
    skeleton: nn.Module | None = None
    current: StagePass | None = None
    checked: set[int] = field(default_factory=set)
    unsent: dict[int, set[int]] = field(default_factory=dict)

    @classmethod
    def whole(cls, name: str) -> "ModelStages":
        """The one stage of a model that is not cut."""
        return cls((0, 1), (0,), 0, (name,), "loops")

    @property
    def count(self) -> int:
        return len(self.stage_ranks)

    @property
    def mine(self) -> tuple[int, ...]:
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == self.rank)

    @property
    def virtual_stages(self) -> int:
        return len(self.mine)

    def must_learn(self, stage: int) -> bool:
        """True if a forward pass must record gradients to find the stage's outputs, or skips of the previous cut."""
        return (stage < self.count - 1 and stage not in self.unsent) or (stage > 0 and stage not in self.checked)

    def has_block(self, index: int) -> bool:
        """True if one of this rank's stages has this block."""
        return any(self.cuts[stage] <= index < self.cuts[stage + 1] for stage in self.mine)

    def local_runs(self) -> list[tuple[int, ...]]:
        """The block indices of each of this rank's stages."""
        return [tuple(range(self.cuts[stage], self.cuts[stage + 1])) for stage in self.mine]

    @contextmanager
    def running(self, stage_pass: StagePass) -> Iterator[None]:
        """Have the model's forward, or blocks that are computed again, be of this pass."""
        before, self.current = self.current, stage_pass
        if self.tokens is not None and any(stage_pass.batch_shape):
            self.tokens.shape = stage_pass.batch_shape
        try:
            yield
        finally:
            self.current = before
            if self.tokens is not None:
                stage_pass.batch_shape = self.tokens.shape

    def begin(self, stage: int, received: Activations | None) -> StagePass:
        begun = StagePass(stage, self.cuts[stage], self.cuts[stage + 1], self.needs_random_state, received)
        if received is not None:
            begun.batch_shape, begun.layouts = received.batch_shape, received.layouts
            refusal = self._refusal_of_skip(stage)
            begun.stand_ins = StandIns(received.layouts, received.tensors[0].device, refusal)
            if torch.is_grad_enabled():
                begun.gradients = received.record()
                if stage not in self.checked:
                    begun.stand_ins.leaves = []
        if torch.is_grad_enabled() and stage < self.count - 1 and stage not in self.unsent:
            begun.made = [] if received is None else list(received.tensors)
        return begun

    def run(self, model: nn.Module, stage_pass: StagePass, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the model's forward for one stage: `Activations` to send, or what the model returns on the last stage."""
        stage, is_last = stage_pass.stage, stage_pass.stage == self.count - 1
        with self.running(stage_pass):
            try:
                output = model(*args, **kwargs)
            except _EndOfStage as end:
                output = end.activations
        if is_last == isinstance(output, Activations) or (stage > 0 and not stage_pass.has_entered):
            raise self._out_of_order()
        if stage_pass.stand_ins is not None and stage_pass.stand_ins.leaves is not None:
            ends = output.tensors if isinstance(output, Activations) else tensors_of(output)
            if depend_on(ends, stage_pass.stand_ins.leaves):
                raise ValueError(stage_pass.stand_ins.refusal)
            self.checked.add(stage)
        stage_pass.stand_ins = stage_pass.made = None
        return output

    def _refusal_of_skip(self, stage: int) -> str:
        return (
            f"stage {stage} uses tensors of an earlier stage other than the arguments of "
            f"{self.block_names[self.cuts[stage]]}: a connection skips the cut before that block. Cut elsewhere, with "
            "parallelize(..., stages=StageOptions(cuts=...)), or use pipe=1"
        )

    def _out_of_order(self) -> ValueError:
        return ValueError(
            f"the model's forward has not called its blocks {self.block_names[0]} to {self.block_names[-1]} once each "
            "and in order, as pipeline stages need; use pipe=1"
        )

    # What the modules of a cut model do in their forward.

    def enter_block(
        self, index: int, signature: inspect.Signature, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | PassedOver:
        """Pass by or end at a block, or give the arguments with which to run its forward."""
        now = self._require_pass()
        if not in_backward():  # transformers' layers are computed again through here
            if index <= now.last_block or index > now.end:
                raise self._out_of_order()
            now.last_block = index
        if index < now.first:
            assert now.stand_ins is not None
            return PassedOver(now.stand_ins.make(index))
        if index == now.end:
            raise _EndOfStage(self._leaving(now, index, signature, args, kwargs))
        if index == now.first:
            now.has_entered = True
            if now.received is not None:
                args, kwargs = self._entering(now, index, signature, args, kwargs)
        return args, kwargs

    def enter_part(self, part: ModelPart, args: Any, kwargs: Any) -> tuple[Any, Any] | PassedOver:
        """Pass by a module outside of the blocks, or give the arguments with which to run its forward."""
        now = self._require_pass()
        if part.is_before:
            if now.has_entered:
                raise ValueError(
                    f"{part.name} is called after the blocks, and was taken for a part of the first stage: "
                    f"parallelize(..., stages=StageOptions(last=[{part.name!r}])) gives it to the last one"
                )
            if now.received is not None:
                assert now.stand_ins is not None
                return PassedOver(now.stand_ins.make(part.name))
        elif not now.has_entered or now.stage != self.count - 1:
            raise ValueError(
                f"{part.name} is called before the blocks, and was taken for a part of the last stage: "
                f"parallelize(..., stages=StageOptions(first=[{part.name!r}])) gives it to the first one"
            )
        return args, kwargs

    def note_output(self, module: int | str, output: Any) -> Any:
        """Record the output of a block, or of a module before the blocks; returns it."""
        now = self._require_pass()
        if in_backward() or now.stage == self.count - 1:
            return output
        now.layouts.note(module, output)
        return self._show(now, output)

    def _show(self, now: StagePass, output: Any) -> Any:
        """While the stage learns what to send, have autograd show what is made from a module's output.

        The output of frozen modules needs no gradient, but must still be sent.
        """
        if now.made is None:
            return output
        shown = tree_map(lambda leaf: leaf.detach().requires_grad_().clone() if _is_constant(leaf) else leaf, output)
        now.made += tensors_of(shown)
        return shown

    def _require_pass(self) -> StagePass:
        if self.current is None:
            raise ValueError(
                "this model is cut into pipeline stages, and each rank has some of them: call step or evaluate of "
                "stretto.parallel.Pipeline, in place of the model"
            )
        return self.current

    def _leaving(self, now: StagePass, index: int, signature: inspect.Signature, args: Any, kwargs: Any) -> Activations:
        """The arguments of the block after the stage that are sent.

        Its first tensor, all that need gradients, and all that blocks have returned.
        """
        given = signature.bind(*args, **kwargs).arguments
        names = list(signature.parameters)
        unsent = self.unsent.get(now.stage)
        places: list[int] = []
        left: set[int] = set()
        for name, value in given.items():
            place = names.index(name)
            if signature.parameters[name].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                if any(tensor.requires_grad for tensor in tensors_of(value)):
                    raise ValueError(
                        f"{self.block_names[index]} gets a tensor that needs a gradient in {name}, which no stage can "
                        "send: name it among the parameters of the block's forward"
                    )
                continue
            # An argument that was no tensor in the pass in which the stage has learned may be of any block.
            is_sent = place not in unsent if unsent is not None else any(value is each for each in now.made or ())
            if isinstance(value, Tensor) and (not places or is_sent or value.requires_grad):
                places.append(place)
            elif isinstance(value, Tensor):
                left.add(place)
            elif any(tensor.requires_grad for tensor in tensors_of(value)):
                raise ValueError(
                    f"{self.block_names[index]} gets several tensors that need gradients in {name}, which no stage can "
                    "send: pass each as an argument of its own"
                )
        if not places:
            raise ValueError(f"{self.block_names[index]} gets no tensor, so there is nothing for a stage to send")
        self.unsent[now.stage] = left if unsent is None else unsent - set(places)
        tensors = [given[names[place]] for place in places]
        state = None
        if now.sends_random_state:
            on_gpu = tensors[0].is_cuda
            state = torch.get_rng_state(), torch.cuda.get_rng_state(tensors[0].device) if on_gpu else None
        batch_shape = (0, 0) if self.tokens is None else self.tokens.shape
        return Activations(tensors, places, now.layouts, batch_shape=batch_shape, random_state=state)

    def receive(
        self, index: int, signature: inspect.Signature, _: Any, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook before a stage's first block, which gives it what was received: its backward hooks wait for gradients
        of the arguments that they see."""
        now = self.current
        if in_backward() or now is None or now.received is None or index != now.first:
            return None
        now.is_given = True
        return self._place_received(now.received, index, signature, args, kwargs)

    def _entering(
        self, now: StagePass, index: int, signature: inspect.Signature, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a stage's first block, with what was received in its places."""
        received = now.received
        assert received is not None
        if received.random_state is not None:
            cpu, gpu = received.random_state
            torch.set_rng_state(cpu)
            if gpu is not None and received.tensors[0].is_cuda:
                torch.cuda.set_rng_state(gpu, received.tensors[0].device)
        if now.is_given:  # by `receive`; what other hooks have made of it stands
            now.is_given = False
            return args, kwargs
        return self._place_received(received, index, signature, args, kwargs)

    def _place_received(
        self, received: Activations, index: int, signature: inspect.Signature, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        names = list(signature.parameters)
        for place, tensor in zip(received.places, received.tensors, strict=True):
            if not 0 <= place < len(names):
                raise ValueError(f"{self.block_names[index]} has no argument {place}, which the stage before has sent")
            bound.arguments[names[place]] = tensor
        return bound.args, bound.kwargs


def whole_model(model: nn.Module) -> nn.Module:
    """The model, or, of one that is cut into pipeline stages, the whole model on the meta device."""
    state = state_of(model)
    stages = None if state is None else state.stages
    return model if stages is None or stages.skeleton is None else stages.skeleton


def names_on_other_stages(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that other pipeline stages have."""
    own = {name for name, _ in model.named_parameters()}
    return frozenset(name for name, _ in whole_model(model).named_parameters() if name not in own)


def _is_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad


def make_tie_group(stages: ModelStages, grid: Grid) -> dist.ProcessGroup | None:
    """The group of the ranks that hold the first and the last stage; None if that is one rank. Collective."""
    ends = {stages.stage_ranks[0], stages.stage_ranks[-1]}
    if len(ends) == 1:
        return None
    ends_of_rows = [[row[rank] for rank in ends] for row in grid.partition(("pipe",))]
    group = grid.shared_group(ends_of_rows, "tied weights")
    if group is not None:
        grid.other_groups[group.group_name] = "pipe"
    return group
