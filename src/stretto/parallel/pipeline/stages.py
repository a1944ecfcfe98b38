# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: a model is cut between its blocks, and each rank keeps the blocks of its stages, under their names.

A stage runs the model's own forward. Around its blocks that code runs as it always does, but what the rank does not
have is passed by: a module of an earlier stage, a block or an embedding, returns zeros in the shapes of its results,
and the first block of the stage gets the activations that the stage before has sent in the place of its arguments. When
the code reaches the first block after the stage, `_EndOfStage` ends the forward, and the arguments that were meant for
that block are what the stage sends. Masks, positions and rotary angles are computed by each stage from the model's
inputs.

    model code of a stage that has blocks 2 and 3:

    x = embedding(ids)      passed by        x = blocks[2](x)     gets the activations that were received
    x = blocks[0](x)        passed by        x = blocks[3](x)     computes
    x = blocks[1](x)        passed by        x = blocks[4](x)     ends the forward; x is sent to the next stage
"""

import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stretto.execution import StageOptions
from stretto.parallel.blocks import find_blocks
from stretto.parallel.comm.autograd import in_backward
from stretto.parallel.grid import Grid
from stretto.parallel.layers.token_shards import TokenShards
from stretto.parallel.pipeline.activations import Activations, OutputLayouts, StandIns, depend_on, tensors_of
from stretto.parallel.roles.plan import ShardingPlan
from stretto.schedules import partition
from stretto.suggestions import did_you_mean

# Some models register their heads before their blocks, and call them by code that is not in their forward.
_NAMES_AFTER = re.compile(r"head$|(^|_)(head|pooler|classifier|final|out)(_|$)")


class _EndOfStage(BaseException):
    """Ends a stage's forward with what it sends. No code of a model catches it by `except Exception`."""

    def __init__(self, activations: Activations) -> None:
        super().__init__("a pipeline stage has ended")
        self.activations = activations


@dataclass
class StagePass:
    """One forward pass of one stage, and its backward pass, which may run blocks again.

    received: of the stage before; None on the first stage. gradients: of what was received, after the backward pass.
    layouts: of what this stage's modules, and those before, have returned. stand_ins: for the modules before. made:
    while the stage learns what to send, the tensors that it has received and that its blocks have returned.
    last_block: the number of the block that was called last.
    """

    stage: int
    first: int
    end: int
    sends_random_state: bool
    received: Activations | None = None
    gradients: list[Tensor | None] = field(default_factory=list)
    layouts: OutputLayouts = field(default_factory=OutputLayouts)
    stand_ins: StandIns | None = None
    made: list[Tensor] | None = None
    has_entered: bool = False
    last_block: int = -1
    batch_shape: tuple[int, int] = (0, 0)


@dataclass
class _Part:
    """A module outside of the blocks that has parameters, and which stage has it."""

    name: str
    is_before: bool


@dataclass
class ModelStages:
    """The stages of a parallelized model, as the attribute `pipeline_stages` of it.

    cuts: stage s has the blocks cuts[s]:cuts[s + 1]. stage_ranks: the pipe rank of each stage. rank: this one's.
    block_names: of all blocks. current: the pass that runs now. is_tied: whether this rank holds parameters that
    another stage's rank has too. checked: stages that were found to have no connections across their cuts. carried:
    which arguments of the next block a stage sends. tokens: of a model with sequence sharding.
    skeleton: the whole model on the meta device, for names and shapes.
    """

    cuts: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    rank: int
    block_names: tuple[str, ...]
    placement: str
    parts: tuple[_Part, ...] = ()
    is_tied: bool = False
    needs_random_state: bool = False
    tokens: TokenShards | None = None
    skeleton: nn.Module | None = None
    current: StagePass | None = None
    checked: set[int] = field(default_factory=set)
    carried: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def whole(cls, name: str) -> "ModelStages":
        """The one stage of a model that is not cut."""
        return cls((0, 1), (0,), 0, (name,), "loops")

    @property
    def count(self) -> int:
        """The number of stages of all ranks."""
        return len(self.stage_ranks)

    @property
    def mine(self) -> tuple[int, ...]:
        """This rank's stages, in order."""
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == self.rank)

    @property
    def virtual_stages(self) -> int:
        """Stages a rank."""
        return len(self.mine)

    def must_learn(self, stage: int) -> bool:
        """Whether a forward pass must record gradients to show what the stage sends, or what skips the cut before."""
        return (stage < self.count - 1 and stage not in self.carried) or (stage > 0 and stage not in self.checked)

    def has_block(self, index: int) -> bool:
        """Whether one of this rank's stages has this block."""
        return any(self.cuts[stage] <= index < self.cuts[stage + 1] for stage in self.mine)

    def local_runs(self) -> list[tuple[int, ...]]:
        """The numbers of the blocks of each of this rank's stages."""
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
        """Begin a forward pass of a stage with what the stage before has sent."""
        begun = StagePass(stage, self.cuts[stage], self.cuts[stage + 1], self.needs_random_state, received)
        if received is not None:
            begun.batch_shape, begun.layouts = received.batch_shape, received.layouts
            begun.stand_ins = StandIns(received.layouts, received.tensors[0].device)
            if torch.is_grad_enabled():
                begun.gradients = received.record()
                if stage not in self.checked:
                    begun.stand_ins.leaves = []
        if torch.is_grad_enabled() and stage < self.count - 1 and stage not in self.carried:
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
                raise ValueError(
                    f"stage {stage} of {type(model).__name__} uses what an earlier stage has computed, beside the "
                    f"arguments of {self.block_names[stage_pass.first]}: a connection skips the cut before that block. "
                    "Cut elsewhere, with parallelize(..., stages=StageOptions(cuts=...)), or use pipe=1"
                )
            self.checked.add(stage)
        stage_pass.stand_ins = stage_pass.made = None
        return output

    def _out_of_order(self) -> ValueError:
        return ValueError(
            f"the model's forward has not called its blocks {self.block_names[0]} to {self.block_names[-1]} once each "
            "and in order, as pipeline stages need; use pipe=1"
        )

    # What the modules of a cut model do in their forward.

    def run_block(self, index: int, signature: inspect.Signature, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run, pass by or end at a block, in the place of its forward (None where another rank has it)."""
        now = self._require_pass()
        is_again = in_backward()  # transformers' layers are computed again through here
        if not is_again:
            if index <= now.last_block or index > now.end:
                raise self._out_of_order()
            now.last_block = index
        if index < now.first:
            assert now.stand_ins is not None
            return now.stand_ins.make(index)
        if index == now.end:
            raise _EndOfStage(self._leaving(now, index, signature, args, kwargs))
        if index == now.first:
            now.has_entered = True
            if now.received is not None:
                args, kwargs = self._entering(now, index, signature, args, kwargs)
        output = forward(*args, **kwargs)
        if not is_again and now.stage < self.count - 1:
            now.layouts.note(index, output)
            output = self._show(now, output)
        return output

    def run_part(self, part: _Part, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run a module outside of the blocks, or pass it by."""
        now = self._require_pass()
        if part.is_before:
            if now.has_entered:
                raise ValueError(
                    f"{part.name} is called after the blocks, and was taken for a part of the first stage: "
                    f"parallelize(..., stages=StageOptions(last=[{part.name!r}])) gives it to the last one"
                )
            if now.received is not None:
                assert now.stand_ins is not None
                return now.stand_ins.make(part.name)
            output = forward(*args, **kwargs)
            if self.count > 1:
                now.layouts.note(part.name, output)
            return self._show(now, output)
        if not now.has_entered or now.stage != self.count - 1:
            raise ValueError(
                f"{part.name} is called before the blocks, and was taken for a part of the last stage: "
                f"parallelize(..., stages=StageOptions(first=[{part.name!r}])) gives it to the first one"
            )
        return forward(*args, **kwargs)

    def _show(self, now: StagePass, output: Any) -> Any:
        """While the stage learns what to send, have autograd show what is made from a module's output.

        That of frozen modules needs no gradient, and has to be sent all the same.
        """
        if now.made is None:
            return output
        shown = tree_map(
            lambda leaf: leaf.detach().requires_grad_().clone() if _is_constant(leaf) else leaf,
            output,
        )
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
        known = self.carried.get(now.stage)
        places: list[int] = []
        for name, value in given.items():
            place = names.index(name)
            if signature.parameters[name].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
                if any(tensor.requires_grad for tensor in tensors_of(value)):
                    raise ValueError(
                        f"{self.block_names[index]} gets a tensor that needs a gradient in {name}, which no stage can "
                        "send: name it among the parameters of the block's forward"
                    )
                continue
            is_carried = place in known if known is not None else any(value is each for each in now.made or ())
            if isinstance(value, Tensor) and (not places or is_carried or value.requires_grad):
                places.append(place)
            elif any(tensor.requires_grad for tensor in tensors_of(value)):
                raise ValueError(
                    f"{self.block_names[index]} gets several tensors that need gradients in {name}, which no stage can "
                    "send: pass each as an argument of its own"
                )
        if not places:
            raise ValueError(f"{self.block_names[index]} gets no tensor, so there is nothing for a stage to send")
        if torch.is_grad_enabled():
            self.carried[now.stage] = places
        tensors = [given[names[place]] for place in places]
        state = None
        if now.sends_random_state:
            on_gpu = tensors[0].is_cuda
            state = torch.get_rng_state(), torch.cuda.get_rng_state(tensors[0].device) if on_gpu else None
        batch_shape = (0, 0) if self.tokens is None else self.tokens.shape
        return Activations(tensors, places, now.layouts, batch_shape=batch_shape, random_state=state)

    def _entering(
        self, now: StagePass, index: int, signature: inspect.Signature, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a stage's first block, with what was received in its places."""
        received = now.received
        assert received is not None
        bound = signature.bind(*args, **kwargs)
        names = list(signature.parameters)
        for place, tensor in zip(received.places, received.tensors, strict=True):
            if not 0 <= place < len(names):
                raise ValueError(f"{self.block_names[index]} has no argument {place}, which the stage before has sent")
            bound.arguments[names[place]] = tensor
        if received.random_state is not None:
            cpu, gpu = received.random_state
            torch.set_rng_state(cpu)
            if gpu is not None and received.tensors[0].is_cuda:
                torch.cuda.set_rng_state(gpu, received.tensors[0].device)
        return bound.args, bound.kwargs


def whole_model(model: nn.Module) -> nn.Module:
    """The model, or, of one that is cut into pipeline stages, the whole model on the meta device."""
    stages = getattr(model, "pipeline_stages", None)
    return model if stages is None or stages.skeleton is None else stages.skeleton


def names_elsewhere(model: nn.Module) -> frozenset[str]:
    """The names of the parameters that other pipeline stages have."""
    own = {name for name, _ in model.named_parameters()}
    return frozenset(name for name, _ in whole_model(model).named_parameters() if name not in own)


def _is_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad


class PassedBy(nn.Module):
    """Stands for a block, or for another module, that another rank has.

    It keeps the plain attributes of what it stands for, which models read, and parameters that this rank has under
    another name too (a tied embedding).
    """

    def __init__(self, original: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        own = vars(nn.Module())
        for name, value in vars(original).items():
            if name not in own and not name.startswith("_") and not isinstance(value, Tensor | nn.Module):
                setattr(self, name, value)
        self._call = call
        self._original_type = type(original)

    def __getattr__(self, name: str) -> Any:
        """A submodule or parameter, or what the original's class has: a constant, or a property of plain values."""
        if name in self._modules or name in self._parameters or name.startswith("__"):
            return super().__getattr__(name)
        kind = vars(self).get("_original_type", nn.Module)
        value = inspect.getattr_static(kind, name, None)
        if isinstance(value, property) and value.fget is not None:
            return value.fget(self)
        if value is not None and not callable(value) and not hasattr(value, "__get__"):
            return value
        raise AttributeError(
            f"the model's code uses {name!r} of a {kind.__name__} that another pipeline stage has: of such modules it "
            "can use forward and plain attributes alone; use pipe=1"
        )

    def __getitem__(self, key: Any) -> Any:
        """Raise ValueError: what a list of modules has is on another rank."""
        raise ValueError(
            f"the model's code takes a module out of a {self._original_type.__name__} that another pipeline stage has: "
            "pipeline stages take models whose repeated blocks are modules of their own; use pipe=1"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass by, or end the stage."""
        return self._call(args, kwargs)

    def extra_repr(self) -> str:
        """What a print of the model shows."""
        return "of another pipeline stage"


def find_stages(model: nn.Module, grid: Grid, options: StageOptions) -> ModelStages:
    """Decide where a model is cut: nothing is changed.

    Raises ValueError where the model has fewer blocks than stages, and for names that it does not have.
    """
    pipe, rank = grid.size("pipe"), grid.coordinate("pipe")
    names = _block_names(model, options)
    count = pipe * options.virtual_stages
    options.check(pipe, len(names))
    parts = _find_parts(model, names, options)
    cuts = _find_cuts(model, names, parts, count, options)
    loops = [stage % pipe for stage in range(count)]
    v_shape = [*range(pipe), *reversed(range(pipe))]
    placed = v_shape if options.placement == "v" else loops
    drops = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
    return ModelStages(cuts, tuple(placed), rank, names, options.placement, parts, needs_random_state=drops)


def _block_names(model: nn.Module, options: StageOptions) -> tuple[str, ...]:
    if options.blocks is not None:
        return tuple(find_blocks(model, options.blocks))
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():  # from outside to inside: the parts of a block are no blocks
        if isinstance(module, nn.ModuleList) and len(module) and not any(part in lists for part in _from_outside(name)):
            lists[name] = module
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList, so its blocks are not known: name them with "
            "parallelize(..., stages=StageOptions(blocks=[...]))"
        )
    name, longest = max(lists.items(), key=lambda item: len(item[1]))
    return tuple(f"{name}.{index}" for index in range(len(longest)))


def _find_parts(model: nn.Module, blocks: Sequence[str], options: StageOptions) -> tuple[_Part, ...]:
    """The modules with parameters beside the blocks, and whether they come before these.

    They come in the order of transformers' plan for pipelines, else as the code calls them, or as they are registered.
    """
    parents = {parent for name in blocks for parent in _from_outside(name)}
    planned = _planned_order(model)
    beside: dict[str, bool] = {}
    for parent in sorted(parents, key=lambda name: name.count(".") if name else -1):
        owner = model.get_submodule(parent)
        if own := [key for key, _ in owner.named_parameters(recurse=False)]:
            where = parent or type(model).__name__
            raise ValueError(
                f"{where} has parameters of its own ({', '.join(own[:3])}) beside its blocks, which belong to no "
                "pipeline stage: put them into a submodule, or use pipe=1"
            )
        within = {key: f"{parent}.{key}".removeprefix(".") for key in owner._modules}
        around = [key for key, name in within.items() if name in parents or name in blocks]
        is_before = True
        for key, child in owner.named_children():
            if key in around:
                is_before = False
            elif next(child.parameters(), None) is not None:
                called = _is_called_before(owner, key, around)
                found = _is_named_before(key, child, is_before) if called is None else called
                beside[within[key]] = planned.get(within[key], found)
    for pattern, is_before in [*((name, True) for name in options.first), *((name, False) for name in options.last)]:
        if pattern not in beside:
            raise ValueError(f"no module beside the blocks is named {pattern!r}{did_you_mean(pattern, beside)}")
        beside[pattern] = is_before
    return tuple(_Part(name, is_before) for name, is_before in beside.items())


def _is_called_before(owner: nn.Module, key: str, around: Sequence[str]) -> bool | None:
    """Whether a module's forward names its child `key` before those that have the blocks; None if it names them not."""
    forward = inspect.unwrap(type(owner).forward)
    if not inspect.isfunction(forward):
        return None
    named = [each.argval for each in dis.get_instructions(forward) if each.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    blocks = [named.index(other) for other in around if other in named]
    return named.index(key) < min(blocks) if key in named and blocks else None


def _is_named_before(name: str, module: nn.Module, otherwise: bool) -> bool:
    """Whether a module comes before the blocks, by its name and kind; `otherwise` where these do not tell."""
    if _NAMES_AFTER.search(name):
        return False
    return otherwise or "embed" in name or isinstance(module, nn.Embedding)


def _from_outside(name: str) -> list[str]:
    """The names of the modules that a dotted name is in: the model's, which is empty, a, a.b of a.b.c."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def _planned_order(model: nn.Module) -> dict[str, bool]:
    """Which modules come before the blocks by `base_model_pp_plan` of a transformers model."""
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    prefix = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
    if "layers" not in plan:
        return {}
    place = list(plan).index("layers")
    return {prefix + name: index < place for index, name in enumerate(plan) if index != place}


def _find_cuts(
    model: nn.Module, names: Sequence[str], parts: Sequence[_Part], count: int, options: StageOptions
) -> tuple[int, ...]:
    if options.cuts is not None:
        return (0, *options.cuts, len(names))
    # A product with a weight takes operations in proportion to its numbers; looking up rows of an embedding takes none.
    costs = [float(_multiplied(model.get_submodule(name))) for name in names]
    last = float(sum(_multiplied(model.get_submodule(part.name)) for part in parts if not part.is_before))
    if not any(costs):
        costs = [1.0] * len(costs)
    return partition(costs, count, last=last)


def _multiplied(module: nn.Module) -> int:
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
    return sum(p.numel() for p in module.parameters() if p.dim() > 1 and id(p) not in embeddings)


def tied_parameters(model: nn.Module, stages: ModelStages) -> dict[str, nn.Parameter]:
    """The parameters that modules of several stages share, by the first name of each.

    They are tied embeddings: both ends hold them, and sum their gradients. ValueError for those that other stages than
    the first and the last share.
    """
    where = {name: _stage_of_block(stages, index) for index, name in enumerate(stages.block_names)}
    where |= {part.name: 0 if part.is_before else stages.count - 1 for part in stages.parts}
    first: dict[nn.Parameter, str] = {}
    users: dict[nn.Parameter, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
        users.setdefault(parameter, set()).update(where[owner] for owner in _from_outside(name) if owner in where)
    for parameter, used in users.items():
        if len(used) > 1 and used != {0, stages.count - 1}:
            raise ValueError(
                f"{first[parameter]} is shared by pipeline stages {', '.join(map(str, sorted(used)))}: the first and "
                "the last stage may share parameters, others may not. Use fewer stages, or cuts that keep them together"
            )
    return {first[parameter]: parameter for parameter, used in users.items() if len(used) > 1}


def _stage_of_block(stages: ModelStages, index: int) -> int:
    return next(stage for stage in range(stages.count) if index < stages.cuts[stage + 1])


def cut_model(model: nn.Module, stages: ModelStages) -> Callable[[], None]:
    """Replace what other ranks have by modules that pass it by. Returns what undoes it."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    kept = _kept_parameters(model, stages)
    for index, name in enumerate(stages.block_names):
        if not stages.has_block(index):
            block = model.get_submodule(name)
            signature = inspect.signature(type(block).forward)
            call = functools.partial(_run_block, stages, index, _without_self(signature), None)
            replaced.append(_replace_module(model, name, PassedBy(block, call), kept))
    for part in stages.parts:
        if (0 if part.is_before else stages.count - 1) not in stages.mine:
            module = model.get_submodule(part.name)
            call = functools.partial(_run_part, stages, part, None)
            replaced.append(_replace_module(model, part.name, PassedBy(module, call), kept))

    def undo() -> None:
        for owner, key, original in replaced:
            owner._modules[key] = original

    return undo


def _kept_parameters(model: nn.Module, stages: ModelStages) -> dict[int, nn.Parameter]:
    """The parameters of this rank's stages, by id."""
    names = [name for index, name in enumerate(stages.block_names) if stages.has_block(index)]
    names += [part.name for part in stages.parts if (0 if part.is_before else stages.count - 1) in stages.mine]
    return {id(parameter): parameter for name in names for parameter in model.get_submodule(name).parameters()}


def _replace_module(
    model: nn.Module, name: str, new: nn.Module, kept: dict[int, nn.Parameter]
) -> tuple[nn.Module, str, nn.Module]:
    parent, _, key = name.rpartition(".")
    owner, original = model.get_submodule(parent), model.get_submodule(name)
    for path, parameter in original.named_parameters(remove_duplicate=False):
        if id(parameter) in kept:
            *inner, last = path.split(".")
            holder = new
            for child in inner:
                if child not in holder._modules:
                    holder.add_module(child, nn.Module())
                holder = holder.get_submodule(child)
            holder.register_parameter(last, parameter)
    owner._modules[key] = new
    return owner, key, original


def _run_block(
    stages: ModelStages, index: int, signature: inspect.Signature, forward: Any, args: Any, kwargs: Any
) -> Any:
    return stages.run_block(index, signature, forward, args, kwargs)


def _run_part(stages: ModelStages, part: _Part, forward: Any, args: Any, kwargs: Any) -> Any:
    return stages.run_part(part, forward, args, kwargs)


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def wrap_forwards(model: nn.Module, stages: ModelStages) -> None:
    """Have this rank's blocks, and its modules beside them, follow the pass that runs."""
    for index, name in enumerate(stages.block_names):
        block = model.get_submodule(name)
        if isinstance(block, PassedBy):
            continue
        signature = _without_self(inspect.signature(type(block).forward))
        block.forward = _wrapped(functools.partial(_run_block, stages, index, signature, block.forward), block.forward)
    for part in stages.parts:
        module = model.get_submodule(part.name)
        if not isinstance(module, PassedBy):
            module.forward = _wrapped(functools.partial(_run_part, stages, part, module.forward), module.forward)


def _wrapped(call: Callable[..., Any], forward: Any) -> Any:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    return torch.compiler.disable(run, recursive=False)


def restrict_plan(plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
    """The plan without what other ranks have."""
    modules = {name for name, module in model.named_modules(remove_duplicate=False) if not isinstance(module, PassedBy)}
    away = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, PassedBy)]

    def is_here(name: str) -> bool:
        return name in modules and not any(f"{name}.".startswith(f"{other}.") for other in away)

    return ShardingPlan(
        {name: role for name, role in plan.roles.items() if is_here(name)},
        {name: axis for name, axis in plan.local_attributes.items() if is_here(name.rpartition(".")[0])},
        tuple(part for part in plan.plain if is_here(part.whose)),
        plan.of_own_plan,
    )


def make_tie_group(stages: ModelStages, grid: Grid) -> dist.ProcessGroup | None:
    """The group of the ranks that hold the first and the last stage; None if that is one rank. Collective."""
    ends = {stages.stage_ranks[0], stages.stage_ranks[-1]}
    if len(ends) == 1:
        return None
    pipe_ranks = dist.get_process_group_ranks(grid.group("pipe"))
    group = make_group([pipe_ranks[rank] for rank in ends], grid)
    if group is not None:
        grid.other_groups[group.group_name] = "pipe"
    return group


def make_group(ranks: Sequence[int], grid: Grid, backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of these ranks, one of which this is, while other ranks make theirs. Collective over all ranks.

    Ranks may name a group that they are not in, which is made without them.
    """
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sorted(ranks))
    mine: Any = None
    for members in sorted(set(map(tuple, gathered))):
        group = dist.new_group(list(members), timeout=grid.timeout, backend=backend)
        if dist.get_rank() in members:
            mine = group
    return mine
