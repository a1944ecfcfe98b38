# SPDX-License-Identifier: Apache-2.0
"""Muon on a grid: orthogonalized momentum for hidden matrices (Jordan et al. 2024), AdamW for all other parameters.

An update needs the whole matrix. Each matrix is brought together on one of the ranks that hold its shards
(`stretto.optim.matrix_owners`); momentum stays sharded like the parameter.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.memory import failures
from stretto.optim.adamw import AdamW, call, local
from stretto.optim.matrix_owners import MatrixOwners
from stretto.parallel.grid import Grid
from stretto.parallel.layers.embedding import ParallelEmbedding, ParallelPositions
from stretto.parallel.layers.loss import ParallelHead
from stretto.parallel.layout import ParameterLayout, has_layout, layout_of
from stretto.suggestions import require_type

AdjustLr = Literal["match_rms_adamw", "original"]
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
        x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=self.eps)
        multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
        for _ in range(self.steps):
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

    Embeddings and output heads are left out: a head is the model's `get_output_embeddings()`, a parallelized head, or a
    module called head, lm_head, embed_out, output_projection, score, classifier or qa_outputs. Weights of three dims
    are those under "experts", whose biases [e, a] are left out, as are decays A_log [a, b] of state-space models.
    """
    require_type(model, nn.Module, "model")
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    others = {
        id(parameter)
        for name, module in model.named_modules()
        if isinstance(module, _TABLES) or module is head or name.rpartition(".")[2] in _HEADS
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
        """Whether it is stored [.., in, out]."""
        return any(part.dim == -1 for part in self.parts)

    @property
    def seen_shape(self) -> tuple[int, ...]:
        """The shape [.., out, in] of what is orthogonalized, all parts together."""
        return (*self.shape[:-2], *self.shape[:-3:-1]) if self.is_transposed else self.shape


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
        if adjust_lr not in get_args(AdjustLr):
            raise ValueError(f"adjust_lr is {adjust_lr!r}, but must be one of {', '.join(get_args(AdjustLr))}")
        self.momentum, self.nesterov, self.adjust_lr, self.iteration = momentum, nesterov, adjust_lr, iteration
        self.grid = grid
        self._matrices: list[_MatrixParameter] = []
        self._owners: dict[tuple[int, ...], MatrixOwners] = {}
        given: list[Any] = list(params)
        if given and not isinstance(given[0], dict):
            given = [{"params": given, "use_muon": True}]
        super().__init__(given, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:
            group["fused"] = False  # a skipped step is decided on the host

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, for AdamW unless the group has `use_muon`."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, but is a {type(param_group).__name__}")
        group = {"use_muon": False, "fused": False, **param_group}
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
        names = "momentum", "nesterov", "adjust_lr", "iteration", "grid", "_matrices"
        return super().__getstate__() | {name: getattr(self, name) for name in names} | {"_owners": {}}

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

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, scale: Tensor | None = None, skip: Tensor | None = None
    ) -> Any:
        """Update the parameters, as `AdamW.step`. Collective over the stage's ranks if parameters are on a grid."""
        loss = call(closure, scale)  # which may drop the gradients of all groups
        if skip is not None and bool(skip):
            return loss
        whole, self.param_groups = self.param_groups, [one for one in self.param_groups if not one["use_muon"]]
        try:
            super().step(scale=scale)
        finally:
            self.param_groups = whole
        self._update_matrices(scale)
        return loss

    def _update_matrices(self, scale: Tensor | None) -> None:
        # On a grid, ranks may differ in which parameters have a gradient, but not in which are frozen.
        is_on_grid = any(matrix.layout is not None for matrix in self._matrices)
        groups = [group for group in self.param_groups if group["use_muon"] for _ in group["params"]]
        active = [
            (number, matrix, group)
            for number, (matrix, group) in enumerate(zip(self._matrices, groups, strict=True))
            if matrix.parameter.grad is not None or (is_on_grid and matrix.parameter.requires_grad)
        ]
        if not active:
            return
        numbers, matrices = tuple(number for number, *_ in active), [matrix for _, matrix, _ in active]
        flag = failures.find_flag(matrices[0].parameter.device)
        is_right = None if flag is None else flag[0] == 0
        shards = [self._follow_momentum(matrix.parameter, scale, is_right) for matrix in matrices]
        dtype = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.bfloat16

        def update_of(whole: Tensor, place: int) -> Tensor:
            return self._orthogonalize(whole, matrices[place])

        if is_on_grid:
            updates = self._find_owners(numbers, matrices).apply(shards, update_of, dtype)
        else:
            updates = [update_of(shard.to(dtype), place) for place, shard in enumerate(shards)]
        for (_, matrix, group), update in zip(active, updates, strict=True):
            if matrix.parameter.grad is not None:
                _apply(matrix.parameter, update, group, _factor(matrix.seen_shape, self.adjust_lr), is_right)

    def _find_owners(self, numbers: tuple[int, ...], matrices: Sequence[_MatrixParameter]) -> MatrixOwners:
        """The owners of the matrices that are trained. Collective for others than before."""
        if numbers not in self._owners:
            assert self.grid is not None
            layouts = [matrix.layout or ParameterLayout(matrix.shape, ()) for matrix in matrices]
            self._owners = {numbers: MatrixOwners(layouts, self.grid)}
        return self._owners[numbers]

    def _follow_momentum(self, parameter: Tensor, scale: Tensor | None, is_right: Tensor | None) -> Tensor:
        """Update this rank's momentum, and return what is to be orthogonalized: zeros for no gradient."""
        if parameter.grad is None:
            return torch.zeros_like(local(parameter))
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        gradient, momentum = local(parameter.grad), local(state["momentum_buffer"])
        if scale is not None:
            gradient = gradient * scale.to(gradient.dtype)
        if is_right is not None:  # after a failed wait it may be NaN
            gradient = torch.where(is_right, gradient, momentum)
        momentum.lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(momentum, self.momentum) if self.nesterov else momentum

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


def _apply(parameter: Tensor, update: Tensor, group: Mapping[str, Any], factor: float, is_right: Tensor | None) -> None:
    """parameter = parameter * (1 - lr * decay) - lr * factor * update; not after a failed wait."""
    shard, lr, decay = local(parameter), group["lr"], group["weight_decay"]
    rate = lr * factor
    if is_right is not None:
        update, lr = torch.where(is_right, update, 0), is_right * lr
    shard.mul_(1 - lr * decay)
    if isinstance(rate, Tensor):
        shard.sub_(update.to(shard.dtype) * rate)
    else:
        shard.add_(update, alpha=-rate)
    torch.autograd.graph.increment_version(parameter)  # as torch's own writes do
