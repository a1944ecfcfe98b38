# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of the collectives: every algorithm and protocol, fused, interpreted and by copy engines.

CPU ranks run the same schedules on the host executor, since these kernels are CUDA C++.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team
from torch import Tensor

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.collective import Collective
from stretto.collectives.schedule import Schedule
from stretto.collectives.verifier import verify

FAMILY = "collectives"
PROTOCOLS = ("LL", "LL128", "Simple")
BY_COPIES = ("direct-all-gather", "direct-reduce-scatter", "direct-all-to-all", "two-shot-all-reduce")
FUSED_KERNEL = "collectives.executor.cuda.fused.codegen:run/1"
INTERPRETER_KERNEL = "collectives.executor.cuda.interpreter.cu:run"
COPY_KERNELS = tuple(
    f"collectives.executor.cuda.copy_engine.flags.cu:{name}"
    for name in ("wait_for_peers", "signal_arrival", "release_mailboxes")
)

# Configurations cycle through these, so that each protocol runs with each of them several times.
DTYPES = ("bfloat16", "float32", "float16", "int32", "float64", "uint8", "int8", "int64", "int16")
REDUCTIONS = ("sum", "sum", "max", "sum", "min", "sum", "avg")
UNROLLS = (1, 2, 4)

SIZES = (1, 31, 255, 1000, 4097, 30_011, 64, 7)  # elements of a block, of each input
SMALL_SIZES = (1, 7, 64, 255)
LARGE_SIZES = (524_288, 65_536, 300_001)  # with as many blocks of a kernel as there may be
OFFSETS = (0, 1, 0, 3)  # elements from an aligned address
REGIONS = {
    "LL": 1 << 20,
    "LL128": 1 << 20,
    "Simple": 2 << 20,
}  # smaller than the defaults, so that large calls are split
POISON = 77  # fills the memory around a result, and its own before a call; no result is larger
POISON_BYTE = 0xA5  # four of them make no epoch, which a message's flags are compared with
BORDER = 9
_COPY_POISONED = 64 << 20  # bytes of the copy engines' memory


@dataclass(frozen=True)
class CollectiveVariant:
    """An algorithm, its executor, and the variant in which that runs it."""

    algorithm: str
    executor: str
    protocol: str
    dtype: str
    reduction: str
    unroll: int
    in_place: bool
    instances: int
    is_large: bool = False


class CollectiveCase(StressCase):
    """Calls of one schedule on tensors of several sizes, at several offsets."""

    are_outputs_new = False

    def __init__(self, variant: CollectiveVariant, team: Team) -> None:
        self._variant, self._team = variant, team
        options = _find_sizes(variant.algorithm, team.world)
        if "in_place" in ALGORITHMS[variant.algorithm]._names:
            options["in_place"] = variant.in_place
        self._schedule = ALGORITHMS[variant.algorithm].compile(**options, instances=variant.instances)
        self._collective = (
            self._schedule.collective.aliased() if variant.in_place else self._schedule.collective.out_of_place()
        )
        found = verify(self._schedule)
        if not found.ok:
            raise AssertionError(f"the schedule {self._schedule.name} is not safe to run: {found.errors[0]}")
        self._kernel = _make_kernel(variant, self._schedule, team) if team.is_cuda else None
        self.leaves_room = variant.executor != "interpreted" or self._kernel is None or self._kernel.leaves_room
        self._dtype: torch.dtype = getattr(torch, variant.dtype)
        self._blocks = _BlockCounts.find(self._collective)
        sizes = SMALL_SIZES if not team.is_cuda else LARGE_SIZES if variant.is_large else SIZES
        self.entries = len(sizes)
        self._inputs: list[tuple[Tensor, Tensor | None]] = []
        self._templates: list[Tensor] = []
        self._memories: list[Tensor] = []
        self._checks: list[list[Check]] = []
        for entry, size in enumerate(sizes):
            self._prepare(entry, size * (self._blocks.chunks if self._needs_even() else 1))

    def _needs_even(self) -> bool:
        from stretto.collectives.executor.layout import depends_on_chunk_length

        return depends_on_chunk_length(self._collective, self._blocks.chunks)

    def _prepare(self, entry: int, elements: int) -> None:
        """Make input number `entry`, and the memory that its call writes. elements: of a block."""
        variant, team, blocks = self._variant, self._team, self._blocks
        rank, offset = team.rank, OFFSETS[entry % len(OFFSETS)]
        every = [self._draw(entry, peer, blocks.inputs * elements) for peer in range(team.world)]
        values = [one.view(blocks.inputs, elements) if blocks.inputs else one for one in every]
        whole = max(blocks.inputs, blocks.outputs)
        length = (whole if variant.in_place else blocks.outputs) * elements
        template = torch.full((offset + length + BORDER,), POISON, dtype=self._dtype, device=team.device)
        expected = torch.full_like(template, POISON)
        mask = torch.ones(template.shape, dtype=torch.bool, device=team.device)
        start_in = start_out = 0
        if variant.in_place:
            start_in, start_out = (start // blocks.chunks for start in self._collective.starts(rank))
            first = offset + start_in * elements
            template[first : first + every[rank].numel()] = every[rank].to(self._dtype)
            mask[offset : offset + length] = False  # outside the output, the call may leave anything
        for block in range(blocks.outputs):
            part = slice(offset + (start_out + block) * elements, offset + (start_out + block + 1) * elements)
            sources = self._collective.expected(rank, block * blocks.chunks)
            mask[part] = sources is not None
            if sources is not None:
                parts = torch.stack([values[peer][index // blocks.chunks] for peer, index in sources])
                expected[part] = self._reduce(parts).to(self._dtype)
        memory = template.clone()
        given = torch.zeros(offset + every[rank].numel(), dtype=self._dtype, device=team.device)
        given[offset:] = every[rank].to(self._dtype)
        target = memory[offset : offset + length]
        self._inputs.append((target, None) if variant.in_place else (given[offset:], target))
        self._templates.append(template)
        self._memories.append(memory)
        checks = [Check(memory, expected, None if bool(mask.all()) else mask)]
        if not variant.in_place:
            checks.append(Check(given, given.clone()))  # the call must not change its input
        self._checks.append(checks)

    def _draw(self, entry: int, peer: int, count: int) -> Tensor:
        """A rank's input in fp64; if the reduction is avg, numbers whose mean over the ranks is whole."""
        is_unsigned = self._variant.dtype == "uint8"
        numbers = self._team.integers((count,), entry, peer, low=0 if is_unsigned else -3, high=5)
        return numbers * self._team.world if self._variant.reduction == "avg" else numbers

    def _reduce(self, parts: Tensor) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        match self._variant.reduction:
            case "max":
                return parts.amax(0)
            case "min":
                return parts.amin(0)
            case "avg" if self._kernel is not None:
                return parts.sum(0) / len(parts)
        return parts.sum(0)

    def call(self, entry: int) -> Sequence[Check]:
        self._memories[entry].copy_(self._templates[entry])
        if self._kernel is not None:
            self._kernel(*self._inputs[entry])
        else:
            self._run_on_host(*self._inputs[entry])
        return self._checks[entry]

    def _run_on_host(self, input: Tensor, output: Tensor | None) -> None:
        from stretto.collectives.executor.host import run_on_host

        reduction = "sum" if self._variant.reduction == "avg" else self._variant.reduction
        run_on_host(self._schedule, input, output, self._team.group, reduction=reduction)

    def poison(self) -> None:
        """Poison the protocols' data buffers; not the flags before them, nor the heads of copy engines' memory."""
        if self._kernel is None:
            return
        from stretto.collectives.executor.cuda.copy_engine.planner import HEAD

        workspace = self._kernel.workspace
        memory = workspace.memory.buffer()
        for half in range(2):
            for region in workspace.regions.values():
                start = half * workspace.half + region.start
                memory[start : start + region.size].fill_(POISON_BYTE)
        if self._variant.executor == "copy":
            workspace.copy_area()
            workspace._copy_memory.buffer()[HEAD:_COPY_POISONED].fill_(POISON_BYTE)

    def check(self) -> None:
        if self._kernel is not None:
            self._kernel.workspace.check()


@dataclass(frozen=True)
class _BlockCounts:
    """The numbers of blocks of input and output, and of the chunks of a block."""

    inputs: int
    outputs: int
    chunks: int

    @classmethod
    def find(cls, collective: Collective) -> "_BlockCounts":
        from stretto.collectives.executor.layout import find_layout

        chunks = find_layout(collective, 0, None).block_chunks
        return cls(collective.input_chunks // chunks, collective.output_chunks // chunks, chunks)


def _make_kernel(variant: CollectiveVariant, schedule: Schedule, team: Team) -> Any:
    """Make a variant's kernel. All kernels of a group share one workspace."""
    from stretto.collectives.executor.cuda.copy_engine.executor import CopyEngineExecutor
    from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
    from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
    from stretto.collectives.executor.cuda.variant import Variant
    from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace

    workspace = team.keep("collectives", lambda: CollectiveWorkspace(team.group, regions=REGIONS))
    kernel_variant = Variant(variant.dtype, variant.reduction, variant.protocol, variant.unroll)
    match variant.executor:
        case "fused":
            return FusedScheduleKernel(schedule, workspace, kernel_variant, in_place=variant.in_place)
        case "interpreted":
            return InterpretedSchedule(
                schedule, workspace, kernel_variant, in_place=variant.in_place, tile_bytes=4096, threads=128
            )
    return CopyEngineExecutor(schedule, workspace, kernel_variant, in_place=variant.in_place)


def _find_sizes(algorithm: str, ranks: int) -> dict[str, Any]:
    """The sizes to compile an algorithm for: `ranks` ranks, in as square a rectangle of nodes as possible."""
    if "nodes" not in ALGORITHMS[algorithm].parameters:
        return {"ranks": ranks}
    nodes = max(nodes for nodes in range(1, ranks + 1) if ranks % nodes == 0 and nodes * nodes <= ranks)
    return {"nodes": nodes, "gpus": ranks // nodes}


def _suits(algorithm: str, ranks: int) -> bool:
    return ranks == 8 or algorithm != "dgx1-all-gather"


def list_configurations() -> list[Configuration]:
    forms: list[tuple[str, str, str]] = []
    for index, algorithm in enumerate(ALGORITHMS):
        forms += [(algorithm, "fused", protocol) for protocol in PROTOCOLS]
        forms.append((algorithm, "interpreted", PROTOCOLS[index % len(PROTOCOLS)]))
    forms += [("two-shot-all-reduce", "interpreted", protocol) for protocol in PROTOCOLS]
    forms += [(algorithm, "copy", "Copy") for algorithm in BY_COPIES]
    configurations = [_configure(number, *variant) for number, variant in enumerate(dict.fromkeys(forms))]
    # Accesses at the ends of tensors depend on the dtype, and the number of values in a thread on the unroll.
    every_dtype = itertools.product(PROTOCOLS, DTYPES)
    configurations += [_configure_dtype(number, *form) for number, form in enumerate(every_dtype)]
    return configurations + [_configure_large(algorithm) for algorithm in BY_COPIES]


def _configure(number: int, algorithm: str, executor: str, protocol: str) -> Configuration:
    """The number-th configuration: dtype, reduction and so on change from one to the next."""
    variant = CollectiveVariant(
        algorithm,
        executor,
        protocol,
        DTYPES[number % len(DTYPES)],
        REDUCTIONS[number % len(REDUCTIONS)],
        UNROLLS[number % len(UNROLLS)],
        number % 2 == 0 and algorithm != "all-to-next",
        1 + number % 4 // 2,
    )
    return _describe(f"{executor}/{algorithm}/{protocol}", variant)


def _configure_dtype(number: int, protocol: str, dtype: str) -> Configuration:
    """A ring all-reduce of a dtype, with the most vectors a thread."""
    reduction, in_place = REDUCTIONS[number % len(REDUCTIONS)], number % 2 == 0
    variant = CollectiveVariant(
        "ring-all-reduce", "fused", protocol, dtype, reduction, max(UNROLLS), in_place, 1 + number % 4 // 2
    )
    return _describe(f"fused/ring-all-reduce/{protocol}/{dtype}", variant)


def _configure_large(algorithm: str) -> Configuration:
    """Copy engines with large tensors: their kernels fill half of the multiprocessors while copies are in flight."""
    variant = CollectiveVariant(algorithm, "copy", "Copy", "bfloat16", "sum", 4, False, 1, is_large=True)
    return _describe(f"copy/{algorithm}/Copy/large", variant)


def _describe(name: str, variant: CollectiveVariant) -> Configuration:
    if variant.reduction == "avg" and not getattr(torch, variant.dtype).is_floating_point:
        variant = replace(variant, reduction="sum")
    executor, algorithm = variant.executor, variant.algorithm
    kernels = {"fused": (FUSED_KERNEL,), "interpreted": (INTERPRETER_KERNEL,)}.get(executor, COPY_KERNELS)
    if executor == "copy" and "reduce" in algorithm:
        kernels = (*kernels, "collectives.executor.cuda.fused.codegen:run/2")
    place = "in place" if variant.in_place else "out of place"
    return Configuration(
        name,
        FAMILY,
        kernels,
        f"{variant.instances}x, {variant.dtype}, {variant.reduction}, {place}",
        partial(CollectiveCase, variant),
        crosses_nodes=executor == "interpreted",
        suits=partial(_suits, algorithm),
    )
