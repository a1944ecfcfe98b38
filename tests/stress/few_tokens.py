# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of the exchange of few tokens between experts' ranks by packets."""

from collections.abc import Sequence
from functools import partial

import torch
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team, is_exact
from torch import Tensor

from lab.experts.routing import take_recorded
from stretto.ops import moe
from stretto.ops.moe import few_tokens
from stretto.ops.operator import list_kept

ENTRIES = 6
RECORDED = 3  # the entry whose choices are those of a trained router
K = 3
LOCAL = 2  # experts of a rank
_KERNELS = tuple(f"ops.moe.few_kernels.{name}" for name in ("dispatch_tokens", "combine_sums"))


class FewTokensCase(StressCase):
    """A layer whose experts multiply a token by their number, of small whole numbers.

    Entries differ in their routing, to any experts, to those of one rank, to one of each token's rank, or as a trained
    router chose, and in the ranks' numbers of tokens, some of which are 0.
    """

    entries = ENTRIES

    def __init__(self, team: Team, *, dtype: torch.dtype, payload: torch.dtype | None, shares: tuple[int, ...]) -> None:
        """shares: numbers of tokens that a rank may have; on CPUs, in 32nds."""
        self._team, self._payload = team, payload
        self._experts, self._max = LOCAL * team.world, 128 if team.is_cuda else 4
        columns = 2320 if team.is_cuda else 32
        self._calls: list[tuple[Tensor, Tensor, Tensor]] = []
        self._expected: list[tuple[Tensor, Tensor]] = []
        for entry in range(ENTRIES):
            words = entry, team.rank
            tokens = shares[int(team.integers((1,), "tokens", *words, low=0, high=len(shares) - 1))]
            if not team.is_cuda:
                tokens = -(-tokens * self._max // 128)
            numbers = torch.rand(tokens, self._experts, generator=team.draw("ids", *words), device=team.device)
            if entry % 3 == 1:  # the experts of one rank come first
                numbers[:, (entry % team.world) * LOCAL :][:, :LOCAL] += 1
            elif entry % 3 == 2:
                numbers[:, team.rank * LOCAL] += 1
            ids = numbers.topk(K).indices
            if entry == RECORDED:
                ids = take_recorded(tokens, self._experts, K, first=team.rank * tokens).to(team.device)
            x = team.integers((tokens, columns), "x", *words)
            weights = team.integers((tokens, K), "weights", *words, low=0, high=2)
            expected = x * ((ids + 1) * weights).sum(1, keepdim=True)
            if not is_exact(expected, dtype):
                raise AssertionError("sums of so many choices are rounded")
            self._calls.append((x.to(dtype), ids, weights.float()))
            self._expected.append((expected.to(dtype), torch.zeros(1, dtype=torch.int32, device=team.device)))

    def call(self, entry: int) -> Sequence[Check]:
        x, ids, weights = self._calls[entry]
        with torch.no_grad():
            sent = moe.dispatch_few(
                x, ids, weights, self._experts, self._team.group, max_tokens=self._max, payload=self._payload,
                implementation="kernel",
            )  # fmt: skip
            numbers = torch.arange(len(sent.rows), device=x.device, dtype=torch.int32)
            experts = torch.searchsorted(sent.offsets[1:], numbers, right=True).clamp(max=LOCAL - 1)
            factors = (experts + self._team.rank * LOCAL + 1).to(x.dtype)
            out = moe.combine_few(sent.rows * factors[:, None], sent.handle)
        expected, first = self._expected[entry]
        return [Check(out, expected), Check(sent.offsets[:1], first)]

    def _list_workspaces(self) -> list[few_tokens.FewWorkspace]:
        return [one for one in list_kept(self._team.group.group_name) if isinstance(one, few_tokens.FewWorkspace)]

    def poison(self) -> None:
        """Fill numbered words with those of no call. AssertionError where a packet was left in memory."""
        for workspace in self._list_workspaces():
            if workspace.packets[:, workspace.first :].any():
                raise AssertionError("packets were left in memory that is empty between calls")
            workspace.packets[:, : workspace.first] = -1

    def check(self) -> None:
        for workspace in self._list_workspaces():
            workspace.channel.check()


def list_configurations() -> list[Configuration]:
    several = 2
    return [
        Configuration(
            f"experts/few-{name}",
            "experts",
            _KERNELS,
            covers,
            partial(FewTokensCase, dtype=dtype, payload=payload, shares=shares),
            suits=lambda ranks: ranks >= several,
        )
        for name, covers, dtype, payload, shares in (
            ("bf16", "few tokens to experts' ranks and back by packets", torch.bfloat16, None, (0, 37, 128)),
            ("fp8", "the same with rows in fp8", torch.bfloat16, torch.float8_e4m3fn, (0, 9, 128)),
            ("fp32", "the same in fp32, of a token or two", torch.float32, None, (0, 1, 2)),
        )
    ]
