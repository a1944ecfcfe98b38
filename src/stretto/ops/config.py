# SPDX-License-Identifier: Apache-2.0
"""The configuration of a call: what there is to choose, the choice for each call, and defaults.

`KernelConfig` holds every choice that can be made for a call, each independent of the others (TileLink, section 3.1):
tile sizes, and how rows and partial sums are transferred. `encode` and `decode` turn it into text and back, for
operators' schemas and for tuning files.

`find_config` finds the configuration of a call: that of an equal earlier call, else the caller's, the fastest measured,
or a default. All ranks of a group make the same choice: their calls are equal, and everything else on
which choices depend (measured times, whether GPUs can access each other's memory) is exchanged once, at the group's
first call. The tables of defaults at the end are meant to be edited after measuring.
"""

import json
import logging
import math
import os
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from stretto.memory import failures, is_debugging, shared_gpus
from stretto.memory.gpus import bound_blocks, count_processors, find_capability, find_obstacle
from stretto.memory.plain_data import all_gather_data
from stretto.ops import confirmation
from stretto.ops.gemm import Blocks, count_waves, divide_up, has_power_of_two_columns, takes_tma
from stretto.ops.operator import find_group, require_agreement, require_no_capture
from stretto.ops.prediction import (
    FEW_ROWS,
    NEVER_SLOWER,
    GemmCall,
    Speeds,
    find_speeds,
    predict_kernel,
    predict_library,
)
from stretto.tiles import INTERPRETED
from stretto.tuning import Autotuner, TimeKeys, TuningStore, machine_key

logger = logging.getLogger("stretto.ops")

IMPLEMENTATIONS = ("auto", "kernel", "library")
TRANSFERS = ("copies", "programs")
DIRECTIONS = ("push", "pull")
EXCHANGES = ("tiles", "packets")

CONFIRM_VARIABLE = "STRETTO_CONFIRM"
"""The environment variable that switches timing of first calls on, where it is 1."""

_NEAR = 1.5  # a measurement counts for up to so many times as many rows, or as few
_MAX_CHOICES = 4096


class GemmProblem(NamedTuple):
    """A call as far as a configuration's speed depends on it. m: rows of all ranks; n, k: of a rank's weight.

    returns_gathered: an all-gather's gathered rows are returned, too, for which copy engines must bring them.
    """

    operator: str
    m: int
    n: int
    k: int
    dtype: torch.dtype
    transposed: bool
    world: int
    returns_gathered: bool = False

    @property
    def name(self) -> str:
        """The problem as text, for tables, logs and the keys of the tuning store."""
        order = " transposed" if self.transposed else ""
        dtype = str(self.dtype).removeprefix("torch.")
        gathered = "_gathered" if self.returns_gathered else ""
        return f"{self.operator}{gathered} m={self.m} n={self.n} k={self.k}{order} {dtype} {self.world} ranks"


class Machine(NamedTuple):
    """A machine as far as defaults depend on it.

    processors: multiprocessors; 0: kernels are interpreted. by_tma: whether TMA takes the operands. speeds: the slowest
    of the group's, on GPUs.
    """

    processors: int
    by_tma: bool
    is_hopper: bool
    speeds: Speeds | None = None


class KernelConfig(NamedTuple):
    """The kernel configuration of a call; an operator ignores the fields that do not apply to it.

    implementation: "kernel" or "library" (which ignores all other fields). blocks: the GEMM's tiles, whose columns are
    a multiple of 16; kernels that exchange tiles, or whose rows copy engines move, round them down to a power of two.
    transfer: how gathered rows are transferred: by copy engines ("copies"), or by the first `movers` programs of the
    kernel before they multiply ("programs"), which push or pull them (direction); and how tiles of partial sums are
    transferred: by copy engines, or by the program that has computed them. piece_bytes: bytes transferred per signal.
    exchange: partial sums are sent as "tiles", or, for few rows, as "packets". shots: of an all-reduce: 1, all ranks
    send to all ranks; 2, an owner reduces and broadcasts. is_shifted: each rank begins with another rank's tiles (Flux,
    section 4.1); if not, all begin with rank 0's. Tuning files contain these names: renaming a field makes earlier
    measurements unreadable.
    """

    implementation: str = "kernel"
    blocks: Blocks | None = None
    transfer: str = "copies"
    direction: str = "push"
    movers: int = 16
    piece_bytes: int = 8 << 20
    exchange: str = "tiles"
    shots: int = 1
    is_shifted: bool = True

    def with_power_of_two_tiles(self) -> "KernelConfig":
        """The configuration for kernels whose tiles have a power of two of columns: rounded down to one."""
        if self.blocks is None or has_power_of_two_columns(self.blocks):
            return self
        return self._replace(blocks=self.blocks._replace(n=1 << (self.blocks.n.bit_length() - 1)))

    def encode(self) -> str:
        """The configuration as text, which `decode` reads: for operators' schemas and the tuning store."""
        return _encode(self)


LIBRARY = KernelConfig(implementation="library")


def encode_implementation(implementation: str | KernelConfig) -> str:
    """The user's `implementation` as an operator's schema takes it. ValueError for anything else."""
    if isinstance(implementation, KernelConfig):
        return _encode_constant(implementation)
    if isinstance(implementation, str) and (implementation in IMPLEMENTATIONS or implementation.startswith("{")):
        return implementation  # the latter is an encoded configuration, which `decode` reads
    raise ValueError(f'implementation is "auto", "kernel", "library" or a KernelConfig, not {implementation!r}')


@lru_cache(maxsize=4096)
def _encode(config: KernelConfig) -> str:
    if config == LIBRARY:
        return "library"
    return json.dumps(dict(config._asdict(), blocks=None if config.blocks is None else list(config.blocks)))


@torch.compiler.assume_constant_result  # torch.compile does not trace into json
def _encode_constant(config: KernelConfig) -> str:
    return _encode(config)


@lru_cache(maxsize=4096)
def decode(text: str) -> KernelConfig:
    """The configuration that `KernelConfig.encode` wrote as this text. ValueError for other text."""
    if text == "library":
        return LIBRARY
    try:
        fields = json.loads(text)
        if fields["blocks"] is not None:
            fields["blocks"] = Blocks(*fields["blocks"])
        config = KernelConfig(**fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} is no configuration of a kernel: {error}") from error
    require_config(config)
    return config


def require_config(config: KernelConfig) -> None:
    """ValueError for a configuration whose fields have unknown or impossible values."""
    options = (
        ("implementation", config.implementation, IMPLEMENTATIONS[1:]),
        ("transfer", config.transfer, TRANSFERS),
        ("direction", config.direction, DIRECTIONS),
        ("exchange", config.exchange, EXCHANGES),
        ("shots", config.shots, (1, 2)),
        ("is_shifted", config.is_shifted, (False, True)),
    )
    for what, given, known in options:
        if given not in known:
            raise ValueError(f"a configuration's {what} is one of {', '.join(map(str, known))}, not {given!r}")
    if config.transfer == "copies" and config.direction == "pull":
        raise ValueError('copy engines push: "pull" goes with transfer="programs"')
    for what, number in (("movers", config.movers), ("piece_bytes", config.piece_bytes)):
        if not isinstance(number, int) or not 1 <= number <= 1 << 30:
            raise ValueError(f"a configuration's {what} is a whole number, 1 or more, not {number!r}")
    if config.blocks is not None:
        _require_blocks(config.blocks)


def _require_blocks(blocks: Blocks) -> None:
    for name, value in blocks._asdict().items():
        if not isinstance(value, int) or not 1 <= value <= 4096:
            raise ValueError(f"{name} of blocks is a whole number from 1 to 4096, not {value!r}")
    if blocks.n % 16:
        raise ValueError(f"n of blocks is a multiple of 16, not {blocks.n}")
    for name, value in (("m", blocks.m), ("k", blocks.k), ("num_warps", blocks.num_warps)):
        if value & (value - 1) or value < (1 if name == "num_warps" else 16):
            raise ValueError(f"{name} of blocks is a power of two (tiles: 16 or more), not {value}")


def pin_backward(implementation: str) -> str:
    """The `implementation` of the backward pass's operator: a configuration fits one operator and its shapes alone."""
    if implementation in IMPLEMENTATIONS:
        return implementation
    return decode(implementation).implementation


@dataclass
class _GroupChoices:
    """Agreed timings, cached configurations and call counts of a group.

    obstacle: why no kernel can run, or "". times: seconds by problem and encoded configuration. choices: a
    configuration and the reason for it. recalled: configurations of calls that were checked before. speeds: of the
    slowest GPU. confirmed: times that were measured in calls.
    """

    group: "weakref.ref[dist.ProcessGroup]"
    obstacle: str = ""
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choices: dict[tuple[GemmProblem, Machine, str], tuple[KernelConfig, str]] = field(default_factory=dict)
    recalled: dict[tuple[object, ...], KernelConfig] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    speeds: Speeds | None = None
    confirmed: dict[str, dict[str, float]] = field(default_factory=dict)


_groups: dict[str, _GroupChoices] = {}


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
    weight: Tensor,
    group: str,
    implementation: str,
    *options: object,
    has_bias: bool = False,
    run: Callable[[KernelConfig], object] | None = None,
) -> KernelConfig:
    """Choose the configuration of a call: the caller's, else the fastest measured, else a default. Counts the call.

    implementation: "auto", "kernel", "library" or an encoded configuration. run: computes the call; given, the default
    is confirmed by timing it and the library, unless something was measured. Logs each new choice at debug level.
    ValueError for another implementation, where a kernel was asked for and none can run, and where ranks call different
    things. Collective at the group's first call, and at the first of its kind.
    """
    known = _find(group, x.device)
    description = f"{problem.name}{' with a bias' if has_bias else ''} {(implementation, *options)}"
    machine = find_machine(x, weight, known.speeds)
    can_measure = run is not None and can_time_calls(x.device)
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


def can_time_calls(device: torch.device) -> bool:
    """True if this rank may time calls now: on a GPU of its own, in no CUDA graph's capture, if switched on."""
    if device.type != "cuda" or os.environ.get(CONFIRM_VARIABLE) != "1" or shared_gpus.is_enabled():
        return False
    return not torch.cuda.is_current_stream_capturing()


def _confirm(
    known: _GroupChoices,
    problem: GemmProblem,
    machine: Machine,
    run: Callable[[KernelConfig], object],
    device: torch.device,
) -> None:
    """Time the default kernel and the library, unless times or a checkpoint decide, and keep the times. Collective."""
    is_decided = 0 in (problem.m, problem.n, problem.k) or known.obstacle or find_refusal(problem, machine)
    if is_decided or _find_restored(known, problem, machine, "auto") or _find_fastest(known, problem):
        return
    kernel = find_fastest_kernel(problem, machine)[0] if machine.processors else default_config(problem, machine)[0]
    group = known.group()
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
    return GemmProblem(operator, m, n, k, x.dtype, transposed, world, returns_gathered)


def find_machine(x: Tensor, weight: Tensor, speeds: Speeds | None = None) -> Machine:
    """The machine, as far as the defaults for these operands depend on it. speeds: on which the group has agreed."""
    by_tma = takes_tma(x) and takes_tma(weight if weight.is_contiguous() else weight.t())
    device = x.device
    if device.type == "cpu":
        return Machine(0, by_tma, False)
    return Machine(count_processors(device.index), by_tma, find_capability(device.index) == (9, 0), speeds)


def group_speeds(group: str, device: torch.device) -> Speeds | None:
    """The slowest of the group's GPUs; None on CPUs. Collective at the group's first call."""
    return _find(group, device).speeds


def _choose(
    known: _GroupChoices, problem: GemmProblem, machine: Machine, implementation: str
) -> tuple[KernelConfig, str]:
    config = None if implementation in IMPLEMENTATIONS else decode(implementation)
    if 0 in (problem.m, problem.n, problem.k):
        return LIBRARY, "there is nothing to multiply"
    if config is not None:
        if config.implementation == "kernel":
            _require_kernel(known, problem)
        if problem.returns_gathered:  # the host does not know the slot that programs gather into
            config = config._replace(transfer="copies", direction="push")
        if config.blocks is None and config != LIBRARY:
            config = config._replace(blocks=default_blocks(problem, machine, config.transfer))
        return config, "it was asked for"
    if implementation == "library":
        return LIBRARY, "it was asked for"
    if restored := _find_restored(known, problem, machine, implementation):
        return restored, "the checkpoint says so"
    measured = _find_fastest(known, problem, needs_kernel=implementation == "kernel")
    if implementation == "kernel":
        _require_kernel(known, problem)
        if measured is not None:
            return measured
        if not machine.processors:
            return default_config(problem, machine)[0], "a kernel was asked for"
        return find_fastest_kernel(problem, machine)[0], "a kernel was asked for"
    if known.obstacle:
        return LIBRARY, known.obstacle
    return measured or default_config(problem, machine)


def _require_kernel(known: _GroupChoices, problem: GemmProblem) -> None:
    if known.obstacle:
        raise ValueError(f'{problem.operator}: no kernel can run: {known.obstacle}; implementation="library" can')


def _find_fastest(
    known: _GroupChoices, problem: GemmProblem, *, needs_kernel: bool = False
) -> tuple[KernelConfig, str] | None:
    """The fastest configuration measured at the nearest number of rows, if that is near enough."""
    rows = _measured_rows(known, problem)
    if not rows:
        return None
    nearest = min(rows, key=lambda m: abs(math.log(m / problem.m)))
    name = problem._replace(m=nearest).name
    times = known.confirmed.get(name) or known.times[name]
    configs = ((decode(text), seconds) for text, seconds in times.items())
    timed = [(seconds, config) for config, seconds in configs if not (needs_kernel and config == LIBRARY)]
    if not timed or not 1 / _NEAR <= nearest / problem.m <= _NEAR:
        return None
    seconds, config = min(timed, key=lambda pair: pair[0])
    return config, f"it was the fastest at m={nearest}, {seconds * 1e6:.1f} us"


def _measured_rows(known: _GroupChoices, problem: GemmProblem) -> list[int]:
    """The values of m at which the problem was measured."""
    before, after = problem._replace(m=0).name.split("m=0")
    found = []
    for name in {*known.times, *known.confirmed}:
        if name.startswith(f"{before}m=") and name.endswith(after):
            digits = name[len(before) + 2 : len(name) - len(after)]
            if digits.isdecimal() and int(digits) > 0:
                found.append(int(digits))
    return found


def find_group_obstacle(name: str, device: torch.device) -> str:
    """Why the group's ranks can run no kernels together; "" if they can. Collective at the group's first call."""
    return _find(name, device).obstacle


def _find(name: str, device: torch.device) -> _GroupChoices:
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


def _agree(group: dist.ProcessGroup, device: torch.device) -> _GroupChoices:
    """Exchange what choices depend on: rank 0's times, the GPUs' speeds, whether kernels can run. Collective."""
    read = autotuner(device).read() if dist.get_rank(group) == 0 else {}
    times = {
        problem: {config.encode(): second for config, second in seconds.items()} for problem, seconds in read.items()
    }
    speeds = find_speeds(device) if device.type == "cuda" else None
    sent = socket.gethostname(), times, speeds
    everyone = all_gather_data(sent, group, tuple[str, dict[str, dict[str, float]], Speeds | None])
    hosts, found = {host for host, *_ in everyone}, [one for *_, one in everyone if one is not None]
    obstacle = ""
    if len(hosts) > 1:
        obstacle = f"its ranks are on {len(hosts)} machines, and kernels reach the memory of one"
    elif device.type == "cpu" and not INTERPRETED.value:
        obstacle = "on CPUs kernels are interpreted, which takes TRITON_INTERPRET=1 before anything imports triton"
    elif device.type == "cuda":
        obstacle = find_obstacle(group, device) or ""
    slowest = Speeds(*map(min, zip(*found, strict=True))) if len(found) == len(everyone) else None
    restored = _restored.get(_name_ranks(group))
    confirmed = dict(restored.confirmed) if restored else {}
    return _GroupChoices(weakref.ref(group), obstacle, everyone[0][1], speeds=slowest, confirmed=confirmed)


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
        }
        if choices:
            found[ranks] = SavedChoices(earlier.choices | choices, earlier.confirmed | known.confirmed)
    return found


def restore_choices(choices: Mapping[str, SavedChoices]) -> None:
    """Have later calls make the choices that `list_choices` gave on all ranks. ValueError for other configurations.

    All ranks call it with the same. Groups agree again at their next call.
    """
    for one in choices.values():
        for text in (*one.choices.values(), *(text for times in one.confirmed.values() for text in times)):
            decode(text)
    _restored.clear()
    _restored.update(choices)
    clear_choices()


def _find_restored(
    known: _GroupChoices, problem: GemmProblem, machine: Machine, implementation: str
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


MOSTLY_BUSY = 0.7
"""If so large a part of the programs have one tile each, tiles are not split over k: memory bandwidth is the limit, and
a fix-up takes longer than the idle programs cost."""

SCATTER_PIECE_BYTES = 6 << 20
COOL_ROWS = 4096
"""Above, a gather is faster in tiles of 128 columns, by two programs on a multiprocessor: power is the limit."""

MAX_GATHERED_ROWS = 4
"""The most `group_rows` where copy engines bring the rows. fp8 has no such limit, since it reads the L2 cache at twice
the rate."""

NARROW_SPEED = 0.85
"""Speed of tiles of 128 columns relative to 256: they are taken where 256 would leave too many programs idle."""

ONE_SHOT_BYTES = 900_000
"""Bytes that one shot may send more than two shots do, which wait for each other: as many as travel in that time."""

_MIN_STAGES = 3  # of loads in flight, where memory bandwidth is the limit
_PAYING_BYTES = 164 << 10  # of shared memory on a multiprocessor: with more, products of 64 rows take 1% longer
_MAX_BYTES = 200 << 10


def default_config(problem: GemmProblem, machine: Machine) -> tuple[KernelConfig, str]:
    """The configuration where nothing was measured, and the reason for it.

    Kernels on Hopper for types of up to 16 bits that TMA takes: there Triton's GEMM is as fast as the library's; and
    where the machine's speeds say that a kernel is not slower. Interpreted, always kernels.
    """
    if not machine.processors:
        few, blocks = problem.m <= 16, default_blocks(problem, machine)
        transfer = "programs" if few and not problem.returns_gathered else "copies"
        return KernelConfig(blocks=blocks, exchange="packets" if few else "tiles", transfer=transfer), (
            "kernels are interpreted"
        )
    if refusal := find_refusal(problem, machine):
        return LIBRARY, refusal
    if machine.speeds is None:
        return LIBRARY, "the GPU's speeds are not known"
    config, seconds = find_fastest_kernel(problem, machine)
    library = predict_library(_describe_call(problem), machine.speeds)
    why = f"nothing was measured: a kernel should take {seconds * 1e6:.1f} us, the library {library * 1e6:.1f}"
    return (config if NEVER_SLOWER * seconds <= library else LIBRARY), why


def find_refusal(problem: GemmProblem, machine: Machine) -> str:
    """Why no kernel is a default, whatever the machine's speeds are; "" where one may be."""
    if not machine.processors:
        return ""
    if not machine.is_hopper or problem.dtype.itemsize > 2 or not machine.by_tma:
        return "kernels are for operands of up to 16 bits that TMA takes, on sm_90"
    if problem.operator == "matmul_all_reduce" and problem.m > FEW_ROWS:
        return f"it has more than {FEW_ROWS} rows"  # each program would wait for all
    return ""


def find_fastest_kernel(problem: GemmProblem, machine: Machine) -> tuple[KernelConfig, float]:
    """The default kernel that should be the fastest, by the machine's speeds, and its predicted seconds.

    Where the speeds are not known, it is the first one, and the seconds are 0.
    """
    kernels = default_kernels(problem, machine)
    if machine.speeds is None:
        return next(iter(kernels.values())), 0.0
    call, found = _describe_call(problem), []
    for exchange, config in kernels.items():
        assert config.blocks is not None
        found.append(predict_kernel(call, machine.speeds, machine.processors, config.blocks, exchange, config.shots))
    best = found.index(min(found))
    return list(kernels.values())[best], found[best]


def _describe_call(problem: GemmProblem) -> GemmCall:
    return GemmCall(problem.operator, problem.m, problem.n, problem.k, problem.dtype.itemsize, problem.world)


def default_kernels(problem: GemmProblem, machine: Machine) -> dict[str, KernelConfig]:
    """A GPU's kernels that may be a default, by what exchanges rows or sums, as `predict_kernel` takes it."""
    few = problem.m <= FEW_ROWS
    copying = KernelConfig(blocks=default_blocks(problem, machine, "copies"))
    match problem.operator:
        case "matmul_all_reduce":
            if not few:
                return {"tiles": copying}
            sums = problem.m * problem.n * max(2, problem.dtype.itemsize)
            more = (problem.world - 1) * sums - 2 * (problem.world - 1) * sums // problem.world
            return {"packets": copying._replace(exchange="packets", shots=1 if more <= ONE_SHOT_BYTES else 2)}
        case "matmul_reduce_scatter":
            copying = copying._replace(piece_bytes=SCATTER_PIECE_BYTES)
            storing = copying._replace(transfer="programs")
            if few:
                return {"packets": storing._replace(exchange="packets")}
            return {"copies": copying, "tiles": storing} if problem.world > 1 else {"tiles": storing}
    if problem.returns_gathered:
        return {"copies": copying}
    moving = KernelConfig(
        blocks=default_blocks(problem, machine, "programs"),
        transfer="programs",
        movers=count_usable(problem, machine, "programs"),
    )
    return {"programs": moving} if few else {"copies": copying, "programs": moving}


def default_blocks(problem: GemmProblem, machine: Machine, transfer: str = "copies") -> Blocks:
    """Tile sizes where nothing was measured. transfer: what moves a gather's rows."""
    if not machine.processors:  # interpreted programs run in turns: a few, with small tiles
        return Blocks(16 if problem.m <= 16 else 32, 32, 32, 2, 4, 2, 3)
    itemsize = problem.dtype.itemsize
    is_gather = problem.operator == "all_gather_matmul"
    shards = problem.world if problem.operator == "matmul_reduce_scatter" else 1
    processors = count_usable(problem, machine, transfer)
    m = problem.m // shards
    if problem.m <= FEW_ROWS:
        blocks = small_m_blocks(problem.m, problem.n, itemsize, machine.by_tma, processors)
    else:
        wide, narrow = (look_up_blocks(m, itemsize, machine.by_tma, is_wide, processors) for is_wide in (True, False))
        narrow_takes = _estimate(problem, shards, narrow) / NARROW_SPEED
        blocks = wide if _estimate(problem, shards, wide) <= narrow_takes else narrow
        if is_gather and problem.m > COOL_ROWS and machine.by_tma and itemsize == 2:
            blocks = Blocks(128, 128, 64, blocks.group_rows, 4, 3, 2 * machine.processors)
        most = MAX_GATHERED_ROWS if is_gather and itemsize > 1 else blocks.group_rows
        most = min(blocks.group_rows, most, count_grouped_rows(problem, transfer) // blocks.m)
        blocks = blocks._replace(group_rows=max(1, most))
    return blocks if machine.is_hopper else blocks._replace(num_stages=min(blocks.num_stages, 3))


def look_up_blocks(m: int, itemsize: int, by_tma: bool, fills_gpu: bool, processors: int) -> Blocks:
    """Tile sizes for GPUs, one persistent program a multiprocessor: a table, not a measurement.

    Tiles are as wide as fp32 accumulators fit into registers (128 x 256 with 8 warps) if such tiles fill the GPU, else
    narrower; they have as few rows as tensor cores take where m is small; and they are smaller where pointers (no TMA)
    or products without tensor cores (fp32) take registers, since larger tiles would spill. itemsize: bytes of an
    operand's element.
    """
    few = max(16, triton.next_power_of_2(min(m, 64)))
    match itemsize == 4, by_tma, m <= 64, fills_gpu:
        case True, _, _, _:
            blocks = Blocks(few, 64, 32, 8, 4 if few == 16 else 8, 3, processors)
        case _, False, True, _:
            blocks = Blocks(few, 128, 64, 8, 4, 3, processors)
        case _, False, _, _:
            blocks = Blocks(128, 128, 32, 8, 8, 3, processors)
        case _, _, True, _:
            blocks = Blocks(few, 128, 128, 8, 4, 4, processors)
        case _, _, _, True:
            blocks = Blocks(128, 256, 64, 8, 8, 4, processors)
        case _:
            blocks = Blocks(128, 128, 128, 8, 8, 3, processors)
    return deepen_for_fp8(blocks, itemsize)


def deepen_for_fp8(blocks: Blocks, itemsize: int) -> Blocks:
    """Blocks whose steps over k have as many bytes in fp8 as those for 16 bits have."""
    return blocks._replace(k=2 * blocks.k) if itemsize == 1 else blocks


def count_usable(problem: GemmProblem, machine: Machine, transfer: str = "copies") -> int:
    """The multiprocessors for a default's programs: fewer where programs occupy one while they wait for other ranks."""
    waits = problem.m <= FEW_ROWS or _is_moved_by_programs(problem, transfer)
    return bound_blocks(machine.processors) if waits else machine.processors


def _is_moved_by_programs(problem: GemmProblem, transfer: str) -> bool:
    return problem.operator == "all_gather_matmul" and transfer == "programs"


def count_grouped_rows(problem: GemmProblem, transfer: str) -> int:
    """Rows whose tiles may be visited together: as a rule one rank's, or the first tile would wait for all ranks.

    Rows that programs push arrive from all ranks at about one time, and the weight is read once where tiles of all
    ranks are visited together.
    """
    return problem.m if _is_moved_by_programs(problem, transfer) else problem.m // problem.world


def _estimate(problem: GemmProblem, shards: int, blocks: Blocks) -> float:
    """Return how long the problem's tiles take, in elements of one wave of tiles."""
    count = shards * divide_up(problem.m // shards, blocks.m) * divide_up(problem.n, blocks.n)
    return count_waves(count, problem.k, blocks) * blocks.m * blocks.n


def small_m_blocks(m: int, n: int, itemsize: int, any_width: bool, processors: int) -> Blocks:
    """Tiles for few rows: columns so that all multiprocessors have a tile, and as many loads in flight as fit.

    any_width: whether columns may be other than a power of two.
    """
    rows = max(16, triton.next_power_of_2(m))
    if itemsize == 4:
        return Blocks(rows, 32, 64, 1, 4, 3, processors)
    columns = 64 if n >= 64 * processors * 0.9 else 32
    # Fewer rows of fp8 than 64 are converted for tensor cores: all columns of a tile at once, as a power of two.
    is_converted = itemsize == 1 and rows < 64
    if any_width and not is_converted:
        columns = find_width(rows, n, processors) or columns
    blocks = fit_blocks(rows, columns, 256, processors)
    if not is_converted and (rows > 32 or columns < 96 or blocks.k < 256):
        blocks = fit_blocks(rows, columns, 128, processors)
    return deepen_for_fp8(blocks, itemsize)


def find_width(rows: int, n: int, processors: int) -> int:
    """A tile's columns if every program has whole tiles; 0 where that leaves many programs without a tile.

    With few rows memory bandwidth is the limit, and a GPU with some programs less is as fast. Two things cost time: a
    wave in which most programs have no tile, and A, which each tile loads from the L2 cache.
    """
    if divide_up(n, 32) < MOSTLY_BUSY * processors:
        return 0
    return min(
        range(32, 257, 32), key=lambda columns: divide_up(divide_up(n, columns), processors) * (columns + rows // 4)
    )


def fit_blocks(rows: int, columns: int, depth: int, processors: int) -> Blocks:
    """Blocks with as many stages as pay; where these are too few, of half the depth."""
    stage = (rows + columns) * depth * 2
    stages = min(6, max(_PAYING_BYTES // stage, min(_MIN_STAGES, _MAX_BYTES // stage)))
    if stages < _MIN_STAGES:
        return fit_blocks(rows, columns, depth // 2, processors)
    return Blocks(rows, columns, depth, 1, 4, stages, processors)
