# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of the overlapped operators: every kernel configuration, exchange, dtype and layout."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team, is_exact
from torch import Tensor

from stretto import ops
from stretto.ops.operands import FP8
from stretto.ops.operator import OperatorWorkspace, _caches, list_node_groups, list_put_channels

FAMILY = "operators"
ENTRIES = 6
BEGIN = "tiles.calls.begin_call"
GATHER_BY_PROGRAMS = "ops.all_gather_matmul.all_gather_gemm_by_programs"
DEFAULT: tuple[str, ...] = ()  # the kernel of a default plan depends on the machine and the number of ranks
FEW_ROWS = "ops.small_m.gemm_exchange"
JOINT = "ops.joint.kernel.joint_gemm"
JOINT_COPIED = "ops.joint.kernel.joint_gemm_by_copies"
ADDED = "ops.joint.kernel.add_rows"

_DENSITIES = (0.5, 0.25, 0.1, 0.03)  # fraction of nonzero operands: uses the first with which no sum is rounded
_PROGRAMS = 12  # fewer than the 14 multiprocessors that a rank has when 8 share an H100


@dataclass(frozen=True)
class OperatorVariant:
    """One form of an operator's call: its operands and options.

    rows: of this rank's x for a gather and of its output for a scatter; of the whole x for an all-reduce. plan: with
    blocks for GPUs; interpreted kernels take `small` sizes and blocks instead.
    """

    operator: str
    rows: int
    n: int
    k: int
    plan: ops.KernelConfig | None
    dtype: torch.dtype = torch.bfloat16
    is_transposed: bool = False
    has_bias: bool = False
    reduce_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    is_one_scale: bool = False
    schedule: str | None = None

    @property
    def is_gather(self) -> bool:
        return self.operator.startswith("all_gather")

    @property
    def is_scatter(self) -> bool:
        return self.operator.endswith("reduce_scatter")

    @property
    def is_exchange(self) -> bool:
        return self.operator.endswith("all_to_all")

    def shrunk(self) -> "OperatorVariant":
        """The same call in small sizes, for interpreted kernels, which are 100,000 times slower than a GPU.

        Preserves what depends on the sizes: whether rows fill tiles, and whether TMA supports the operands.
        """
        grain = 16 if self.dtype == FP8 else 8
        n = 48 if self.n % 8 == 0 else 37
        k = 2 * grain if self.k % 8 == 0 else 19
        rows = self.rows if self.rows <= 4 else 16 if self.rows % 16 == 0 else 24 if self.rows % 24 == 0 else 9
        plan = self.plan
        if plan is not None and plan.blocks is not None:
            width = 48 if plan.blocks.n & (plan.blocks.n - 1) else 32
            depth = 32 if self.dtype == FP8 else 16
            blocks = ops.Blocks(16, width, depth, plan.blocks.group_rows, 4, 2, 3)
            plan = plan._replace(blocks=blocks, movers=min(plan.movers, 2), piece_bytes=min(plan.piece_bytes, 512))
        return replace(self, rows=rows, n=n, k=k, plan=plan)


class WorkspaceCase(StressCase):
    """Calls that use the operators' workspaces of the group `_team`."""

    _team: Team

    def poison(self) -> None:
        poison_workspaces(self._team)

    def check(self) -> None:
        check_workspaces(self._team)


class OperatorCase(WorkspaceCase):
    """Calls of one operator on whole numbers, whose sums are exact in every dtype and order."""

    entries = ENTRIES

    def __init__(self, call: OperatorVariant, team: Team) -> None:
        self._call = call if team.is_cuda else call.shrunk()
        self._team = team
        # Where ranks share a GPU, the programs of two groups would occupy a rank's multiprocessors; copies need some.
        self.leaves_room = call.plan is None or call.plan.blocks != FILLING
        self._run = getattr(ops, call.operator)
        for density in _DENSITIES:
            if self._prepare(density):
                return
        raise AssertionError(f"{call}: sums of so many numbers are rounded")

    def _prepare(self, density: float) -> bool:
        """Make operands and expected results. Returns whether all results are exact."""
        call, team = self._call, self._team
        world, rank, (n, k) = team.world, team.rank, (self._call.n, self._call.k)
        rows = call.rows * world if call.is_scatter or call.is_exchange else call.rows
        weights = [team.integers((n, k), "weight", peer, density=density) for peer in range(world)]
        # A gather's ranks add their own biases; in a sum over the ranks, all have the same bias.
        has_own = call.is_gather or call.is_exchange
        biases = [team.integers((n,), "bias", peer * has_own, low=-8, high=8) for peer in range(world)]
        out_dtype = call.out_dtype or call.dtype
        sum_dtype = call.reduce_dtype or out_dtype
        self._weight = weights[rank].to(call.dtype)
        if call.is_transposed:
            self._weight = self._weight.t().contiguous().t()
        self._bias = biases[rank].to(out_dtype) if call.has_bias else None
        self._inputs: list[Tensor] = []
        self._scales: list[tuple[Tensor, ...]] = []
        self._expected: list[tuple[Tensor, ...]] = []
        exact = True
        for entry in range(ENTRIES):
            xs = [team.integers((rows, k), "x", entry, peer, density=density) for peer in range(world)]
            factors = [self._draw_scales(rows, n, entry, peer) for peer in range(world)]
            products = []
            for x, weight, (of_rows, of_columns) in zip(xs, weights, factors, strict=True):
                if call.is_gather:
                    break
                products.append(x @ weight.t() * of_rows[:, None] * of_columns)
            gathered = torch.cat(xs)
            if call.is_gather:
                of_rows = torch.cat([each for each, _ in factors])
                result = gathered @ weights[rank].t() * of_rows[:, None] * factors[rank][1]
            elif call.is_exchange:
                own = slice(rank * call.rows, (rank + 1) * call.rows)
                parts = zip(products, biases, strict=True)
                result = torch.cat([product[own] + bias * call.has_bias for product, bias in parts])
            else:
                exact = exact and all(is_exact(product, sum_dtype) for product in products)
                result = torch.stack(products).sum(0)
                if call.is_scatter:
                    result = result[rank * call.rows : (rank + 1) * call.rows]
            if call.has_bias and not call.is_exchange:
                result = result + biases[rank]
            exact = exact and is_exact(result, out_dtype)
            self._inputs.append(xs[rank].to(call.dtype))
            of_rows, of_columns = factors[rank]
            if call.dtype == FP8:
                part = slice(0, 1) if call.is_one_scale else slice(None)
                self._scales.append((of_rows.float()[part].contiguous(), of_columns.float()[part].contiguous()))
            else:
                self._scales.append(())
            expected: tuple[Tensor, ...] = (result.to(out_dtype),)
            if call.operator == "all_gather_matmul_gathered":
                expected = (*expected, gathered.to(call.dtype))
            self._expected.append(expected)
        return agree(team, exact)

    def _draw_scales(self, rows: int, n: int, entry: int, peer: int) -> tuple[Tensor, Tensor]:
        """Scales of a rank's rows of x and of its weight: 1 or 2 for fp8, else 1."""
        call, team = self._call, self._team
        if call.dtype != FP8:
            ones = torch.ones(max(rows, n), dtype=torch.float64, device=team.device)
            return ones[:rows], ones[:n]
        drawn = team.integers((rows + n,), "scales", entry, peer, low=1, high=2)
        of_rows, of_columns = drawn[:rows], drawn[rows:]
        if call.is_one_scale:
            return of_rows[:1].expand(rows), of_columns[:1].expand(n)
        return of_rows, of_columns

    def call(self, entry: int) -> Sequence[Check]:
        call = self._call
        options: dict[str, Any] = {"bias": self._bias, "implementation": call.plan or "kernel"}
        if call.reduce_dtype is not None:
            options["reduce_dtype"] = call.reduce_dtype
        if call.out_dtype is not None:
            options["out_dtype"] = call.out_dtype
        if call.schedule is not None:
            options["schedule"] = call.schedule
        out = self._run(self._inputs[entry], self._weight, *self._scales[entry], self._team.group, **options)
        outs = out if isinstance(out, tuple) else (out,)
        return [Check(found, right) for found, right in zip(outs, self._expected[entry], strict=True)]


class MlpCase(WorkspaceCase):
    """Calls of `ops.mlp` with relu, which keeps hidden numbers whole."""

    entries = ENTRIES

    def __init__(self, team: Team, *, is_gated: bool) -> None:
        world, rank = team.world, team.rank
        rows, hidden, k = (32, 64, 64) if team.is_cuda else (8, 16, 16)
        self._team, dtype = team, torch.bfloat16
        for density in _DENSITIES[1:]:
            ups, downs, gates = (
                [team.integers(shape, name, peer, density=density) for peer in range(world)]
                for name, shape in (("up", (hidden, k)), ("down", (k, hidden)), ("gate", (hidden, k)))
            )
            exact, self._inputs, self._expected = True, [], []
            for entry in range(ENTRIES):
                xs = [team.integers((rows, k), "x", entry, peer, density=density) for peer in range(world)]
                products, x = [], torch.cat(xs)
                for up, down, gate in zip(ups, downs, gates, strict=True):
                    left, right = (x @ gate.t()).relu(), x @ up.t()
                    inner = left * right if is_gated else right.relu()
                    products.append(inner @ down.t())
                    exact = exact and all(is_exact(one, dtype) for one in (left, right, inner, products[-1]))
                result = torch.stack(products).sum(0)[rank * rows : (rank + 1) * rows]
                exact = exact and is_exact(result, dtype)
                self._inputs.append(xs[rank].to(dtype))
                self._expected.append(result.to(dtype))
            if agree(team, exact):
                break
        else:
            raise AssertionError("an mlp's sums are rounded")
        self._up, self._down = ups[rank].to(dtype), downs[rank].to(dtype)
        self._gate = gates[rank].to(dtype) if is_gated else None

    def call(self, entry: int) -> Sequence[Check]:
        out = ops.mlp(
            self._inputs[entry],
            self._up,
            self._down,
            self._team.group,
            gate=self._gate,
            activation="relu",
            implementation="kernel",
        )
        return [Check(out, self._expected[entry])]


def agree(team: Team, exact: bool) -> bool:
    """True if results are exact on all ranks. Each checks its own; all must then use the same operands."""
    answer = torch.tensor(int(exact))
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=team.group)
    return bool(answer)


def poison_workspaces(team: Team) -> None:
    """Fill the data of the operators' workspaces of a group with NaN.

    Memory of packets holds zeros between calls, and stays so: AssertionError where a packet was left in it.
    """
    for purpose, found in _list_workspaces(team):
        memory = found.channel.tensor((found.slots * found.slot_bytes,), torch.uint8)
        if purpose != "packets":
            memory.fill_(0xFF)
        elif memory.any():
            raise AssertionError("packets were left in the memory of a workspace, which is empty between calls")
    for puts in list_put_channels(team.group.group_name):
        puts.slot_memory().fill_(0xFF)


def check_workspaces(team: Team) -> None:
    """Raise PeerError if a wait in the operators' workspaces of a group timed out."""
    for _, found in _list_workspaces(team):
        found.channel.check()
    for puts in list_put_channels(team.group.group_name):
        puts.check()


def _list_workspaces(team: Team) -> Iterator[tuple[str, OperatorWorkspace]]:
    name = team.group.group_name
    for group in (name, *list_node_groups(name)) if name in _caches else ():
        if group in _caches:
            for (purpose, *_), found in _caches[group].workspaces.items():
                yield purpose, found


TILES = ops.Blocks(64, 64, 64, 2, 4, 3, _PROGRAMS)
ODD = TILES._replace(m=32, n=96)
FEW = ops.Blocks(16, 32, 64, 1, 4, 3, _PROGRAMS)
ODD_FEW = FEW._replace(n=48)
SHARED = ops.Blocks(16, 32, 32, 1, 4, 3, 11)  # a number of programs that does not divide the tiles
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

FILLING = ops.Blocks(128, 128, 128, 2, 8, 3, 132)  # more programs than places, each of a whole multiprocessor

COPIES = ops.KernelConfig(blocks=TILES, transfer="copies", piece_bytes=4096)
PUSH = ops.KernelConfig(blocks=TILES, transfer="programs", movers=8, piece_bytes=4096)
PACKETS = ops.KernelConfig(blocks=FEW, exchange="packets")
TWO_SHOTS = PACKETS._replace(shots=2)
UNSHIFTED: dict[str, Any] = {"is_shifted": False}

_GATHERS: dict[str, tuple[str, OperatorVariant]] = {
    "copies": (
        "copy engines push rows; tiles of one rank's rows come from x",
        OperatorVariant("", 64, 192, 128, COPIES),
    ),
    "copies-fp32": ("the same in fp32, with a bias", OperatorVariant("", 64, 192, 128, COPIES, FP32, has_bias=True)),
    "copies-fp16": ("fp16, weight transposed", OperatorVariant("", 64, 192, 128, COPIES, FP16, is_transposed=True)),
    "copies-ragged": ("tiles with rows of two ranks", OperatorVariant("", 50, 192, 128, COPIES)),
    "copies-pointers": ("operands that TMA does not take", OperatorVariant("", 50, 131, 77, COPIES, has_bias=True)),
    "copies-unshifted": (
        "tiles begin with rank 0's rows",
        OperatorVariant("", 64, 192, 128, COPIES._replace(**UNSHIFTED)),
    ),
    "copies-one-piece": (
        "a shard in one piece",
        OperatorVariant("", 64, 192, 128, COPIES._replace(piece_bytes=1 << 20)),
    ),
    "copies-filling": (
        "a GEMM that would fill the GPU while it waits for copies",
        OperatorVariant("", 128, 512, 256, COPIES._replace(blocks=FILLING)),
    ),
    "push": ("programs push rows before they multiply", OperatorVariant("", 64, 192, 128, PUSH)),
    "push-fp32": ("the same in fp32, with a bias", OperatorVariant("", 64, 192, 128, PUSH, FP32, has_bias=True)),
    "push-ragged": ("tiles with rows of two ranks", OperatorVariant("", 50, 192, 128, PUSH)),
    "push-pointers": ("operands that TMA does not take, fp16", OperatorVariant("", 33, 131, 77, PUSH, FP16)),
    "push-transposed": ("weight transposed", OperatorVariant("", 64, 192, 128, PUSH, is_transposed=True)),
    "push-odd": ("tiles of 96 columns, in parts", OperatorVariant("", 64, 192, 128, PUSH._replace(blocks=ODD))),
    "push-few": ("one row a rank", OperatorVariant("", 1, 512, 256, PUSH._replace(blocks=FEW), has_bias=True)),
    "push-one-mover": ("one program moves all rows", OperatorVariant("", 64, 192, 128, PUSH._replace(movers=1))),
    "push-all-movers": ("every program moves rows", OperatorVariant("", 64, 192, 128, PUSH._replace(movers=_PROGRAMS))),
    "shared": (
        "the last wave of tiles is shared by steps over k",
        OperatorVariant("", 16, 64, 4096, PUSH._replace(blocks=SHARED)),
    ),
    "copies-shared": (
        "the same, rows by copy engines",
        OperatorVariant("", 16, 64, 4096, COPIES._replace(blocks=SHARED)),
    ),
    "default": ('implementation="kernel": the default plan', OperatorVariant("", 64, 192, 128, None)),
    "ring": ("a ring's schedule", OperatorVariant("", 64, 192, 128, PUSH, schedule="ring-all-gather")),
    "ring-copies": (
        "the same by copy engines",
        OperatorVariant("", 50, 192, 128, COPIES, has_bias=True, schedule="ring-all-gather"),
    ),
    "direct-copies": (
        "a direct schedule's copies; polls in a flattened loop",
        OperatorVariant("", 64, 192, 128, COPIES, schedule="direct-all-gather"),
    ),
    "ring-pulled": (
        "copy engines pull them, ragged",
        OperatorVariant("", 50, 131, 77, COPIES._replace(direction="pull"), schedule="ring-all-gather"),
    ),
    "doubling": (
        "recursive doubling's schedule, ragged",
        OperatorVariant("", 50, 131, 77, PUSH, FP16, has_bias=True, schedule="recursive-doubling-all-gather"),
    ),
}

_SCATTERS: dict[str, tuple[str, OperatorVariant]] = {
    "copies": ("copy engines push tiles", OperatorVariant("", 64, 192, 128, COPIES)),
    "copies-transposed": ("weight transposed", OperatorVariant("", 64, 192, 128, COPIES, is_transposed=True)),
    "copies-shared": (
        "the last wave is shared by steps over k",
        OperatorVariant("", 16, 64, 4096, COPIES._replace(blocks=SHARED)),
    ),
    "copies-shared-fp32": (
        "the same, whose sums travel in fp32, with a bias, ragged",
        OperatorVariant("", 15, 60, 4096, COPIES._replace(blocks=SHARED), has_bias=True, reduce_dtype=FP32),
    ),
    "copies-fp32": ("the same in fp32, with a bias", OperatorVariant("", 64, 192, 128, COPIES, FP32, has_bias=True)),
    "copies-sums-fp32": (
        "bf16, whose sums travel in fp32",
        OperatorVariant("", 64, 192, 128, COPIES, reduce_dtype=FP32),
    ),
    "copies-pointers": ("operands that TMA does not take, fp16", OperatorVariant("", 33, 131, 77, COPIES, FP16)),
    "copies-unshifted": (
        "tiles begin with rank 0's rows",
        OperatorVariant("", 64, 192, 128, COPIES._replace(**UNSHIFTED)),
    ),
    "ring": ("a ring's schedule", OperatorVariant("", 64, 192, 128, PUSH, schedule="ring-reduce-scatter")),
    "ring-copies": (
        "the same by copy engines, ragged, sums in fp32",
        OperatorVariant("", 33, 131, 77, COPIES, has_bias=True, reduce_dtype=FP32, schedule="ring-reduce-scatter"),
    ),
    "direct-copies": (
        "a direct schedule's copies, of whole tiles",
        OperatorVariant("", 64, 192, 128, COPIES, schedule="direct-reduce-scatter"),
    ),
    "halving": (
        "recursive halving's schedule, ragged, sums in fp32",
        OperatorVariant(
            "", 33, 131, 77, PUSH, has_bias=True, reduce_dtype=FP32, schedule="recursive-halving-reduce-scatter"
        ),
    ),
    "packets": ("sums travel as packets", OperatorVariant("", 2, 512, 256, PACKETS)),
    "packets-fp32": ("the same in fp32, with a bias", OperatorVariant("", 1, 512, 256, PACKETS, FP32, has_bias=True)),
    "packets-odd": (
        "tiles of 48 columns, in parts",
        OperatorVariant("", 4, 480, 256, PACKETS._replace(blocks=ODD_FEW)),
    ),
    "packets-ragged": ("rows that are no whole packets", OperatorVariant("", 3, 131, 77, PACKETS)),
}

_REDUCES: dict[str, tuple[str, OperatorVariant]] = {
    "ring": ("a ring's schedule", OperatorVariant("", 120, 192, 128, PUSH, schedule="ring-all-reduce")),
    "ring-copies": (
        "the same by copy engines",
        OperatorVariant("", 64, 192, 128, COPIES, has_bias=True, schedule="ring-all-reduce"),
    ),
    "two-shot-schedule": (
        "two shots' schedule, ragged",
        OperatorVariant("", 33, 131, 77, PUSH, FP16, has_bias=True, schedule="two-shot-all-reduce"),
    ),
    "one-shot": ("packets, all ranks send to all", OperatorVariant("", 4, 512, 256, PACKETS)),
    "one-shot-fp32": ("the same in fp32, with a bias", OperatorVariant("", 4, 512, 256, PACKETS, FP32, has_bias=True)),
    "one-shot-fp16-many": ("more rows than a tile has", OperatorVariant("", 33, 192, 128, PACKETS, FP16)),
    "one-shot-ragged": ("rows that are no whole packets", OperatorVariant("", 3, 131, 77, PACKETS, has_bias=True)),
    "one-shot-odd": (
        "tiles of 48 columns, in parts",
        OperatorVariant("", 4, 480, 256, PACKETS._replace(blocks=ODD_FEW)),
    ),
    "one-shot-transposed": ("weight transposed", OperatorVariant("", 4, 512, 256, PACKETS, is_transposed=True)),
    "one-shot-shared": (
        "tiles are shared by steps over k",
        OperatorVariant("", 4, 416, 1024, PACKETS._replace(blocks=SHARED)),
    ),
    "two-shots": ("packets, a chunk's owner adds up and sends", OperatorVariant("", 4, 512, 256, TWO_SHOTS)),
    "two-shots-fp32": (
        "the same in fp32, with a bias",
        OperatorVariant("", 4, 512, 256, TWO_SHOTS, FP32, has_bias=True),
    ),
    "two-shots-fp16-many": ("more rows than a tile has", OperatorVariant("", 33, 192, 128, TWO_SHOTS, FP16)),
    "two-shots-ragged": ("rows that are no whole packets", OperatorVariant("", 3, 131, 77, TWO_SHOTS, has_bias=True)),
    "two-shots-odd": (
        "tiles of 48 columns, in parts",
        OperatorVariant("", 4, 480, 256, TWO_SHOTS._replace(blocks=ODD_FEW)),
    ),
    # Chunks of 64 packets in a kernel of 128 threads: of the default plan, for one row.
    "two-shots-wide": (
        "one row, n = 4096, default blocks",
        OperatorVariant("", 1, 4096, 256, TWO_SHOTS._replace(blocks=None)),
    ),
    "two-shots-wide-fp32": (
        "one row, n = 4096, default blocks, fp32",
        OperatorVariant("", 1, 4096, 256, TWO_SHOTS._replace(blocks=None), FP32),
    ),
    "tiles": (
        "many rows: copy engines push what ranks add up, and the sums, by two shots' schedule",
        OperatorVariant("", 120, 192, 128, COPIES),
    ),
    "one-shot-wide": (
        "one row, n = 4096, default blocks",
        OperatorVariant("", 1, 4096, 256, PACKETS._replace(blocks=None)),
    ),
}

_SCALED: dict[str, tuple[str, str, OperatorVariant]] = {
    "all-gather/copies": ("gather", "copy engines push rows and scales", OperatorVariant("", 64, 192, 128, COPIES)),
    "all-gather/push": (
        "gather",
        "programs push rows and scales",
        OperatorVariant("", 64, 192, 128, PUSH, has_bias=True),
    ),
    "reduce-scatter/programs": (
        "scatter",
        "the kernel stores tiles to their owners",
        OperatorVariant("", 64, 192, 128, PUSH),
    ),
    "reduce-scatter/copies": (
        "scatter",
        "copy engines push tiles",
        OperatorVariant("", 64, 192, 128, COPIES, has_bias=True),
    ),
    "reduce-scatter/packets": ("scatter", "sums travel as packets", OperatorVariant("", 2, 512, 256, PACKETS)),
    "all-reduce/tiles": ("reduce", "copy engines push tiles, and sums", OperatorVariant("", 64, 192, 128, COPIES)),
    "all-reduce/one-shot": ("reduce", "packets, all ranks send to all", OperatorVariant("", 4, 512, 256, PACKETS)),
    "all-reduce/two-shots": ("reduce", "packets, a chunk's owner adds up", OperatorVariant("", 4, 512, 256, TWO_SHOTS)),
}
_SCALED_NAMES = {
    "gather": "all_gather_scaled_matmul",
    "scatter": "scaled_matmul_reduce_scatter",
    "reduce": "scaled_matmul_all_reduce",
}

# Configurations that two halves of the ranks call too: a kernel is compiled for the number of ranks.
_IN_HALVES = ("all-gather/push", "all-gather/copies", "reduce-scatter/programs", "all-reduce/two-shots")


def list_configurations() -> list[Configuration]:
    found = []
    for name, (covers, call) in _GATHERS.items():
        found.append(_configure(f"all-gather/{name}", covers, replace(call, operator="all_gather_matmul")))
    for name, covers, schedule in (
        ("schedule", "a product's rows leave by an all-to-all's schedule", "direct-all-to-all"),
        ("copies", "copy engines make its moves", "direct-all-to-all"),
    ):
        call = OperatorVariant(
            "matmul_all_to_all", 50, 192, 128, COPIES if name == "copies" else PUSH, has_bias=True, schedule=schedule
        )
        found.append(_configure(f"all-to-all/{name}", covers, call))
    gathered = replace(_GATHERS["copies"][1], operator="all_gather_matmul_gathered")
    found.append(_configure("all-gather-gathered/copies", "returns the gathered x too", gathered))
    ragged = replace(gathered, rows=50, dtype=FP32, has_bias=True)
    found.append(_configure("all-gather-gathered/ragged-fp32", "returns the gathered x too, in fp32", ragged))
    for name, (covers, call) in _SCATTERS.items():
        found.append(_configure(f"reduce-scatter/{name}", covers, replace(call, operator="matmul_reduce_scatter")))
    for name, (covers, call) in _REDUCES.items():
        found.append(_configure(f"all-reduce/{name}", covers, replace(call, operator="matmul_all_reduce")))
    for name, (kind, covers, call) in _SCALED.items():
        blocks = None if call.plan is None or call.plan.blocks is None else call.plan.blocks._replace(k=128)
        plan = None if call.plan is None else call.plan._replace(blocks=blocks)
        scaled = replace(call, operator=_SCALED_NAMES[kind], dtype=FP8, out_dtype=BF16, k=256, plan=plan)
        found.append(_configure(f"fp8/{name}", f"fp8: {covers}", scaled))
    for name, is_gated in (("mlp", False), ("gated", True)):
        covers = f"an all-gather and a reduce-scatter of one layer{', gated' if is_gated else ''}"
        make: Callable[[Team], StressCase] = partial(MlpCase, is_gated=is_gated)
        found.append(Configuration(f"mlp/{name}", FAMILY, DEFAULT, covers, make))
    return found


def _configure(name: str, covers: str, call: OperatorVariant) -> Configuration:
    return Configuration(
        name,
        FAMILY,
        _find_kernels(call),
        covers,
        partial(OperatorCase, call),
        takes_halves=name in _IN_HALVES,
        crosses_nodes=call.dtype != FP8 and _crosses_nodes(call),
    )


def _crosses_nodes(call: OperatorVariant) -> bool:
    """True for a call by a schedule, and for a default one, which between nodes has one."""
    if call.plan is None:
        return True
    return call.schedule is not None and call.plan.direction == "push"


def _find_kernels(call: OperatorVariant) -> tuple[str, ...]:
    if call.plan is None:
        return DEFAULT
    if call.schedule is not None:
        by_copies = call.plan.transfer == "copies"
        if not by_copies:
            return (BEGIN, JOINT)
        waits = () if call.schedule == "direct-all-gather" else ("tiles.signals.wait_for_channel",)
        return (BEGIN, *waits, JOINT_COPIED, *(() if call.is_gather else (ADDED,)))
    if call.is_gather:
        if call.operator == "all_gather_matmul_gathered":
            return (BEGIN, "tiles.signals.wait_for_channel", JOINT_COPIED)
        return (BEGIN, JOINT_COPIED) if call.plan.transfer == "copies" else (GATHER_BY_PROGRAMS,)
    if call.plan.exchange == "packets":
        return (FEW_ROWS,)
    return (BEGIN, "tiles.signals.wait_for_channel", JOINT_COPIED, ADDED)
