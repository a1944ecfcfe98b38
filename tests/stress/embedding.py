# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of embedding look-ups: every order and tile of the forward pass, backward, and update."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tests.stress.exchange import compile_all_to_all
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team, is_exact
from torch import Tensor

from stretto import ops
from stretto.memory.pinned import allocate_pinned
from stretto.ops.embedding import backward
from stretto.ops.embedding.forward import look_up_alone, look_up_and_send
from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.embedding.launch_config import LaunchConfig
from stretto.ops.embedding.output_ring import find_output_rings
from stretto.ops.embedding.placement import find_placement
from stretto.ops.embedding.table_set import find_tables
from stretto.ops.operator import list_kept

FAMILY = "embedding"
ENTRIES = 6
FORWARD = tuple(f"ops.embedding.forward_kernel.{name}" for name in ("begin_pooling", "pool_and_send"))
SCHEDULED = (
    *(f"ops.embedding.forward_kernel.{name}" for name in ("begin_pooling", "pool_alone")),
    "ops.joint.routed.move_rows",
)
_BACKWARD = "ops.embedding.backward_kernel."
SORTED = tuple(_BACKWARD + name for name in ("find_keys", "count_chunks", "place_chunks", "reduce_chunks"))
COMBINED = _BACKWARD + "combine_chunks"
PUSHED = tuple(_BACKWARD + name for name in ("begin_push", "push_gradients"))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class LookUp:
    """One form of a look-up: dtypes, pooling, and what follows it.

    action: "forward"; "dense" or "sparse" gradients; an optimizer, "sgd", "adagrad", "full-adagrad" or "adam", or
    "stochastic", sgd rounded so; or "alone", with no exchange. config: of the forward kernel, None for the default.
    has_none: the last rank has no tables. schedule: an all-to-all's algorithm, by which vectors move.
    """

    action: str = "forward"
    dtype: torch.dtype = FP32
    index_dtype: torch.dtype = torch.int64
    mode: str = "sum"
    is_weighted: bool = False
    config: LaunchConfig | None = None
    has_none: bool = False
    schedule: str = ""
    dims: tuple[int, ...] = (16, 32, 16)


class EmbeddingCase(StressCase):
    """Calls of one form of look-up, on whole numbers; every rank computes all ranks' tables, indices and results."""

    entries = ENTRIES

    def __init__(self, look_up: LookUp, team: Team, name: str) -> None:
        self._look_up, self._team, self._name = look_up, team, f"stress {name}"
        self._world, self._rank = team.world, team.rank
        self._rows, samples = (50, 128) if team.is_cuda else (5, 8)
        self._batch = self._world * -(-samples // self._world)
        self._tables = [self._draw_table(self._rank, number) for number in range(len(self._dims(self._rank)))]
        self._inputs = [self._draw_indices(entry, self._rank) for entry in range(ENTRIES)]
        # Adam's columns are of table_settings.
        own: list[Any] = [1.0, 1e-8, 0.0, float("inf"), 0.125, 0.125]
        settings = [own] * len(self._tables) if look_up.action == "adam" else own[:2]
        self._settings = torch.tensor(settings, device=team.device)
        if look_up.action == "stochastic":
            self._settings[0] = 0.3
        count = {"adagrad": 1, "full-adagrad": 1, "adam": 2}.get(look_up.action, 0)
        self._states = [
            torch.zeros(table.shape[: 1 if look_up.action == "adagrad" else 2], device=team.device)
            for table in self._tables
            for _ in range(count)
        ]
        self._clock = torch.zeros(2, dtype=torch.int64, device=team.device)
        self._faults = IndexErrors(self._rank, team.device)
        local = slice(self._rank * self._batch // self._world, (self._rank + 1) * self._batch // self._world)
        self._outputs, self._grads, self._gradients = [], [], []
        for entry in range(ENTRIES):
            whole = torch.cat([self._pool(entry, peer) for peer in range(self._world)], 1)
            if not is_exact(whole, look_up.dtype):
                raise AssertionError("sums of so many rows are rounded")
            self._outputs.append(whole[local].to(look_up.dtype))
            grad = team.integers(tuple(whole.shape), "grad", entry, density=0.5)
            self._grads.append(grad[local].to(look_up.dtype).contiguous())
            self._gradients.append(self._sum_gradients(entry, grad))
        self._updated: list[list[Tensor]] = []
        if look_up.action not in ("sgd", "forward", "dense", "sparse", "alone"):
            self._updated = [self._update_alone(gradients) for gradients in self._gradients]

    def _dims(self, peer: int) -> tuple[int, ...]:
        is_without = self._look_up.has_none and peer == self._world - 1
        return () if is_without else self._look_up.dims

    def _draw_table(self, peer: int, number: int) -> Tensor:
        shape = (self._rows, self._dims(peer)[number])
        return self._team.integers(shape, "table", peer, number, low=-3, high=3).to(self._look_up.dtype)

    def _draw_indices(self, entry: int, peer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """(indices, offsets, weights) of a rank's tables for the global batch."""
        look_up, team = self._look_up, self._team
        bags = len(self._dims(peer)) * self._batch
        lengths = team.integers((bags,), "lengths", entry, peer, low=0, high=8).long()
        if look_up.mode == "mean":
            lengths = torch.full_like(lengths, 4)  # the mean of 4 multiples of 4 is whole
        total = int(lengths.sum())
        indices = team.integers((total,), "indices", entry, peer, low=0, high=self._rows - 1).to(look_up.index_dtype)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(look_up.index_dtype)
        weights = None
        if look_up.is_weighted or look_up.mode == "mean":
            weights = team.integers((total,), "weights", entry, peer, low=1, high=2).float()
            weights *= 4 if look_up.mode == "mean" else 1
        return indices, offsets, weights

    def _pool(self, entry: int, peer: int) -> Tensor:
        """The pooled look-ups of a rank's tables: fp64 [batch, the rank's columns]."""
        indices, offsets, weights = self._draw_indices(entry, peer)
        columns = [torch.zeros(self._batch, 0, dtype=torch.float64, device=self._team.device)]
        for number in range(len(self._dims(peer))):
            part, bags, factors = self._find_part(number, indices, offsets, weights)
            rows = self._draw_table(peer, number).double()[part] * factors[:, None]
            columns.append(rows.new_zeros(self._batch, rows.shape[1]).index_add(0, bags, rows))
        return torch.cat(columns, 1)

    def _find_part(
        self, number: int, indices: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, samples, weights) of one table's look-ups; weights in fp64."""
        bounds = offsets[number * self._batch : (number + 1) * self._batch + 1].long()
        counts = bounds.diff()
        bags = torch.repeat_interleave(torch.arange(self._batch, device=counts.device), counts)
        part = indices[bounds[0] : bounds[-1]].long()
        factors = torch.ones(len(part), dtype=torch.float64, device=part.device)
        if weights is not None:
            factors = weights[bounds[0] : bounds[-1]].double()
        return part, bags, factors / 4 if self._look_up.mode == "mean" else factors

    def _sum_gradients(self, entry: int, grad: Tensor) -> list[Tensor]:
        """Gradients of this rank's tables in fp64; grad: of the whole output."""
        indices, offsets, weights = self._inputs[entry]
        column = sum(sum(self._dims(peer)) for peer in range(self._rank))
        found = []
        for number, dim in enumerate(self._dims(self._rank)):
            part, bags, factors = self._find_part(number, indices, offsets, weights)
            rows = grad[:, column : column + dim][bags] * factors[:, None]
            found.append(rows.new_zeros(self._rows, dim).index_add(0, part, rows))
            column += dim
        return found

    def _update_alone(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The tables after a step from zero states: of row-wise adagrad a row changes by its gradient / the root of its
        mean square, of full adagrad and adam each number by the gradient's sign."""
        found = []
        for table, gradient in zip(self._tables, gradients, strict=True):
            if self._look_up.action == "adagrad":
                state = (gradient * gradient).mean(1, keepdim=True)
                step = torch.where(state > 0, gradient / state.sqrt().clamp(min=1e-30), 0.0)
            else:
                step = 0.3 * gradient if self._look_up.action == "stochastic" else gradient.sign()
            found.append(table.double() - step)
        return found

    def call(self, entry: int) -> Sequence[Check]:
        action = self._look_up.action
        if action in ("forward", "alone"):
            return [Check(self._look_up_once(entry), self._outputs[entry])]
        if action in ("dense", "sparse"):
            return list(self._differentiate(entry))
        return list(self._update(entry))

    def _look_up_once(self, entry: int) -> Tensor:
        look_up, team = self._look_up, self._team
        indices, offsets, weights = self._inputs[entry]
        if look_up.action == "alone":
            return self._look_up_alone(entry)
        if look_up.schedule:
            return self._call_operator(entry, self._tables, schedule=compile_all_to_all(look_up.schedule, self._world))
        if look_up.config is None:
            return self._call_operator(entry, self._tables)
        group, tables = team.group.group_name, find_tables(self._tables, team.device)
        placement = find_placement(
            group, team.device, self._name, tables.dims, tables.dtype, self._batch, needs_grad=False
        )
        return look_up_and_send(
            indices, offsets, tables, weights, placement, group, look_up.mode, config=look_up.config
        )

    def _call_operator(self, entry: int, tables: Sequence[Tensor], **options: Any) -> Tensor:
        indices, offsets, weights = self._inputs[entry]
        return ops.embedding_all_to_all(
            indices, offsets, tables, self._team.group, weights=weights, mode=self._look_up.mode, batch=self._batch,
            name=self._name, **options,
        )  # fmt: skip

    def _look_up_alone(self, entry: int) -> Tensor:
        """This rank's own rows of its columns, at the place where an all-to-all would have put them."""
        indices, offsets, weights = self._inputs[entry]
        width, samples = sum(self._dims(self._rank)), self._batch // self._world
        out = torch.empty(self._world, samples, width, dtype=self._look_up.dtype, device=self._team.device)
        look_up_alone(
            indices, offsets, self._tables, weights, self._world, self._look_up.mode, out, self._faults,
            config=self._look_up.config,
        )  # fmt: skip
        first = sum(sum(self._dims(peer)) for peer in range(self._rank))
        result = self._outputs[entry].clone()
        result[:, first : first + width] = out[self._rank]
        return result

    def _differentiate(self, entry: int) -> Iterator[Check]:
        is_sparse = self._look_up.action == "sparse"
        tables = [table.detach().requires_grad_() for table in self._tables]
        with torch.enable_grad():
            out = self._call_operator(entry, tables, sparse=is_sparse)
            out.backward(self._grads[entry])
        for table, right in zip(tables, self._gradients[entry], strict=True):
            assert table.grad is not None
            found = table.grad.to_dense() if is_sparse else table.grad
            yield Check(found, right.to(found.dtype))

    def _update(self, entry: int) -> Iterator[Check]:
        look_up = self._look_up
        indices, offsets, weights = self._inputs[entry]
        # The update has its own copies of the tables, which look-ups on another stream do not read.
        tables = [self._clones[number].copy_(table) for number, table in enumerate(self._tables)]
        states = [state.zero_() for state in self._states]
        is_stochastic = look_up.action == "stochastic"
        clock = self._clock.zero_() if is_stochastic or look_up.action == "adam" else None
        kind = "sgd" if is_stochastic else look_up.action
        step = ops.TableUpdate(kind, self._settings, states, clock, is_stochastic=is_stochastic)
        ops.embedding_all_to_all_update(
            self._grads[entry], indices, offsets, tables, self._team.group,
            update=step, weights=weights, mode=look_up.mode, batch=self._batch, name=self._name,
        )  # fmt: skip
        for number, table in enumerate(tables):
            if look_up.action == "sgd":
                right = self._tables[number].double() - self._gradients[entry][number]
                yield Check(table, right.to(table.dtype))
            else:  # the root and the quotient are rounded; at random to one of two neighbours in bf16
                right = self._updated[entry][number]
                bound = 1e-4 if table.dtype == FP32 else 2**-7
                is_near = (table.double() - right).abs() <= bound * right.abs().clamp(
                    min=1e-2 if is_stochastic else 1.0
                )
                yield Check(is_near, torch.ones_like(is_near))

    @property
    def _clones(self) -> list[Tensor]:
        def make() -> list[Tensor]:
            return [table.clone() for table in self._tables]

        clones: list[Tensor] = self._team.keep(("embedding tables", self._name), make)
        return clones

    def poison(self) -> None:
        """Poison the ring of outputs, none of which is in use, and the gradients that peers push."""
        name = self._team.group.group_name
        for ring in find_output_rings(name):
            ring.slots.fill_(0xFF)
        for kept in list_kept(name):
            if isinstance(kept, backward._Staging):
                kept.everyones.fill_(float("nan"))

    def release_graph(self) -> None:
        """Release the ring's slots: a captured slot would stay reserved after its graph is deleted."""
        for ring in find_output_rings(self._team.group.group_name):
            ring._captures = [None] * ring.outputs

    def check(self) -> None:
        self._faults.check()
        if self._look_up.action != "alone":
            ops.check_indices(self._team.group)
        for kept in list_kept(self._team.group.group_name):
            if isinstance(kept, backward._Staging):
                kept.channel.check()


class MoveCase(StressCase):
    """Rows that go from host memory to the GPU and to other places there, of one number and of many."""

    entries = 4

    def __init__(self, team: Team) -> None:
        self._calls = []
        for entry, columns in enumerate((1, 4, 100, 1500)):
            rows = 5000 if team.is_cuda else 30
            held = allocate_pinned(2 * rows * columns * 4, team.device).view(torch.float32).view(2 * rows, columns)
            held.copy_(team.integers((2 * rows, columns), "held", entry, team.rank, low=-9, high=9))
            chosen, places = (
                torch.randperm(2 * rows, generator=team.draw(name, entry, team.rank), device=team.device)[:rows]
                for name in ("chosen", "places")
            )
            expected = torch.zeros(held.shape, device=team.device)
            expected[places] = held.to(team.device)[chosen]
            self._calls.append((held, chosen, places, expected))

    def call(self, entry: int) -> Sequence[Check]:
        from stretto.ops.embedding.move_rows import move_rows

        held, chosen, places, expected = self._calls[entry]
        here = torch.zeros_like(expected)
        move_rows(held, here, chosen, places)
        return [Check(here, expected)]


def list_configurations() -> list[Configuration]:
    found: dict[str, tuple[str, LookUp, tuple[str, ...]]] = {}
    tiles = ((1, 8, 4), (4, 2, 8), (8, 1, 8), (2, 4, 2))
    for number, order in enumerate(ORDERS):
        bags, rows, size = tiles[number]
        config = LaunchConfig(bags, rows, size, (1, 2, 4, 1)[number], 2, order)
        dtype = (FP32, BF16, FP16, FP32)[number]
        covers = f"order {order}, tiles of {bags} bags and {rows} rows, slices of {size}"
        found[f"forward/{order}"] = covers, LookUp(config=config, dtype=dtype), FORWARD
    found |= {
        "forward/default": ("the default launch config", LookUp(index_dtype=torch.int32), FORWARD),
        "forward/mean": ("weighted means", LookUp(mode="mean"), FORWARD),
        "forward/weighted-bf16": ("weighted sums in bf16", LookUp(is_weighted=True, dtype=BF16), FORWARD),
        "forward/rank-without-tables": ("the last rank has none", LookUp(has_none=True, dims=(16, 64)), FORWARD),
        "forward/schedule-direct": (
            "vectors move by a schedule, as soon as they are pooled; the last rank has none",
            LookUp(has_none=True, dims=(16, 64), schedule="direct-all-to-all"),
            SCHEDULED,
        ),
        "forward/schedule-two-step": (
            "the same by way of another rank, in bf16",
            LookUp(is_weighted=True, dtype=BF16, schedule="two-step-all-to-all"),
            SCHEDULED,
        ),
        "forward/alone": (
            "one rank's tables, with no exchange",
            LookUp("alone", config=LaunchConfig(4, 2, 8, 2, 2, "by_table")),
            ("ops.embedding.forward_kernel.pool_alone",),
        ),
        "backward/dense": ("dense gradients", LookUp("dense"), (*FORWARD, *PUSHED, *SORTED, COMBINED)),
        "backward/dense-bf16": ("in bf16", LookUp("dense", dtype=BF16), (*FORWARD, *PUSHED, *SORTED, COMBINED)),
        "backward/sparse": ("sparse gradients", LookUp("sparse", is_weighted=True), (*FORWARD, *PUSHED, *SORTED)),
        "update/sgd": ("SGD on the rows that were looked up", LookUp("sgd"), (*PUSHED, *SORTED)),
        "update/adagrad": ("row-wise adagrad", LookUp("adagrad"), (*PUSHED, *SORTED)),
        "update/full-adagrad": ("a state for each number", LookUp("full-adagrad"), (*PUSHED, *SORTED)),
        "update/adam": ("two states and the clock's correction", LookUp("adam"), (*PUSHED, *SORTED)),
        "update/stochastic": ("bf16, rounded at random", LookUp("stochastic", dtype=BF16), (*PUSHED, *SORTED)),
    }
    moved = ("ops.embedding.move_rows.move_tiles",)
    configurations = [Configuration("embedding/moved", FAMILY, moved, "rows between host memory and the GPU", MoveCase)]
    for name, (covers, look_up, kernels) in found.items():
        make: Callable[[Team], StressCase] = partial(EmbeddingCase, look_up, name=name)
        configurations.append(
            Configuration(
                f"embedding/{name}",
                FAMILY,
                kernels,
                covers,
                make,
                takes_graphs=look_up.action != "sparse",  # the host waits for the number of sparse rows
                crosses_nodes=bool(look_up.schedule),
            )
        )
    return configurations
