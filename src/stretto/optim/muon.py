# SPDX-License-Identifier: Apache-2.0
"""Muon on a grid: orthogonalized momentum for hidden matrices (Jordan et al. 2024), AdamW for all other parameters.

An update needs the whole matrix. Each matrix is brought together on one of the ranks that hold its shards
(`stretto.optim.matrix_owners`); momentum stays sharded like the parameter.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.axes import STAGE_AXES
from stretto.memory import failures
from stretto.ops.symmetric import suits_symmetric, symmetric_product
from stretto.optim.adamw import AdamW, call, local, unhooked
from stretto.optim.matrix_owners import MatrixExchange, MatrixOwners
from stretto.optim.muon_overlap import BackwardExchange, LateUpdates, settle
from stretto.optim.state.updates import copied
from stretto.parallel.comm.gradient_norm import scale_by
from stretto.parallel.grid import Grid
from stretto.parallel.layers.embedding import ParallelEmbedding, ParallelPositions
from stretto.parallel.layers.loss import ParallelHead
from stretto.parallel.layout import ParameterLayout, has_layout, layout_of
from stretto.parallel.state import require_state
from stretto.suggestions import require_one_of, require_type

AdjustLr = Literal["match_rms_adamw", "original"]
_OF_ALL_GROUPS = "momentum", "nesterov", "iteration", "adjust_lr", "ns_steps", "ns_coefficients", "adjust_lr_fn"
DEFAULT_MOMENTUM = 0.95
_TABLES = nn.Embedding, nn.EmbeddingBag, ParallelEmbedding, ParallelPositions, ParallelHead
_HEADS = "head", "lm_head", "embed_out", "output_projection", "score", "classifier", "qa_outputs"


class NewtonSchulz(NamedTuple):
    """The iteration that orthogonalizes; eps: the least norm that a matrix is divided by. Defaults are Jordan's."""

    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7

    def orthogonalize(self, matrix: Tensor) -> Tensor:
        """Bring the singular values of matrices [.., a, b] near 1, in their dtype."""
        a, b, c = self.coefficients
        is_tall = matrix.shape[-2] > matrix.shape[-1]
        x = matrix.mT if is_tall else matrix
        x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=self.eps)).contiguous()
        multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
        for _ in range(self.steps):
            if suits_symmetric(x):
                gram = symmetric_product(x)
                update = symmetric_product(gram, alpha=c, added=gram, beta=b)
            else:
                gram = x @ x.mT
                update = multiply(gram, gram, gram, beta=b, alpha=c)
            x = multiply(x, update, x, beta=a)
        return x.mT if is_tall else x


class RowParts(NamedTuple):
    """The rows of one matrix among those fused in a weight: rows r with start <= r % period < stop.

    dim: -1 for columns, of a weight that is stored [.., in, out]; it is transposed for the update.
    """

    start: int
    stop: int
    period: int
    dim: Literal[-2, -1] = -2


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters for which Muon is meant, by name: weights [a, b], and experts' [e, a, b].

    Embeddings, with adapters of these (PEFT), and output heads are left out: a head is the model's
    `get_output_embeddings()`, a parallelized head, or a module called head, lm_head, embed_out, output_projection,
    score, classifier or qa_outputs. Weights of three dims are those under "experts", whose biases [e, a] are left out,
    as are decays A_log [a, b] of state-space models.
    """
    require_type(model, nn.Module, "model")
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    others = {
        id(parameter)
        for name, module in model.named_modules()
        if isinstance(module, _TABLES)
        or isinstance(getattr(module, "base_layer", None), _TABLES)
        or module is head
        or name.rpartition(".")[2] in _HEADS
        for parameter in module.parameters()
    }
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and id(parameter) not in others
        and not name.endswith(("bias", ".A_log"))
        and (parameter.dim() == 2 or (parameter.dim() == 3 and "experts" in name.split(".")))
    }


class _MatrixParameter(NamedTuple):
    """A parameter of matrices: its whole shape, their row parts, and its layout if it is on a grid."""

    parameter: Tensor
    shape: tuple[int, ...]
    parts: tuple[RowParts, ...]
    layout: ParameterLayout | None

    @property
    def is_transposed(self) -> bool:
        """True if it is stored [.., in, out]."""
        return any(part.dim == -1 for part in self.parts)

    @property
    def seen_shape(self) -> tuple[int, ...]:
        """The shape [.., out, in] of what is orthogonalized, all parts together."""
        return (*self.shape[:-2], *self.shape[:-3:-1]) if self.is_transposed else self.shape


class _MatrixWrite(NamedTuple):
    """The way in which a step writes a parameter of matrices."""

    matrix: _MatrixParameter
    lr: float | Tensor
    weight_decay: float


class _OverlapState(NamedTuple):
    """The state of `Muon.overlap_with`. parameters: the model's, of all matrices. group, stream: of exchanges."""

    exchange: BackwardExchange
    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup
    stream: torch.cuda.Stream | None
    in_backward: bool


class Muon(AdamW):
    """Muon for the groups with `use_muon`, AdamW for the others.

        matrices = hidden_matrices(model)
        others = [p for n, p in model.named_parameters() if n not in matrices]
        optimizer = Muon([{"params": list(matrices.values()), "use_muon": True}, {"params": others, "lr": 3e-4}],
                         lr=0.02, grid=grid)

    Parameters with `use_muon` are [a, b], or [e, a, b], which are e matrices; plain tensors, or on `grid` as
    `stretto.parallelize` has made them. Their state is `momentum_buffer`, of their shape and sharding. On every grid
    the update is that of one rank: shards are cast to bf16 (fp64 stays), which the iterations compute in, before they
    are sent. A step is collective over the stage's ranks.

    adjust_lr: the factor of an update [a, b]: "match_rms_adamw", 0.2 * sqrt(max(a, b)) (Moonlight), with which
    AdamW's learning rates do; or "original", sqrt(max(1, a / b)) (Jordan).

    A group may have "row_parts", a sequence of `RowParts` (or none) for each of its parameters: weights that are
    several matrices by rows (fused queries, keys and values; gate and up), each of which is orthogonalized alone; and
    "layouts", of parameters that are shards themselves.

    Other defaults are torch.optim.Muon's; a step of plain fp32 matrices has its bits. ValueError for a weight of other
    dims, a DTensor that Stretto has not made, parameters on a grid without `grid`, and options out of range.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = DEFAULT_MOMENTUM,
        nesterov: bool = True,
        iteration: NewtonSchulz | None = None,
        adjust_lr: AdjustLr = "match_rms_adamw",
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        grid: Grid | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}, but must be in [0, 1): 0.95 is usual")
        iteration = iteration or NewtonSchulz()
        if not 0 < iteration.steps < 100:
            raise ValueError(f"Newton-Schulz steps are {iteration.steps}, but must be 1 to 99: 5 is usual")
        require_one_of(get_args(AdjustLr), adjust_lr=adjust_lr)
        self.momentum, self.nesterov, self.adjust_lr, self.iteration = momentum, nesterov, adjust_lr, iteration
        self.grid = grid
        self._matrices: list[_MatrixParameter] = []
        self._owners: dict[tuple[tuple[int, ...], bool], MatrixOwners] = {}
        self._overlap: _OverlapState | None = None
        self._late: LateUpdates | None = None
        given: list[Any] = list(params)
        if given and not isinstance(given[0], dict):
            given = [{"params": given, "use_muon": True}]
        super().__init__(given, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for AdamW unless the group has `use_muon`."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, but is a {type(param_group).__name__}")
        if self._overlap is not None and param_group.get("use_muon"):
            raise ValueError("add matrices before overlap_with, which exchanges those that there are")
        group = {"use_muon": False, "fused": False, **param_group}
        ignored = [name for name in _OF_ALL_GROUPS if name in group] + ["maximize"] * bool(group.get("maximize"))
        if group["use_muon"] and ignored:
            raise ValueError(
                f"a group of matrices has {', '.join(ignored)}, of which groups have none of their own: give momentum, "
                "nesterov, iteration and adjust_lr to Muon, for all groups, and minimize"
            )
        parts, layouts = (list(group.pop(key, None) or ()) for key in ("row_parts", "layouts"))
        super().add_param_group(group)
        parameters = self.param_groups[-1]["params"]
        try:
            if max(len(parts), len(layouts)) > len(parameters):
                raise ValueError(
                    f"a group has {len(parameters)} parameters, but row_parts of {len(parts)} and layouts of "
                    f"{len(layouts)}: give one for each, or none"
                )
            found = [
                _find_matrix(parameter, own or (), layout)
                for parameter, own, layout in zip_longest(parameters, parts, layouts)
                if group["use_muon"]
            ]
            if self.grid is None and any(matrix.layout is not None for matrix in found):
                raise ValueError("Muon's parameters are on a grid: give it, Muon(..., grid=grid)")
        except ValueError:
            self.param_groups.pop()
            raise
        self._matrices += found

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        names = "momentum", "nesterov", "adjust_lr", "iteration", "grid", "_matrices"
        empty: dict[str, Any] = {"_owners": {}, "_overlap": None, "_late": None}
        return super().__getstate__() | {name: getattr(self, name) for name in names} | empty

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # torch's AdamW wants a count of steps of every parameter

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `state_dict()` of a Muon of the same groups. ValueError for another optimizer's, or other groups'."""
        kinds = [[one.get("use_muon") for one in groups] for groups in (state_dict["param_groups"], self.param_groups)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"the state is of another optimizer, or of other groups: use_muon is {kinds[0]} in its groups, and "
                f"{kinds[1]} in this Muon's"
            )
        super().load_state_dict(state_dict)

    def overlap_with(
        self, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None, *, in_backward: bool = True
    ) -> None:
        """Hide the exchange of matrices under `model`'s passes from now on. Collective over all ranks of the job.

            optimizer.overlap_with(model)

        Matrices go to their owners, and are iterated on a side stream, as soon as their gradients are final in the
        backward pass; after `step`, weights that z shards are written when the next forward pass gathers them, and
        others before it. With `step(scale=...)`, as for clipping, the exchange starts in `step`: what is sent depends
        on the factor. `in_backward=False` starts it there always, for gradients that are changed in place.

        After `step`, whatever reads weights through the model, `state_dict`, `to_local` or any operator
        reads the new ones. Call `synchronize` before others: kernels of your own on addresses taken earlier. In a CUDA
        graph (`stretto.parallel.CapturedStep`), weights are written before the step ends.

        model: on the grid, without pipeline stages; it has all matrices. parameters: the model's, one for each matrix,
        where the optimizer's own share their memory. ValueError for others, and without `grid`.
        """
        state = require_state(model, "Muon.overlap_with")
        given = [matrix.parameter for matrix in self._matrices] if parameters is None else parameters
        found = [parameter for parameter in given if isinstance(parameter, nn.Parameter)]
        own = {id(parameter) for parameter in model.parameters()}
        if self.grid is None or self.grid.size("pipe") > 1 or len(found) != len(self._matrices):
            raise ValueError("Muon.overlap_with takes a Muon of a grid without pipeline stages, and all its matrices")
        if not all(id(parameter) in own and has_layout(parameter) for parameter in found):
            raise ValueError("Muon has matrices that are no parameters of this model, which must have them all")
        reducer, grid = state.gradient_reducer, self.grid
        self.synchronize()
        settle(found)  # another optimizer may have left them
        group = grid.group("stage")
        if group.size() > 1:  # a communicator of its own: results would delay reductions that are issued after them
            shared = grid.shared_group(grid.partition(STAGE_AXES), "muon")
            assert shared is not None
            group = shared
        weights = {parameter: reducer.sharded.get(parameter) for parameter in found}
        read = [p for p, weight in weights.items() if weight is None or (weight.group and weight.group.size() == 1)]
        exchange = BackwardExchange(found, read, partial(self._begin, last_first=True), self._direction)
        stream = torch.cuda.Stream(grid.device) if grid.device.type == "cuda" else None
        self._owners, self._overlap = {}, _OverlapState(exchange, tuple(found), group, stream, in_backward)
        reducer.listener = exchange
        model.register_state_dict_pre_hook(lambda *_: settle(found))
        model.register_load_state_dict_pre_hook(lambda *_: settle(found))

    def synchronize(self) -> None:
        """Have the current stream wait until all weights are written, which `overlap_with` leaves to their readers."""
        if self._late is not None:
            self._late.settle_all()
            self._late = None

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, scale: Tensor | None = None, skip: Tensor | None = None
    ) -> Any:
        """Update the parameters, as `AdamW.step`. Collective over the stage's ranks if parameters are on a grid."""
        loss = call(closure, scale)  # which may drop the gradients of all groups
        if skip is not None and not skip.is_cuda:
            if bool(skip):
                return loss
            skip = None
        self._update_matrices(scale, skip)  # first: AdamW's step is on another stream then
        whole, self.param_groups = self.param_groups, [one for one in self.param_groups if not one["use_muon"]]
        try:
            unhooked(AdamW.step)(self, scale=scale, skip=skip)
        finally:
            self.param_groups = whole
        return loss

    def _update_matrices(self, scale: Tensor | None, skip: Tensor | None) -> None:
        self.synchronize()
        overlap, exchange = self._overlap, None
        # On a grid, ranks may differ in which parameters have a gradient, but not in which are frozen.
        is_on_grid = any(matrix.layout is not None for matrix in self._matrices)
        groups = [group for group in self.param_groups if group["use_muon"] for _ in group["params"]]
        active = {
            number: _MatrixWrite(matrix, copied(group["lr"]) if overlap else group["lr"], group["weight_decay"])
            for number, (matrix, group) in enumerate(zip(self._matrices, groups, strict=True))
            if matrix.parameter.grad is not None or (is_on_grid and matrix.parameter.requires_grad)
        }
        if not active:
            return
        numbers, updates = tuple(active), list(active.values())
        flag = failures.find_flag(updates[0].matrix.parameter.device)
        is_right = None if flag is None else flag[0] == 0
        if skip is not None:
            is_right = ~skip if is_right is None else ~skip & is_right
        gradients = {n: None if (g := u.matrix.parameter.grad) is None else local(g) for n, u in active.items()}
        have_some = {number for number, gradient in gradients.items() if gradient is not None}

        def apply(place: int, update: Tensor) -> None:
            if numbers[place] in have_some:
                _apply(updates[place], update, _factor(updates[place].matrix.seen_shape, self.adjust_lr), is_right)

        def follow(number: int) -> Tensor | None:
            """Update this rank's momentum. Returns the gradient that was added to it."""
            if (gradient := gradients[number]) is None:
                return None
            momentum = self._momentum(number)
            if scale is not None:
                gradient = scale_by(gradient, scale)
            if is_right is not None:  # after a failed wait, or in a skipped step, it may be NaN
                gradient = torch.where(is_right, gradient, momentum)
            momentum.lerp_(gradient, 1 - self.momentum)
            return gradient

        def shard_of(place: int) -> Tensor:
            gradient = follow(number := numbers[place])
            return self._direction(number, None) if gradient is None else self._mix(gradient, self._momentum(number))

        if not is_on_grid:
            dtype = _sent_dtype([update.matrix for update in updates])
            for place, update in enumerate(updates):
                apply(place, self._orthogonalize(shard_of(place).to(dtype), update.matrix))
            return
        if overlap is not None:
            exchange = overlap.exchange.take(numbers, list(gradients.values()) if scale is None else None)
            overlap.exchange.is_on = overlap.in_backward and scale is None
            if overlap.exchange.is_on:  # now, rather than in a backward pass that may be captured
                self._begin(numbers, shard_of, last_first=True)
        if exchange is None:
            exchange = self._begin(numbers, shard_of)
            exchange.finish()
        else:
            for number in numbers:
                follow(number)
        gradients.clear()
        if overlap is not None:
            self._late = LateUpdates(exchange, apply, [overlap.parameters[number] for number in numbers])
            return
        for number in range(len(exchange.owners.rounds)):
            for place, made in exchange.take(number):
                apply(place, made)

    def _begin(
        self, numbers: tuple[int, ...], shard_of: Callable[[int], Tensor], *, last_first: bool = False
    ) -> MatrixExchange:
        """Make the exchange of these matrices. Collective for others than before."""
        matrices = [self._matrices[number] for number in numbers]
        dtype = _sent_dtype(matrices)
        key = numbers, last_first
        if key not in self._owners:
            assert self.grid is not None
            self._owners = {known: owners for known, owners in self._owners.items() if known[0] == numbers}
            layouts = [matrix.layout or ParameterLayout(matrix.shape, ()) for matrix in matrices]
            group = None if self._overlap is None else self._overlap.group
            self._owners[key] = MatrixOwners(layouts, self.grid, group, last_first=last_first)
        return MatrixExchange(
            self._owners[key],
            lambda place: shard_of(place).to(dtype),
            lambda whole, place: self._orthogonalize(whole, matrices[place]),
            dtype,
            matrices[0].parameter.device,
            None if self._overlap is None else self._overlap.stream,
        )

    def _momentum(self, number: int) -> Tensor:
        parameter = self._matrices[number].parameter
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return local(state["momentum_buffer"])

    def _mix(self, gradient: Tensor, momentum: Tensor) -> Tensor:
        """The matrix to be orthogonalized, of a gradient and the momentum that has it."""
        return gradient.lerp(momentum, self.momentum) if self.nesterov else momentum

    def _direction(self, number: int, gradient: Tensor | None) -> Tensor:
        """The matrix that a step would orthogonalize; the momentum stays as it is."""
        if gradient is None:
            return torch.zeros_like(local(self._matrices[number].parameter), requires_grad=False)
        return self._mix(gradient, self._momentum(number).lerp(gradient, 1 - self.momentum))

    def _orthogonalize(self, whole: Tensor, matrix: _MatrixParameter) -> Tensor:
        """The update of a parameter's matrix, or matrices, [.., a, b]: parts times their factor over the whole's."""
        run = self.iteration.orthogonalize
        if not matrix.parts:
            return run(whole)
        made, factor = torch.empty_like(whole), _factor(matrix.seen_shape, self.adjust_lr)
        update, whole = (made.mT, whole.mT) if matrix.is_transposed else (made, whole)
        rows = torch.arange(whole.shape[-2], device=whole.device)
        for part in matrix.parts:
            chosen = rows[(rows % part.period >= part.start) & (rows % part.period < part.stop)]
            own = whole[..., chosen, :]
            update[..., chosen, :] = run(own) * (_factor(own.shape, self.adjust_lr) / factor)
        return made


def _factor(shape: Sequence[int], adjust_lr: AdjustLr) -> float:
    rows, columns = shape[-2:]
    return 0.2 * math.sqrt(max(rows, columns)) if adjust_lr == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def _find_matrix(parameter: Tensor, parts: Sequence[RowParts], layout: ParameterLayout | None) -> _MatrixParameter:
    if layout is None and isinstance(parameter, DTensor):
        if not has_layout(parameter):
            raise ValueError(
                "Muon needs to know which ranks hold a matrix: give it DTensors that stretto.parallelize has made, or "
                "plain tensors"
            )
        layout = layout_of(parameter)
    shape = tuple(parameter.shape) if layout is None else layout.shape
    if len(shape) not in (2, 3):
        raise ValueError(f"Muon takes matrices [a, b] and [e, a, b], not {list(shape)}: use_muon=False would do")
    if parameter.is_complex():
        raise ValueError(f"Muon takes real matrices, not {parameter.dtype}: use_muon=False would do")
    periods, dims = {part.period for part in parts}, {part.dim for part in parts}
    size = shape[-1 if dims == {-1} else -2]
    rows = sorted((part.start, part.stop) for part in parts)
    covers = [end for _, end in rows[:-1]] == [start for start, _ in rows[1:]]
    is_one = len(periods) == 1 and len(dims) == 1 and dims <= {-2, -1}
    if parts and (not is_one or not covers or rows[0][0] or {rows[-1][1]} != periods or size % rows[-1][1]):
        what = "columns" if dims == {-1} else "rows"
        raise ValueError(f"row_parts {list(parts)} do not divide the {size} {what} of a weight {list(shape)}")
    return _MatrixParameter(parameter, shape, tuple(parts), layout)


def _sent_dtype(matrices: Sequence[_MatrixParameter]) -> torch.dtype:
    is_wide = any(matrix.parameter.dtype == torch.float64 for matrix in matrices)
    return torch.float64 if is_wide else torch.bfloat16


def _apply(own: _MatrixWrite, update: Tensor, factor: float, is_right: Tensor | None) -> None:
    """parameter = parameter * (1 - lr * decay) - lr * factor * update; not after a failed wait or if skipped."""
    parameter, lr = own.matrix.parameter, own.lr
    shard, rate = local(parameter), lr * factor
    if is_right is not None:
        update, lr = torch.where(is_right, update, 0), is_right * lr
    shard.mul_(1 - lr * own.weight_decay)
    if isinstance(rate, Tensor):
        shard.sub_(scale_by(update.to(shard.dtype), rate))
    else:
        shard.add_(update, alpha=-rate)
    torch.autograd.graph.increment_version(parameter)  # as torch's own writes do
