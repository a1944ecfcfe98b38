# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of context-parallel attention, whose keys and gradients copy engines push."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from tests.ops.attention.whole import Case, see
from tests.stress.harness.catalogue import Check, Configuration
from tests.stress.harness.team import Team
from tests.stress.operators import WorkspaceCase

from stretto import ops
from stretto.ops.attention import list_chunks
from stretto.ops.joint.registry import name_schedule

ENTRIES = 4
SIZE = 64
_SHARP = 16.0  # a query's score of its own key is higher than all others by hundreds: their weights are 0
_KERNELS = (
    "tiles.calls.begin_call",
    "tiles.signals.wait_for_all",
    "ops.attention.merge.merge_rows",
    "ops.attention.merge.add_rows",
)


class AttentionCase(WorkspaceCase):
    """Queries that each see one key alone, drawn among those that the mask shows: so results and gradients are exact.

    A key is its position's bits, as 1 and -1, repeated; a query is a multiple of its key. The output is the key's
    value, of whole numbers, and a value's gradient the sum of its queries' ones; queries and keys have none.
    """

    entries = ENTRIES

    def __init__(self, team: Team, *, case: Case, implementation: str, schedule: str | None = None) -> None:
        self._team = team
        length, total = case.length, case.length * team.world
        case = replace(case, scale=1.0, documents=None if case.documents is None else (0, 3, total // 2 + 5, total))
        self._options = case.options() | {"implementation": implementation}
        if schedule is not None:
            self._options["implementation"] = name_schedule("all_gather_attention", schedule, "kernel", team.world)
        if case.has_sinks:
            self._options["sinks"] = torch.full((case.heads,), -1000.0, device=team.device)
        bits = total.bit_length()
        positions = torch.arange(total, device=team.device)
        codes = (positions[:, None] >> torch.arange(bits, device=team.device)) % 2 * 2 - 1
        codes = torch.nn.functional.pad(codes.repeat(1, SIZE // bits), (0, SIZE % bits)).bfloat16()
        chunks = list_chunks(case.layout, team.rank, team.world, length, case.documents)
        rows = torch.cat([positions[slice(*chunk)] for chunk in chunks])
        seen = see(case, total).to(team.device).double()
        shape = 1, case.heads, total, SIZE
        self._calls, self._expected = [], []
        for entry in range(ENTRIES):
            targets = torch.multinomial(seen, case.heads, True, generator=team.draw("targets", entry)).t()  # [h, total]
            v = team.integers((1, case.kv_heads, total, SIZE), "v", entry)
            grad = team.integers(shape, "grad", entry, density=0.25)
            repeated = case.heads // case.kv_heads
            index = targets[None, :, :, None].expand(shape)
            out = v.repeat_interleave(repeated, 1).gather(2, index)
            of_v = torch.zeros_like(out).scatter_add(2, index, grad).unflatten(1, (-1, repeated)).sum(2)
            q, k = (codes[targets] * _SHARP)[None], codes.expand(1, case.kv_heads, -1, -1)
            self._calls.append([each[:, :, rows].bfloat16().contiguous() for each in (q, k, v, grad)])
            zeros = (torch.zeros_like(each) for each in self._calls[-1][:2])
            self._expected.append([out[:, :, rows].bfloat16(), *zeros, of_v[:, :, rows].bfloat16()])

    def call(self, entry: int) -> Sequence[Check]:
        *operands, grad = self._calls[entry]
        leaves = [each.detach().requires_grad_() for each in operands]
        with torch.enable_grad():
            out = ops.context_attention(*leaves, self._team.group, **self._options)
        found = out.detach(), *torch.autograd.grad(out, leaves, grad)
        return [Check(one, right) for one, right in zip(found, self._expected[entry], strict=True)]


def list_configurations() -> list[Configuration]:
    """All configurations of attention; on CPUs it uses none of these kernels."""
    plain = Case(128, heads=4, kv_heads=2)
    several = 2
    return [
        Configuration(
            f"attention/{name}",
            "attention",
            _KERNELS,
            covers,
            partial(AttentionCase, case=case, implementation=implementation),
            suits=lambda ranks: ranks >= several,
            on_cpu=False,
        )
        for name, covers, case, implementation in (
            ("all-gather", "keys of all ranks at once, causal, zig-zag", plain, "all_gather"),
            (
                "all-gather-full",
                "the same without a mask, with sinks",
                replace(plain, causal=False, layout="contiguous", has_sinks=True),
                "all_gather",
            ),
            ("ring", "keys of one rank after the other, causal, zig-zag", plain, "ring"),
            (
                "ring-documents",
                "the same of documents, cut by work",
                replace(plain, documents=(0,), layout="balanced"),
                "ring",
            ),
            ("ring-window", "only the ranks that a window reaches", replace(plain, window=70), "ring"),
        )
    ] + [
        Configuration(
            f"attention/{name}",
            "attention",
            (*_KERNELS, "tiles.signals.wait_for_channel"),
            covers,
            partial(AttentionCase, case=case, implementation="all_gather", schedule=schedule),
            suits=lambda ranks: ranks >= several,
            on_cpu=False,
        )
        for name, covers, case, schedule in (
            ("schedule-ring", "keys by a ring's schedule, causal, zig-zag", plain, "ring-all-gather"),
            (
                "schedule-doubling",
                "by recursive doubling, contiguous, chunks that nobody needs left out",
                replace(plain, layout="contiguous"),
                "recursive-doubling-all-gather",
            ),
        )
    ]
