# SPDX-License-Identifier: Apache-2.0
"""`ParallelState`: everything that `parallelize` keeps of a model, and `state_of`, which finds it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from stretto.suggestions import require_type

if TYPE_CHECKING:
    from stretto.execution import ExecutionOptions
    from stretto.huggingface.experts import ExpertsKind
    from stretto.parallel.comm.gradient_reducer import GradientReducer
    from stretto.parallel.comm.weight_gathering import WeightGatherer
    from stretto.parallel.context.sequence_parts import SequenceParts
    from stretto.parallel.grid import GradientReduction, Grid
    from stretto.parallel.layers.block_shard import BlockShard
    from stretto.parallel.pipeline.stages import ModelStages
    from stretto.parallel.precision import Precision
    from stretto.parallel.roles.plan import ShardingPlan

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class BlockPlan:
    """A model's blocks by name, why it is sharded by these, and whether it is a transformers model. experts: modules
    that the ranks of expert divide among them, where it has several, with what they compute. dropouts: of inputs whose
    first dim is rows, by name: their masks are of global elements."""

    names: tuple[str, ...]
    reason: str
    is_pretrained: bool = False
    experts: Mapping[str, ExpertsKind] = field(default_factory=dict)
    dropouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardingRequest:
    """Arguments of `parallelize`, apart from the model and its roles. fp8_layers: what computes in fp8, by name."""

    grid: Grid
    precision: Precision
    options: ExecutionOptions
    gradients: GradientReduction
    sharded_loss: bool
    fp8_layers: frozenset[str] = frozenset()


@dataclass(eq=False)
class ParallelState:
    """A parallelized model's grid, options and plan, and the objects that its passes use.

    forward_thread: the thread in which a forward pass runs. stages: the pipeline stages of a model that is cut into
    some. sequence_parts: what cuts its sequences among the ranks of context. block_shards: what gathers the parameters
    of a module that is gathered by itself. wrappers: what has replaced the forward of each module of which the
    parameters are gathered or read as plain tensors, the innermost first.
    """

    request: ShardingRequest
    plan: ShardingPlan | BlockPlan
    gradient_reducer: GradientReducer
    weight_gatherer: WeightGatherer
    forward_thread: int | None = None
    stages: ModelStages | None = None
    sequence_parts: SequenceParts | None = None
    block_shards: dict[nn.Module, BlockShard] = field(default_factory=dict)
    wrappers: dict[nn.Module, list[Wrapper]] = field(default_factory=dict)

    @property
    def grid(self) -> Grid:
        return self.request.grid

    @property
    def options(self) -> ExecutionOptions:
        """Options of how the model's steps execute."""
        return self.request.options

    def wrap_forward(self, module: nn.Module, wrap: Wrapper, wrap_method: Wrapper | None = None) -> None:
        """Replace a module's forward by `wrap(forward)`; `register_forward_method` does so with its other methods."""
        module.forward = wrap(module.forward)
        self.wrappers.setdefault(module, []).append(wrap_method or wrap)


# As torch's composable APIs hold theirs: a model's hooks keep its state alive, so that both are freed together.
_STATES: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ParallelState]] = weakref.WeakKeyDictionary()


def set_state(model: nn.Module, state: ParallelState) -> None:
    """Let `state_of` find the state of a model, of which a hook must hold it."""
    _STATES[model] = weakref.ref(state)


def state_of(model: nn.Module) -> ParallelState | None:
    """The state of a model that `parallelize` has returned, also inside of a wrapper (torch.compile's, PEFT's); None
    for any other module."""
    while (found := _STATES.get(model)) is None:
        inner = [*model.children()]
        if len(inner) != 1 or model._parameters:
            return None
        (model,) = inner
    return found()


def require_state(model: nn.Module, function: str) -> ParallelState:
    """The model's state. Raises ValueError, with the name of the function that needs it, if it is not on a grid."""
    require_type(model, nn.Module, "model")
    state = state_of(model)
    if state is None:
        raise ValueError(f"{function} takes a model that stretto.parallelize has returned")
    return state


def wrappers_of(module: nn.Module) -> list[Wrapper]:
    """The wrappers of a module's forward, whichever model it is a part of."""
    states = (reference() for reference in _STATES.values())
    return next((state.wrappers[module] for state in states if state is not None and module in state.wrappers), [])
