# SPDX-License-Identifier: Apache-2.0
"""Optimizers of embedding tables that change looked-up rows while the backward pass runs (`ShardedTables.fuse_update`).

With the fused operator its kernel makes the step; with PyTorch's functions, and for replicated tables, `update_rows`
does, once a table's gradient is there. Both give the same up to rounding, on every placement.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args
from weakref import ref

import torch
from torch import Tensor

from stretto.memory import failures
from stretto.optim.row_update import STATE_NAMES, RowOptimizer, draw_bits, round_at_random, update_rows
from stretto.parallel.comm.autograd import at_end_of_backward
from stretto.recommendation.placement import TableShard
from stretto.recommendation.pooled_exchange import FusedUpdate
from stretto.recommendation.sharded_lookup import RowGradients
from stretto.suggestions import name_known

if TYPE_CHECKING:
    from stretto.recommendation.table_exchange import OptimizedTables
    from stretto.recommendation.tables import ShardedTables

_OF_KERNEL = {"rowwise-adagrad": "adagrad"}  # names of the operator that differ


class TableOptimizer:
    """Updates this rank's embedding tables in the backward pass; made by `ShardedTables.fuse_update`.

    Every rank has one, also a rank without tables. Settings are on the device: `set_lr` also works for a captured CUDA
    graph. A step is a backward pass, and counts for all rows: Adam's bias corrections are those of torch.optim.Adam
    after as many steps, but means of a row that was not looked up stay as they are, as in FBGEMM and SparseAdam.
    """

    def __init__(
        self,
        tables: "ShardedTables | OptimizedTables",
        kind: RowOptimizer = "rowwise-adagrad",
        *,
        lr: float = 0.01,
        eps: float = 1e-8,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        max_norm: float = math.inf,
        lr_factors: Mapping[int, float] | None = None,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        factors = dict(lr_factors or {})
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm}
        if kind not in get_args(RowOptimizer):
            raise ValueError(f"there is no table optimizer {kind!r}{name_known(kind, get_args(RowOptimizer))}")
        for name, value in (*numbers.items(), *((f"lr_factors[{table}]", factor) for table, factor in factors.items())):
            if not value >= 0:
                raise ValueError(f"{name} is {value}, but must be at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}, but must be at least 0 and below 1; (0.9, 0.999) would do")
        count = len(tables.placement.tables)
        if unknown := sorted(set(factors) - set(range(count))):
            raise ValueError(f"lr_factors has table {unknown[0]}, but there are tables 0 to {count - 1}")
        of_rows = "rowwise-adagrad" if kind == "rowwise-adagrad" else "clipping by a row's norm (max_norm)"
        by_columns = [table for table in range(count) if tables.placement.kind(table) == "column"]
        if by_columns and (kind == "rowwise-adagrad" or numbers["max_norm"] < math.inf):
            raise ValueError(
                f"{of_rows} takes whole rows, but table {by_columns[0]} is cut by columns: kind 'row' or 'table-row' "
                "would do, or full-adagrad without max_norm"
            )
        self.kind, self.placement = kind, tables.placement
        self._is_cut = any(tables.dims)  # some rank has tables that the operator looks up
        self.shards: tuple[TableShard, ...] = tables.shards
        self.weights = tables.weights
        self._caches = tables.caches
        self._shared = len(self.weights) - len(tables.placement.replicated)  # the first replicated table
        device, dtype = tables.device, tables.dtype
        self.is_stochastic = stochastic_rounding and dtype.itemsize == 2
        wide = torch.promote_types(dtype, torch.float32)
        # Columns of the operator's settings; the first is then that of the rate's factor. At least one row, so that a
        # rank without tables has settings, too.
        rest = [eps, weight_decay, max_norm, 1 - betas[0], 1 - betas[1]]
        self._rows = [[factors.get(shard.table, 1.0), *rest] for shard in self.shards] or [[1.0, *rest]]
        self._settings = torch.tensor(self._rows, dtype=wide, device=device)
        self._factors = self._settings[:, 0].clone()
        self.clock = torch.tensor([0, seed], dtype=torch.int64, device=device)  # steps, seed
        self.states = [
            {
                key: weight.new_zeros(weight.shape[:1] if kind == "rowwise-adagrad" else weight.shape, dtype=wide)
                for key in STATE_NAMES[kind]
            }
            for weight in self.weights
        ]
        self.lr, self._trained = lr, list[bool]()
        self._now = self.clock.clone()  # as it was when the backward pass began
        self._has_operator = tables.operators is not None
        self._update: FusedUpdate | None = None
        self.find_update()
        if self._has_operator:
            return
        # Python's garbage collector does not see the references of such a hook: a cycle would never be freed.
        this = ref(self)
        for place, (weight, is_trained) in enumerate(zip(self.weights[: self._shared], self._trained, strict=False)):
            weight.requires_grad_(True)  # a frozen table has a hook too: it may be trained later
            weight.register_post_accumulate_grad_hook(lambda _, place=place: _alive(this)._take_gradient(place))
            weight.requires_grad_(is_trained)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next updates; a table's is this times its factor."""
        self.lr = lr
        self._settings[:, 0] = self._factors * lr

    def set_steps(self, steps: int) -> None:
        """Set how many steps were made: the number that Adam and stochastic rounding continue from."""
        self.clock[0] = steps

    def find_update(self) -> FusedUpdate | None:
        """The operator's update, if that is used; before each look-up.

        Rows and states of tables that are frozen by now stay: their rate is 0, and their gradients are clipped to 0.
        """
        trained = [weight.requires_grad for weight in self.weights]
        if trained != self._trained or self._update is None:
            self._trained, frozen = trained, [0.0, self._rows[0][1], 0.0, 0.0, 0.0, 0.0]
            rows = [
                row if is_trained else frozen for row, is_trained in zip(self._rows, trained or [True], strict=True)
            ]
            self._settings.copy_(torch.tensor(rows, dtype=self._settings.dtype, device="cpu"))
            self._factors.copy_(self._settings[:, 0])
            self.set_lr(self.lr)
            self._update = self._describe()
        return self._update if self._has_operator else None

    def _describe(self) -> FusedUpdate:
        """The operator's update. Where all tables share two settings, the kernel reads these alone."""
        own = slice(None, self._shared)
        is_plain = bool((self._settings[0, 2] == 0) & (self._settings[0, 3] == math.inf) & (self._factors == 1).all())
        settings = self._settings[0, :2] if is_plain and self.kind != "adam" else self._settings[own]
        return FusedUpdate(
            _OF_KERNEL.get(self.kind, self.kind),
            settings,
            tuple(state for states in self.states[own] for state in states.values()),
            self.clock if self.kind == "adam" or self.is_stochastic else None,
            tuple((shard.table, shard.row, shard.column) for shard in self.shards[own]),
            self.is_stochastic,
        )

    def begin(self) -> None:
        """Count a step at the end of the backward pass, which has begun; an operator with the clock does it itself."""
        self._now.copy_(self.clock)
        if not self._has_operator or self._update is None or self._update.clock is None or not self._is_cut:
            at_end_of_backward(self._advance)

    def _advance(self) -> None:
        self.clock[:1] += 1

    @torch.no_grad()
    def _take_gradient(self, place: int) -> None:
        """Update a table by its sparse gradient, and drop that."""
        weight = self.weights[place]
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        gradient = gradient.to(self._settings.dtype).coalesce()  # adds up the gradients of a row in their order
        rows, values = gradient.indices()[0], gradient.values()
        held = [tensor.index_select(0, rows) for tensor in (weight, *self.states[place].values())]
        changed = self._step(place, rows, values, held)
        for tensor, before, after in zip((weight, *self.states[place].values()), held, changed, strict=True):
            tensor.index_copy_(0, rows, failures.unless_failed(after, before))

    @torch.no_grad()
    def update_replicated(self, gradients: Sequence[RowGradients]) -> None:
        """Update the replicated tables by the sums of all ranks' gradients; rows that were not looked up stay."""
        for place, (values, is_touched) in enumerate(gradients, self._shared):
            if not self._trained[place]:
                continue
            held = [self.weights[place].detach(), *self.states[place].values()]
            rows = torch.arange(len(values), device=values.device)
            for tensor, after in zip(held, self._step(place, rows, values.to(self._settings.dtype), held), strict=True):
                is_changed = is_touched.unsqueeze(1) if tensor.dim() == 2 else is_touched
                tensor.copy_(torch.where(is_changed, failures.unless_failed(after, tensor), tensor))

    def _step(self, place: int, rows: Tensor, values: Tensor, held: Sequence[Tensor]) -> list[Tensor]:
        """Return rows of a table and of its states after a step."""
        table, *states = held
        updated, states = update_rows(
            self.kind, table.to(values.dtype), values, states, self._settings[place], self._now[0]
        )
        if self.is_stochastic:
            shard = self.shards[place]
            if self._caches is not None:
                rows = self._caches.rows_of(place, rows)
            bits = draw_bits(self._now, shard.table, rows + shard.row, shard.column, shard.columns)
            return [round_at_random(updated, bits, table.dtype), *states]
        return [updated.to(table.dtype), *states]


def _alive(this: "ref[TableOptimizer]") -> TableOptimizer:
    alive = this()
    if alive is None:
        raise RuntimeError("these tables' optimizer is gone: keep the model that fuse_update was called for")
    return alive
