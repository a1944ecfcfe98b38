# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of the exchange of tokens between experts' ranks by kernels."""

from collections.abc import Sequence
from functools import partial

import torch
from tests.stress.harness.catalogue import Check, Configuration
from tests.stress.harness.team import Team, is_exact
from tests.stress.operators import WorkspaceCase
from torch import Tensor

from lab.experts.routing import take_recorded
from stretto.collectives import Schedule
from stretto.collectives.algorithms import find
from stretto.ops import moe
from stretto.ops.moe.grouped.matmul import compute_product
from stretto.ops.moe.kernel_route import KernelRoute
from stretto.ops.moe.places import find_places

ENTRIES = 6
RECORDED = 3  # the entry whose choices are those of a trained router
K = 3
LOCAL = 2  # experts of a rank
_EXCHANGE = (
    *(f"ops.moe.exchange_kernel.{name}" for name in ("exchange_counts", "push_rows")),
    *(f"ops.moe.pairs.{name}" for name in ("count_pairs", "place_pairs")),
    *(f"ops.moe.sorting.{name}" for name in ("count_copies", "place_copies")),
)
_SCHEDULE = (
    *(name for name in _EXCHANGE if not name.endswith("push_rows")),
    "ops.joint.routed.move_rows",
    "ops.moe.grouped.tile_order.fill_tile_tables",
)
_ARRIVALS = (
    *_EXCHANGE,
    "ops.moe.grouped.kernels.multiply_groups_in_order",
    *(f"ops.moe.grouped.tile_order.{name}" for name in ("fill_tile_tables", "await_all_channels")),
)


class ExchangeCase(WorkspaceCase):
    """A layer whose experts multiply a token by their number, forward and backward, of small whole numbers.

    Entries differ in their routing: to any experts, to those of one rank, to one expert of each token's rank, or as a
    trained router chose; and, without a fixed number of rows, in the ranks' numbers of tokens, some of which are 0.
    """

    entries = ENTRIES

    def __init__(self, team: Team, *, reduce: moe.exchange.Reduce, is_fixed: bool) -> None:
        self._team, self._reduce = team, reduce
        self._experts = LOCAL * team.world
        most, self._columns = (300, 1160) if team.is_cuda else (6, 24)
        self._max_rows = most * K * team.world if is_fixed else None
        self._calls, self._expected = [], []
        for entry in range(ENTRIES):
            words = entry, team.rank
            tokens = most if is_fixed else most * int(team.integers((1,), "tokens", *words, low=0, high=3)) // 3
            k = min(K, self._experts)
            numbers = torch.rand(tokens, self._experts, generator=team.draw("ids", *words), device=team.device)
            if entry % 3 == 1:  # the experts of one rank come first
                numbers[:, (entry % team.world) * LOCAL :][:, :LOCAL] += 1
            elif entry % 3 == 2:
                k = 1
                numbers[:, team.rank * LOCAL] += 1
            ids = numbers.topk(k).indices
            if entry == RECORDED:
                ids = take_recorded(tokens, self._experts, k, first=team.rank * tokens).to(team.device)
            x = team.integers((tokens, self._columns), "x", *words)
            grad = team.integers((tokens, self._columns), "grad", *words)
            weights = team.integers((tokens, k), "weights", *words, low=0, high=2)
            factors = (ids + 1).double()
            scales = (factors * weights).sum(1, keepdim=True)
            expected = x * scales, grad * scales, factors * (x * grad).sum(1, keepdim=True)
            if not all(is_exact(one, torch.bfloat16) for one in expected[:2]):
                raise AssertionError("sums of so many choices are rounded")
            self._calls.append((x.bfloat16(), ids, weights.float(), grad.bfloat16()))
            self._expected.append(expected)

    def call(self, entry: int) -> Sequence[Check]:
        x, ids, weights, grad = self._calls[entry]
        leaves = x.detach().requires_grad_(), weights.detach().requires_grad_()
        with torch.enable_grad():
            sent = moe.dispatch(
                leaves[0], ids, self._experts, self._team.group, max_rows=self._max_rows, reduce=self._reduce,
                topk_weights=leaves[1] if entry % 2 else None, implementation="kernel",
            )  # fmt: skip
            out = moe.combine(self._multiply(sent), sent.handle, leaves[1], self._team.group)
        found = out.detach(), *torch.autograd.grad(out, leaves, grad)
        pairs = zip(found, self._expected[entry], strict=True)
        return [Check(one, right.to(one.dtype)) for one, right in pairs]

    def _multiply(self, sent: moe.Dispatched) -> Tensor:
        """Each row times the number of its expert, of all ranks', plus 1."""
        numbers = torch.arange(len(sent.rows), device=sent.rows.device, dtype=torch.int32)
        experts = torch.searchsorted(sent.offsets[1:], numbers, right=True).clamp(max=LOCAL - 1)
        return sent.rows * (experts + self._team.rank * LOCAL + 1).to(sent.rows.dtype)[:, None]

    def check(self) -> None:
        super().check()
        if self._max_rows is not None:
            moe.check_rows(self._team.group)


def compile_all_to_all(algorithm: str, ranks: int) -> Schedule:
    """The schedule of the direct all-to-all, in pieces, or of the two-step one: of two nodes, if there can be."""
    if algorithm.startswith("two-step"):
        nodes = 2 if ranks % 2 == 0 else ranks
        return find(algorithm).compile(nodes=nodes, gpus=ranks // nodes)
    return find(algorithm).compile(ranks=ranks, instances=3)


class ScheduleCase(ExchangeCase):
    """The same by two products, and by an all-to-all's schedule: direct, in pieces, or of two steps."""

    def __init__(self, team: Team, *, algorithm: str, is_fixed: bool) -> None:
        super().__init__(team, reduce="rank", is_fixed=is_fixed)
        one = torch.eye(self._columns, device=team.device, dtype=torch.bfloat16)
        self._weight = torch.stack([one * (team.rank * LOCAL + expert + 1) for expert in range(LOCAL)])
        self._ones = one.repeat(LOCAL, 1, 1)
        self._schedule = compile_all_to_all(algorithm, team.world)

    def call(self, entry: int) -> Sequence[Check]:
        x, ids, weights, grad = self._calls[entry]
        leaves = x.detach().requires_grad_(), weights.detach().requires_grad_()
        with torch.enable_grad():
            rows, sent = moe.dispatch_grouped_matmul(
                leaves[0], ids, self._weight, self._team.group, max_rows=self._max_rows,
                topk_weights=leaves[1] if entry % 2 else None, schedule=self._schedule,
            )  # fmt: skip
            out = moe.grouped_matmul_combine(rows, self._ones, sent, leaves[1], self._team.group)
        found = out.detach(), *torch.autograd.grad(out, leaves, grad)
        pairs = zip(found, self._expected[entry], strict=True)
        return [Check(one, right.to(one.dtype)) for one, right in pairs]


class ArrivalsCase(ExchangeCase):
    """The same by products, of tokens and of gradients, that begin on rows that have arrived."""

    def __init__(self, team: Team, *, is_fixed: bool) -> None:
        super().__init__(team, reduce="rank", is_fixed=is_fixed)
        one = torch.eye(self._columns, device=team.device, dtype=torch.bfloat16)
        self._weight = torch.stack([one * (team.rank * LOCAL + expert + 1) for expert in range(LOCAL)])

    def call(self, entry: int) -> Sequence[Check]:
        x, ids, weights, grad = self._calls[entry]
        places = find_places(
            x, ids, weights, self._experts, self._team.group, max_rows=self._max_rows, implementation="kernel"
        )
        index, route, found = places.index, places.route, []
        assert isinstance(route, KernelRoute)
        numbers = index.places
        for sent, programs in ((x, None), (grad, 8)):  # sums leave before what follows, and beside it
            _, arrivals = places.start(sent)
            assert arrivals is not None
            copied = places.spread(arrivals.rows, arrivals) if entry % 2 else None
            rows = compute_product(arrivals.rows, self._weight, index.offsets, numbers, "kernel", arrivals)
            arrivals.wait()
            if copied is not None:  # the same from rows that were copied as they arrived
                rows = compute_product(copied, self._weight, index.offsets, None, "kernel")
            factors = places.send_weights(weights).reshape(-1).index_select(0, index.slots)
            weighed = rows * factors.to(rows.dtype)[:, None]
            found.append(route.start_sum_back(weighed, places.wrap_collective, programs)())
        return [Check(one, right.to(one.dtype)) for one, right in zip(found, self._expected[entry], strict=False)]


def list_configurations() -> list[Configuration]:
    several = 2
    arrivals = [
        Configuration(
            f"experts/arrivals{'-fixed' * is_fixed}",
            "experts",
            _ARRIVALS,
            "products that begin on tokens that have arrived" + ", of a fixed number of rows" * is_fixed,
            partial(ArrivalsCase, is_fixed=is_fixed),
            takes_graphs=is_fixed,
            suits=lambda ranks: ranks >= several,
        )
        for is_fixed in (False, True)
    ]
    schedules = [
        Configuration(
            f"experts/schedule-{algorithm.removesuffix('-all-to-all')}{'-fixed' * is_fixed}",
            "experts",
            _SCHEDULE,
            f"products whose rows move by the schedule of {algorithm}" + ", of a fixed number" * is_fixed,
            partial(ScheduleCase, algorithm=algorithm, is_fixed=is_fixed),
            takes_graphs=is_fixed,
            crosses_nodes=True,
            suits=lambda ranks: ranks >= several,
        )
        for algorithm in ("direct-all-to-all", "two-step-all-to-all")
        for is_fixed in (False, True)
    ]
    return (
        arrivals
        + schedules
        + [
            Configuration(
                f"experts/exchange-{name}",
                "experts",
                _EXCHANGE,
                covers,
                partial(ExchangeCase, reduce=reduce, is_fixed=is_fixed),
                takes_graphs=is_fixed,
                suits=lambda ranks: ranks >= several,
            )
            for name, covers, reduce, is_fixed in (
                ("rank", "tokens to experts' ranks and sums back, of as many rows as there are", "rank", False),
                ("choice", "the same with all choices' rows back", "choice", False),
                ("fixed", "the same of a fixed number of rows, which no host reads", "rank", True),
            )
        ]
    )
