# SPDX-License-Identifier: Apache-2.0
"""The choice of each call's configuration, which a group's ranks make alike.

`find_config` finds the configuration of a call: that of an equal earlier call, else the caller's, the fastest measured,
or a default. All ranks of a group make the same choice: their calls are equal, and everything else on which choices
depend (measured times, whether GPUs can access each other's memory) is exchanged once, at the group's first call.
"""

import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.cluster.local_ranks import name_node, require_declared
from stretto.collectives.joint.schedule import require_operator
from stretto.memory import failures, is_debugging
from stretto.memory.gpus import count_processors, find_capability, find_numa_domain, find_obstacle
from stretto.memory.plain_data import all_gather_data
from stretto.ops import confirmation
from stretto.ops.config import (
    IMPLEMENTATIONS,
    LIBRARY,
    GemmProblem,
    KernelConfig,
    Machine,
    decode,
    default_blocks,
    default_config,
    default_kernel,
    find_refusal,
)
from stretto.ops.gemm import takes_tma
from stretto.ops.joint.registry import CANDIDATES, find_schedule, is_runnable, list_rings, name_between_nodes
from stretto.ops.operands import FP8
from stretto.ops.operator import find_group, require_agreement, require_no_capture
from stretto.ops.prediction import Speeds, find_speeds
from stretto.quantities import read_switch
from stretto.tiles import INTERPRETED
from stretto.tuning import Autotuner, TimeKeys, TuningStore, machine_key

logger = logging.getLogger("stretto.ops")

COPIES_VARIABLE = "STRETTO_SIGNAL_BY_COPIES"
"""The environment variable that, where it is 1, has operators do as on GPUs without atomic operations on each other's
memory, for tests: see `GroupChoices.signals_by_copies`."""

_NEAR = 1.5  # a measurement counts for up to so many times as many rows, or as few
_MAX_CHOICES = 4096
_WAY = "way of "


@dataclass
class GroupChoices:
    """Agreed timings, cached configurations and call counts of a group.

    obstacle: why no kernel can run, or "". schedule_obstacle: why none can that moves rows by a schedule, either: copy
    engines need no atomic operations between GPUs for that, and puts cross nodes. order: the ranks, those of a NUMA
    domain together, as a ring should visit them. nodes: the number of each rank's node; empty if there is one.
    times: seconds by problem and encoded configuration. choices: a configuration and the reason for it. recalled:
    configurations of calls that were checked before. speeds: of the slowest GPU. confirmed: times that were measured in
    calls. ways: of calls without a configuration, by their names.
    """

    group: "weakref.ref[dist.ProcessGroup]"
    obstacle: str = ""
    schedule_obstacle: str = ""
    order: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choices: dict[tuple[GemmProblem, Machine, str], tuple[KernelConfig, str]] = field(default_factory=dict)
    recalled: dict[tuple[object, ...], KernelConfig] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    speeds: Speeds | None = None
    confirmed: dict[str, dict[str, float]] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)

    @property
    def signals_by_copies(self) -> bool:
        """True if the GPUs reach each other's memory, but have no native atomic operations there, as over PCIe.

        Calls by a schedule run there, whose rows copy engines move.
        """
        return bool(self.obstacle) and not self.schedule_obstacle and not self.nodes

    @property
    def copies_obstacle(self) -> str:
        """Say why copy engines cannot move rows by a schedule; "" if they can."""
        return self.obstacle if self.nodes else self.schedule_obstacle

    @property
    def routed_obstacle(self) -> str:
        """Say why there is no routed schedule, whose rows are stored, or put to other nodes; "" if there can be."""
        ranks = Counter(self.nodes).values()
        if len(set(ranks)) > 1:
            return f"its nodes have {', '.join(map(str, ranks))} ranks, and tokens go to alike nodes"
        return self.schedule_obstacle if self.nodes else self.obstacle

    def can_run(self, config: KernelConfig) -> bool:
        """True if nothing about the group's GPUs is in a kernel's way."""
        transfer = "programs" if self.nodes else "copies"
        by_schedule = not self.schedule_obstacle and config.schedule != "" and config.transfer == transfer
        return not self.obstacle or by_schedule


_groups: dict[str, GroupChoices] = {}


def counts(group: dist.ProcessGroup | None = None) -> Mapping[tuple[str, str], int]:
    """Count this rank's calls in a group (None: all ranks) by (operator, "kernel" or "library")."""
    world = dist.group.WORLD if group is None else group
    known = _groups.get("" if world is None else world.group_name)
    return dict(known.counts) if known is not None and known.group() is world else {}


def find_config(
    operator: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    implementation: str,
    *options: object,
    check: Callable[[], object],
    run: Callable[[KernelConfig], object],
    returns_gathered: bool = False,
) -> KernelConfig:
    """The configuration of a call: that of an equal earlier one, else the choice for it, after `check`.

    Counts the call. Calls are equal in all that their checks and choices depend on. options: others that all ranks give
    alike. check: raises a ValueError for arguments that the operator does not take. run: computes the call, to time it.
    """
    of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.is_contiguous())
    of_x = x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
    of_weight = weight.shape, weight.stride(), weight.dtype, weight.device, weight.data_ptr() % 16
    key = (
        operator,
        of_x,
        of_weight,
        of_bias,
        torch.cuda.current_device() if x.is_cuda else None,
        implementation,
        options,
        returns_gathered,
    )
    known = _groups.get(group)
    if known is not None and known.group() is find_group(group) and not is_debugging():
        config = known.recalled.get(key)
        if config is not None:
            known.counts[operator, config.implementation] += 1
            return config
    check()
    m = x.shape[0] * (find_group(group).size() if operator == "all_gather_matmul" else 1)
    problem = describe_problem(operator, m, x, weight, group, returns_gathered=returns_gathered)
    config = choose_config(problem, x, weight, group, implementation, *options, has_bias=bias is not None, run=run)
    recalled = _groups[group].recalled
    if len(recalled) == _MAX_CHOICES:
        recalled.clear()
    recalled[key] = config
    return config


def choose_config(
    problem: GemmProblem,
    x: Tensor,
    weight: Tensor | None,
    group: str,
    implementation: str,
    *options: object,
    has_bias: bool = False,
    run: Callable[[KernelConfig], object] | None = None,
) -> KernelConfig:
    """Choose the configuration of a call: the caller's, else the fastest measured, else a default. Counts the call.

    weight: None if TMA takes all operands of the problem's sizes. implementation: "auto", "kernel", "library" or an
    encoded configuration. run: computes the call; given, the default is confirmed by timing it and the library, unless
    something was measured. Logs each new choice at debug level. ValueError for another implementation, where a kernel
    was asked for and none can run, and where ranks call different things. Collective at the group's first call, and at
    the first of its kind.
    """
    known = find_agreed(group, x.device)
    description = f"{problem.name}{' with a bias' if has_bias else ''} {(implementation, *options)}"
    machine = find_machine(x, weight, known.speeds)
    # Of gathered rows, products and the kernels' workspaces, which are rounded up to powers of two, twice.
    size = 6 * problem.m * max(problem.top_k, 1) * (problem.n + problem.k) * max(problem.dtype.itemsize, 2)

    def can_measure() -> bool:
        return run is not None and confirmation.can_time_calls(x.device, size)

    agreed = require_agreement(description, machine.by_tma, group, x.device, can_measure=can_measure)
    machine = machine._replace(by_tma=agreed.by_tma)
    asked = problem, machine, implementation
    if asked not in known.choices:
        if len(known.choices) == _MAX_CHOICES:
            known.choices.clear()
        if run is not None and agreed.is_measured and implementation == "auto":
            _confirm(known, problem, machine, run, x.device)
        known.choices[asked] = config, why = _choose(known, *asked)
        logger.debug("group %s: %s runs as %s: %s", group, problem.name, config.encode(), why)
    config, _ = known.choices[asked]
    known.counts[problem.operator, config.implementation] += 1
    return config


def find_way(name: str, ways: Sequence[str], choose: Callable[[], str], group: str, device: torch.device) -> str:
    """The way of a call that has no configuration: an equal earlier call's, the checkpoint's, or what `choose` returns.

    Collective at the group's first call.
    """
    known, key = find_agreed(group, device), _WAY + name
    if key not in known.ways:
        restored = _restored.get(_name_ranks(find_group(group)))
        kept = restored.choices.get(key) if restored else None
        known.ways[key] = kept if kept is not None and kept in ways else choose()
    return known.ways[key]


def _confirm(
    known: GroupChoices,
    problem: GemmProblem,
    machine: Machine,
    run: Callable[[KernelConfig], object],
    device: torch.device,
) -> None:
    """Time the default kernel and the library, unless times or a checkpoint decide, and keep the times. Collective."""
    is_decided = 0 in (problem.m, problem.n, problem.k) or known.obstacle or find_refusal(problem, machine)
    if is_decided or _find_restored(known, problem, machine, "auto") or _find_fastest(known, problem):
        return
    kernel, group = default_kernel(problem, machine), known.group()
    assert group is not None
    runs = [partial(run, config) for config in (kernel, LIBRARY)]
    seconds = confirmation.measure_choices(runs, group.group_name, device)
    if seconds is None:
        logger.warning("%s is not confirmed: some rank could not time it, and runs as predicted", problem.name)
        return
    known.confirmed[problem.name] = dict(zip((kernel.encode(), LIBRARY.encode()), seconds, strict=True))
    if dist.get_rank(group) == 0:
        autotuner(device).keep(problem.name, dict(zip((kernel, LIBRARY), seconds, strict=True)))


def describe_problem(
    operator: str, m: int, x: Tensor, weight: Tensor, group: str, *, returns_gathered: bool = False
) -> GemmProblem:
    """The problem that a call computes; m: rows of the whole."""
    (n, k), transposed, world = weight.shape, not weight.is_contiguous(), find_group(group).size()
    # Gradients in e5m2 are multiplied as fast as e4m3.
    dtype = FP8 if x.dtype == torch.float8_e5m2 else x.dtype
    return GemmProblem(operator, m, n, k, dtype, transposed, world, returns_gathered)


def find_machine(x: Tensor, weight: Tensor | None, speeds: Speeds | None = None) -> Machine:
    """The machine, as far as the defaults for these operands depend on it. speeds: on which the group has agreed."""
    by_tma = weight is None or (takes_tma(x) and takes_tma(weight if weight.is_contiguous() else weight.t()))
    device = x.device
    if device.type == "cpu":
        return Machine(0, by_tma, False)
    return Machine(count_processors(device.index), by_tma, find_capability(device.index) == (9, 0), speeds)


def _choose(
    known: GroupChoices, problem: GemmProblem, machine: Machine, implementation: str
) -> tuple[KernelConfig, str]:
    config = None if implementation in IMPLEMENTATIONS else decode(implementation)
    if 0 in (problem.m, problem.n, problem.k):
        return LIBRARY, "there is nothing to multiply"
    if config is not None:
        if config.schedule:
            _require_schedule(problem, config.schedule)
            if known.signals_by_copies:
                config = config._replace(transfer="copies")
            elif known.nodes:
                config = config._replace(transfer="programs")
        if config.implementation == "kernel":
            _require_kernel(known, problem, by_schedule=config.schedule != "")
        # The host does not know the slot that programs gather into.
        if problem.returns_gathered and not config.schedule:
            config = config._replace(transfer="copies", direction="push")
        if config.blocks is None and config != LIBRARY:
            config = config._replace(blocks=default_blocks(problem, machine))
        return config, "it was asked for"
    if implementation == "library":
        return LIBRARY, "it was asked for"
    if restored := _find_restored(known, problem, machine, implementation):
        return restored, "the checkpoint says so"
    measured = _find_fastest(known, problem, needs_kernel=implementation == "kernel")
    if implementation == "kernel":
        by_schedule = bool(known.obstacle) and problem.operator in CANDIDATES and problem.dtype != FP8
        _require_kernel(known, problem, by_schedule=by_schedule)
        if measured is not None:
            return measured
        if by_schedule:
            blocks = default_blocks(problem, machine)
            if known.nodes:
                schedule = name_between_nodes(problem.operator, known.nodes)
                by_puts = KernelConfig(blocks=blocks, transfer="programs", schedule=schedule)
                return by_puts, "a kernel was asked for, and it puts to other nodes"
            (ring, *_) = list_rings(problem.operator, known.order)
            return KernelConfig(blocks=blocks, schedule=ring), "a kernel was asked for, and copy engines make its moves"
        return default_kernel(problem, machine), "a kernel was asked for"
    if known.obstacle:
        return measured or (LIBRARY, known.obstacle)
    return measured or default_config(problem, machine)


def _require_schedule(problem: GemmProblem, schedule: str) -> None:
    if problem.dtype == FP8:
        raise ValueError(f"{problem.operator} of fp8 takes no schedule: leave {schedule!r} out of the configuration")
    require_operator(problem.operator)
    find_schedule(problem.operator, schedule, problem.world)


def _require_kernel(known: GroupChoices, problem: GemmProblem, *, by_schedule: bool = False) -> None:
    """ValueError where no kernel can run. by_schedule: it moves rows by a schedule."""
    obstacle = known.schedule_obstacle if by_schedule else known.obstacle
    if obstacle:
        schedule = ", as can a schedule" if not known.schedule_obstacle and problem.operator in CANDIDATES else ""
        raise ValueError(f'{problem.operator}: no kernel can run: {obstacle}; implementation="library" can{schedule}')


def _find_fastest(
    known: GroupChoices, problem: GemmProblem, *, needs_kernel: bool = False
) -> tuple[KernelConfig, str] | None:
    """The fastest configuration measured at the nearest number of rows, if that is near enough."""
    rows = _measured_rows(known, problem)
    if not rows:
        return None
    nearest = min(rows, key=lambda m: abs(math.log(m / problem.m)))
    name = problem._replace(m=nearest).name
    times = known.confirmed.get(name) or known.times[name]
    configs = ((decode(text), seconds) for text, seconds in times.items())
    timed = [
        (seconds, config)
        for config, seconds in configs
        if not (needs_kernel and config == LIBRARY)
        and (config == LIBRARY or known.can_run(config))
        and (not config.schedule or is_runnable(problem.operator, config.schedule, problem.world))
    ]
    if not timed or not 1 / _NEAR <= nearest / problem.m <= _NEAR:
        return None
    seconds, config = min(timed, key=lambda pair: pair[0])
    return config, f"it was the fastest at m={nearest}, {seconds * 1e6:.1f} us"


def _measured_rows(known: GroupChoices, problem: GemmProblem) -> list[int]:
    """The values of m at which the problem was measured."""
    before, after = problem._replace(m=0).name.split("m=0")
    found = []
    for name in {*known.times, *known.confirmed}:
        if name.startswith(f"{before}m=") and name.endswith(after):
            digits = name[len(before) + 2 : len(name) - len(after)]
            if digits.isdecimal() and int(digits) > 0:
                found.append(int(digits))
    return found


def find_agreed(name: str, device: torch.device) -> GroupChoices:
    """Return what a group's ranks have agreed on. Collective at the group's first call."""
    group = find_group(name)
    known = _groups.get(name)
    if known is None or known.group() is not group:
        require_no_capture(device)
        failures.check()  # before this rank waits for ranks that may never come
        for gone in [other for other, old in _groups.items() if old.group() is None]:
            del _groups[gone]
        known = _groups[name] = _agree(group, device)
        if known.obstacle:
            logger.warning("group %s: operators run by the library, unfused: %s", name, known.obstacle)
    return known


def _agree(group: dist.ProcessGroup, device: torch.device) -> GroupChoices:
    """Exchange what choices depend on: rank 0's times, the GPUs' speeds, whether kernels can run. Collective."""
    read = autotuner(device).read() if dist.get_rank(group) == 0 else {}
    times = {
        problem: {config.encode(): second for config, second in seconds.items()} for problem, seconds in read.items()
    }
    speeds = find_speeds(device) if device.type == "cuda" else None
    switch, domain = os.environ.get(COPIES_VARIABLE, ""), find_numa_domain(device)
    sent = name_node(dist.get_rank(), dist.get_world_size()), times, speeds, switch, domain
    everyone = all_gather_data(sent, group, tuple[str, dict[str, dict[str, float]], Speeds | None, str, int])
    require_declared([node for node, *_ in everyone])
    switches = [read_switch(COPIES_VARIABLE, text=text) for *_, text, _ in everyone]  # once all ranks can raise
    numbers = {name: number for number, name in enumerate(dict.fromkeys(node for node, *_ in everyone))}
    nodes = tuple(numbers[node] for node, *_ in everyone) if len(numbers) > 1 else ()
    found = [one for _, _, one, *_ in everyone if one is not None]
    order = sorted(range(len(everyone)), key=lambda rank: (everyone[rank][-1], rank))
    obstacle = ""
    if device.type == "cpu" and not INTERPRETED.value:
        obstacle = "on CPUs kernels are interpreted, which takes TRITON_INTERPRET=1 before anything imports triton"
    elif device.type == "cuda":
        obstacle = find_obstacle(group, device, puts_between_nodes=True) or ""
    schedule_obstacle = obstacle
    if nodes:
        obstacle = f"its ranks are on {len(numbers)} nodes, and kernels reach the memory of one"
    elif obstacle and device.type == "cuda":
        schedule_obstacle = find_obstacle(group, device, needs_atomics=False) or ""
    if not obstacle and any(switches):
        obstacle = f"{COPIES_VARIABLE}=1 says that its GPUs have no atomic operations on each other's memory"
    slowest = Speeds(*map(min, zip(*found, strict=True))) if len(found) == len(everyone) else None
    restored = _restored.get(_name_ranks(group))
    confirmed = dict(restored.confirmed) if restored else {}
    known = GroupChoices(
        weakref.ref(group), obstacle, schedule_obstacle, tuple(order), nodes, everyone[0][1], speeds=slowest,
        confirmed=confirmed,
    )  # fmt: skip
    if known.signals_by_copies:  # a stored time may be of one
        for operator in CANDIDATES:
            list_rings(operator, known.order)
    return known


def autotuner(device: torch.device, store: TuningStore | None = None) -> Autotuner[str, KernelConfig]:
    """The measured times of configurations on this machine, by the problem's name."""
    return Autotuner(machine_key(device), TimeKeys(name_time, _parse_time_key), store)


def name_time(problem: str, config: KernelConfig) -> str:
    """The key in the tuning store of the seconds that a configuration takes for a problem of this name."""
    return f"ops {problem} by {config.encode()}"


def _parse_time_key(key: str) -> tuple[str, KernelConfig]:
    """The problem's name and the configuration; ValueError for a key that this version cannot read."""
    kind, _, rest = key.partition(" ")
    if kind != "ops":
        raise ValueError(f"{key!r} names no times of an operator")
    problem, _, text = rest.partition(" by ")
    return problem, decode(text)


class SavedChoices(NamedTuple):
    """A group's choices as plain data, for a checkpoint.

    choices: encoded configurations by call. confirmed: seconds that were measured in calls, by problem and
    configuration.
    """

    choices: dict[str, str]
    confirmed: dict[str, dict[str, float]]


_restored: dict[str, SavedChoices] = {}  # by the group's ranks


def list_choices() -> dict[str, SavedChoices]:
    """The choices of the groups whose first rank this is, by the group's ranks: those that nobody asked for."""
    first = str(dist.get_rank())
    found = {ranks: one for ranks, one in _restored.items() if ranks.split(",")[0] == first}
    for known in _groups.values():
        group = known.group()
        if group is None or dist.get_rank(group) != 0:
            continue
        ranks = _name_ranks(group)
        earlier = found.get(ranks, SavedChoices({}, {}))
        choices = {
            _name_choice(problem, machine, implementation): config.encode()
            for (problem, machine, implementation), (config, _) in known.choices.items()
            if implementation in ("auto", "kernel")
        } | known.ways
        if choices:
            found[ranks] = SavedChoices(earlier.choices | choices, earlier.confirmed | known.confirmed)
    return found


def restore_choices(choices: Mapping[str, SavedChoices]) -> None:
    """Have later calls make the choices that `list_choices` gave on all ranks. ValueError for other configurations.

    All ranks call it with the same. Groups agree again at their next call.
    """
    for one in choices.values():
        configs = [text for name, text in one.choices.items() if not name.startswith(_WAY)]
        for text in (*configs, *(text for times in one.confirmed.values() for text in times)):
            decode(text)
    _restored.clear()
    _restored.update(choices)
    clear_choices()


def _find_restored(
    known: GroupChoices, problem: GemmProblem, machine: Machine, implementation: str
) -> KernelConfig | None:
    """The checkpoint's choice, where it can run."""
    if not _restored:
        return None
    group = known.group()
    assert group is not None
    of_group = _restored.get(_name_ranks(group))
    text = None if of_group is None else of_group.choices.get(_name_choice(problem, machine, implementation))
    if text is None or (known.obstacle and decode(text) != LIBRARY):
        return None
    return decode(text)


def _name_choice(problem: GemmProblem, machine: Machine, implementation: str) -> str:
    return f"{problem.name}{' by TMA' * machine.by_tma} {implementation}"


def _name_ranks(group: dist.ProcessGroup) -> str:
    return ",".join(map(str, dist.get_process_group_ranks(group)))


def clear_choices() -> None:
    """Make every group agree again at its next call, which is then collective: new times have been measured."""
    _groups.clear()
