# SPDX-License-Identifier: Apache-2.0
"""Sequence sharding: activations between blocks are sharded by tokens over x.

Between a rowwise linear and the next colwise one every x rank would do the same to the same activations. Here each rank
has its part of the tokens: a colwise linear gathers them and a rowwise one scatters its sum, in place of all-reduces.
Tokens are those of the rank's batch in order, [batch x seq] cut into equal parts, so that parts need be neither whole
sequences nor parts of one.
"""

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.parallel.comm.autograd import once_differentiable
from stretto.parallel.comm.collectives import gather_rows, scatter_rows
from stretto.parallel.comm.graph_functions import new_number
from stretto.parallel.comm.kept_outputs import current_run, keep_output


@dataclass
class GatheredInput:
    """A linear's input of all tokens, [tokens, k]: the first linear that takes the input fills it in, others use it.

    scaled: in fp8 (`stretto.ops.fp8_casts.ScaledMatrix`).
    """

    rows: Tensor | None = None
    scaled: tuple[Tensor, Tensor] | None = None


@dataclass
class TokenStandIn:
    """This rank's tokens, `part`, in whose place a module's code has a tensor of the shape of all.

    `outputs`: of linears that were computed together (`JoinedLinears`), and have not been called yet.
    """

    part: Tensor
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)


class TokenShards:
    """Divides the tokens of the batch that a model was given last among the ranks of x.

    The embedding notes the batch's shape, and the modules after it use it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.shape = (0, 0)
        # Inputs that linears have gathered, by their id, for as long as they live.
        self._gathered: dict[int, tuple[ref[Tensor], object, GatheredInput]] = {}
        # Stand-ins by their id, for as long as they live.
        self._stand_ins: dict[int, tuple[ref[Tensor], TokenStandIn]] = {}
        # While a compiler traces a block: the stand-in and its part; the outputs of linears that were computed together
        # (`JoinedLinears`); and the last input of another colwise linear with the number by which calls of linears,
        # when the graph runs, share what the first of them has gathered.
        self._traced_stand_in: tuple[Tensor, Tensor] | None = None
        self._traced_input: tuple[Tensor, Tensor] | None = None
        self.traced_outputs: tuple[Tensor, ...] | None = None
        self._last_gathered = (0, GatheredInput())

    def note(self, shape: torch.Size) -> None:
        """Begin a batch of ids [batch, seq]. ValueError for one whose tokens the ranks cannot divide equally."""
        if len(shape) != 2:
            raise ValueError(f"with sequence sharding, token ids must be [batch, seq], not {list(shape)}")
        tokens, ranks = shape[0] * shape[1], self.group.size()
        if tokens % ranks:
            nearest = max(1, round(tokens / ranks)) * ranks
            raise ValueError(
                f"sequence sharding over x={ranks}: the {tokens} tokens of a batch [{shape[0]}, {shape[1]}] cannot be "
                f"shared equally; {nearest} could"
            )
        self.shape = (shape[0], shape[1])

    def gathered_input(self, x: Tensor) -> GatheredInput:
        """The gathered input that all linears share that take `x` as it is now."""
        if x.is_inference():  # torch does not count its writes
            return GatheredInput()
        key, gathered = id(x), self._gathered
        # A block's own input may be alive when it is computed again, and there the same must be gathered and kept.
        state = x._version, current_run()
        alive, known, found = gathered.get(key, (None, None, GatheredInput()))
        if alive is None or known != state:
            found = GatheredInput()
            gathered[key] = ref(x, lambda _: gathered.pop(key, None)), state, found
        return found

    def forget_gathered(self) -> None:
        """Free gathered inputs, those too that live on, such as a block's own: another block begins."""
        self._gathered.clear()

    def part_in_graph(self, x: Tensor) -> Tensor:
        """The tokens that `x` stands for in the graph that is being traced; `x` if it is a tensor of its own."""
        return x if self._traced_stand_in is None or self._traced_stand_in[0] is not x else self._traced_stand_in[1]

    def end_in_graph(self, whole: Tensor) -> tuple[int, int]:
        """[1, tokens / x] of [batch, seq, features] that a rowwise linear takes in the graph that is being traced: what
        was noted for the linears before it is forgotten, or would become an output of the graph."""
        self._traced_stand_in = self._traced_input = self.traced_outputs = None
        return 1, whole.shape[0] * whole.shape[1] // self.group.size()

    def number_in_graph(self, x: Tensor) -> Tensor:
        """A number that all linears get that take `x` one after another in the graph that is being traced."""
        if self._traced_input is None or self._traced_input[0] is not x:
            self._traced_input = (x, new_number())
        return self._traced_input[1]

    def gathered_by(self, number: Tensor) -> GatheredInput:
        """The gathered input that all linears share that a running graph gives this number."""
        if self._last_gathered[0] != int(number):
            self._last_gathered = (int(number), GatheredInput())
        return self._last_gathered[1]

    def forget_last_gathered(self) -> None:
        """Free the gathered input of `gathered_by`: a linear after those that share it runs."""
        self._last_gathered = (0, GatheredInput())

    def enter(self, whole: Tensor) -> Tensor:
        """Begin a batch of hidden [batch, seq, features], of which all ranks have all: this rank's tokens of it,
        [1, tokens / x, features]. ValueError as of `note`."""
        self.note(whole.shape[:-1])
        part = cut_tokens(whole.flatten(0, -2), self.group)
        # No view, for which a compiler would make another graph than for what other blocks take.
        return torch.ops.aten._unsafe_view(part, (1, *part.shape))

    def leave(self, part: Tensor) -> Tensor:
        """The reverse of `enter`. Its gradient must be the same on all ranks of x."""
        return self.whole(self.gather(part.flatten(0, -2)))

    def is_part(self, hidden: Tensor) -> bool:
        """True for [1, tokens / x, features] of the last batch, and False for whole hidden states."""
        return tuple(hidden.shape[:-1]) == (1, self.here.stop - self.here.start) != self.shape

    def stand_in(self, part: Tensor, module: nn.Module) -> Tensor:
        """A tensor of the shape of all tokens, for a module whose code reads its input's shape: linears take `part` in
        its place. Its elements are NaN, so that a result of anything else that computes with it is."""
        _refuse_backward_hooks(module)
        whole = part.new_full((), torch.nan).expand(*self.shape, part.shape[-1])
        if torch.compiler.is_compiling():
            self._traced_stand_in = whole, part
            return whole
        key, stand_ins = id(whole), self._stand_ins
        stand_ins[key] = ref(whole, lambda _: stand_ins.pop(key, None)), TokenStandIn(part)
        return whole

    def find_stand_in(self, x: Tensor, linear: nn.Module) -> TokenStandIn | None:
        """Find the tokens that a linear's input stands for; None if it is a tensor of its own."""
        alive, found = self._stand_ins.get(id(x), (None, None))
        if alive is None or alive() is not x:
            return None
        _refuse_backward_hooks(linear)
        return found

    @property
    def here(self) -> slice:
        """This rank's tokens among all of the batch."""
        count = self.shape[0] * self.shape[1] // self.group.size()
        return slice(self.group.rank() * count, (self.group.rank() + 1) * count)

    def whole(self, rows: Tensor) -> Tensor:
        """[tokens, features] as [batch, seq, features]. ValueError for tokens of another batch than the last."""
        if rows.shape[0] != self.shape[0] * self.shape[1]:
            raise ValueError(
                f"{rows.shape[0]} tokens are not those of the last batch, {list(self.shape)}: with sequence sharding "
                "call the model as a whole, and end a batch's passes before one of another shape begins"
            )
        return rows.view(*self.shape, rows.shape[-1])

    def gather(self, part: Tensor) -> Tensor:
        """Hidden [tokens / x, features] of all tokens. Its gradient must be the same on all ranks of x."""
        return gather_tokens(part, part.shape[0] * self.group.size(), self.group)

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This rank's tokens [1, tokens / x, features] of the sum over x of [batch, seq, features]."""
        rows = whole.flatten(0, -2)
        return scatter_rows(rows, rows.shape[0] // self.group.size(), self.group).unsqueeze(0)

    def gather_rows(self, part: Tensor) -> Tensor:
        """[batch, seq, features] of [1, tokens / x, features], without a gradient."""
        rows = part.flatten(0, -2)
        return self.whole(gather_rows(rows, rows.shape[0] * self.group.size(), self.group))


def _refuse_backward_hooks(module: nn.Module) -> None:
    """ValueError for hooks of the gradient of a stand-in, which has none: torch would drop what they return."""
    if module._backward_hooks:
        raise ValueError(
            f"{type(module).__name__} has backward hooks, but with sequence sharding attention and its linears get no "
            "gradient of their input: give them to the block, or call parallelize(..., shard_sequence=False)"
        )


def own_tokens(tokens: int, group: dist.ProcessGroup) -> slice:
    """This rank's part of so many tokens, as torch.chunk cuts them."""
    part = -(-tokens // group.size())
    return slice(min(group.rank() * part, tokens), min((group.rank() + 1) * part, tokens))


def cut_tokens(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows of what all ranks of the group have; they all get the whole gradient."""
    return CutPart.apply(whole, 0, group)


def gather_tokens(part: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    """The reverse of `cut_tokens`: [tokens, ...] on every rank. Its gradient must be the same on all of them."""
    return GatherPart.apply(part, tokens, 0, group, "gathered tokens")


class CutPart(torch.autograd.Function):
    """This rank's part of a dim of what all ranks of a group have; they all get the whole gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.size, ctx.dim, ctx.group = whole.shape[dim], dim, group
        own = own_tokens(ctx.size, group)
        return whole.narrow(dim, own.start, own.stop - own.start).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.size, ctx.dim, ctx.group).contiguous(), None, None


class GatherPart(torch.autograd.Function):
    """The reverse of `CutPart`: a dim of this size. All ranks compute the same with it, so each keeps its part of the
    gradient. name: by which recomputation keeps it."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, size: int, dim: int, group: dist.ProcessGroup, name: str) -> Tensor:
        ctx.own, ctx.dim = own_tokens(size, group), dim

        def gather() -> Tensor:
            whole = _gather(part, size, dim, group)
            return whole.clone() if not dim and whole._is_view() else whole  # autograd forbids writes to a view

        return keep_output(name, gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own = gradient.narrow(ctx.dim, ctx.own.start, ctx.own.stop - ctx.own.start)
        return own.contiguous(), None, None, None, None


def _gather(part: Tensor, size: int, dim: int, group: dist.ProcessGroup) -> Tensor:
    if not dim:
        return gather_rows(part, size, group)
    return gather_rows(part.movedim(dim, 0).contiguous(), size, group).movedim(0, dim)
