# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of tensor-parallel experts by kernels."""

from collections.abc import Sequence

import torch
from tests.stress.harness.catalogue import Check, Configuration
from tests.stress.harness.team import Team, is_exact
from tests.stress.operators import WorkspaceCase
from torch import Tensor

from lab.experts.routing import take_recorded
from stretto.ops import moe

ENTRIES = 6
RECORDED = 2  # the entry whose choices are those of a trained router
EXPERTS = 5
_KERNELS = (
    *(f"ops.moe.tensor_parallel_kernels.{name}" for name in ("multiply_and_send", "signal_own_parts")),
    *(f"ops.moe.grouped.tile_order.{name}" for name in ("fill_tile_tables",)),
    "ops.moe.grouped.kernels.multiply_groups_in_order",
)


class TensorParallelCase(WorkspaceCase):
    """Both halves of a layer and their gradients, of small whole numbers of which bf16 holds all sums exactly.

    Entries differ in their routing, to any experts, all to one or as a trained router chose, and in the ranks' number
    of tokens.
    """

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        self._team, self._calls, self._expected = team, [], []
        most, hidden, inner = (290, 520, 136) if team.is_cuda else (9, 24, 16)
        for entry in range(ENTRIES):
            tokens, k = (most, most, most // 2)[entry % 3], 1 if entry % 2 else 2
            numbers = torch.rand(team.world * tokens, EXPERTS, generator=team.draw("ids", entry), device=team.device)
            if entry % 2:
                numbers[:, entry % EXPERTS] += 1
            ids = numbers.topk(k).indices
            if entry == RECORDED:
                ids = take_recorded(len(numbers), EXPERTS, k).to(team.device)
            x, grad = (team.integers((team.world * tokens, hidden), name, entry, density=0.1) for name in ("x", "grad"))
            weights = team.integers((team.world * tokens, k), "weights", entry, low=0)
            up = team.integers((EXPERTS, inner, hidden), "up", entry, team.rank, density=0.2)
            down = team.integers((EXPERTS, hidden, inner), "down", entry, team.rank, density=0.1)
            mine = slice(team.rank * tokens, (team.rank + 1) * tokens)
            operands = x[mine], ids[mine], weights[mine], up, down, grad[mine]
            self._calls.append(tuple(one if one is ids else one.clone() for one in operands))
            self._expected.append(self._compute(entry, x, ids, weights, grad, mine))

    def _compute(
        self, entry: int, x: Tensor, ids: Tensor, weights: Tensor, grad: Tensor, mine: slice
    ) -> tuple[Tensor, ...]:
        """The same in fp64, every expert on every token: the output and the gradients of this rank's leaves."""
        team, (_, _, _, *own) = self._team, self._calls[entry]
        shapes = own[0].shape, own[1].shape
        leaves = [one.clone().requires_grad_() for one in (x, weights)]
        out = torch.zeros_like(x)
        for rank in range(team.world):
            up = team.integers(shapes[0], "up", entry, rank, density=0.2)
            down = team.integers(shapes[1], "down", entry, rank, density=0.1)
            if rank == team.rank:
                leaves += [up.requires_grad_(), down.requires_grad_()]
            for expert in range(EXPERTS):
                share = (leaves[1] * (ids == expert)).sum(1, keepdim=True)
                out = out + share * (leaves[0] @ up[expert].T @ down[expert].T)
        found = torch.autograd.grad(out, leaves, grad)
        expected = out.detach()[mine], found[0][mine], found[1][mine], *found[2:]
        if not all(is_exact(one, torch.bfloat16) for one in expected[:2]):
            raise AssertionError("sums of so many numbers are rounded")
        return expected

    def call(self, entry: int) -> Sequence[Check]:
        x, ids, weights, up, down, grad = self._calls[entry]
        leaves = [one.bfloat16().requires_grad_() for one in (x, up, down)]
        factors = weights.float().requires_grad_()
        with torch.enable_grad():
            found = moe.all_gather_moe(leaves[0], leaves[1], ids, self._team.group, implementation="kernel")
            out = moe.moe_reduce_scatter(
                found.rows, leaves[2], found.handle, factors, self._team.group, implementation="kernel"
            )
        of_x, of_up, of_down, of_weights = torch.autograd.grad(out, [*leaves, factors], grad.bfloat16())
        results = out.detach(), of_x, of_weights, of_up, of_down
        pairs = zip(results, self._expected[entry], strict=True)
        return [Check(one.contiguous(), right.to(one.dtype)) for one, right in pairs]


def list_configurations() -> list[Configuration]:
    several = 2
    return [
        Configuration(
            "experts/tensor-parallel",
            "experts",
            _KERNELS,
            "all-gather + grouped product, grouped product + reduce-scatter, and their gradients",
            TensorParallelCase,
            suits=lambda ranks: ranks >= several,
        )
    ]
