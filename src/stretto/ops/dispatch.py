# SPDX-License-Identifier: Apache-2.0
"""Dispatch of operator calls: registration with torch, the eager fast path, and the choice of a configuration.

`define_operator` makes an operator's schema, fake implementation, autograd, FLOP formula and fast path. Each call then
finds its configuration: `recall_config` for an equal earlier call, else `choose_config`, by the caller's choice, the
fastest measured configuration, or a default.

All ranks of a group make the same choice: their calls are equal, and everything else on which choices depend (measured
times, whether GPUs can access each other's memory) is exchanged once, at the group's first call.
"""

import functools
import logging
import math
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from stretto.memory import failures, is_debugging
from stretto.memory.gpus import find_obstacle
from stretto.memory.plain_data import all_gather_data
from stretto.ops.checks import require_agreement
from stretto.ops.gemm.config import (
    IMPLEMENTATIONS,
    LIBRARY,
    GemmProblem,
    KernelConfig,
    Machine,
    count_processors,
    decode,
    find_capability,
)
from stretto.ops.gemm.defaults import default_blocks, default_config
from stretto.ops.gemm.tile import takes_tma
from stretto.ops.workspace import find_group, require_no_capture
from stretto.tiles import INTERPRETED
from stretto.tuning import Autotuner, TimeKeys, TuningStore, machine_key

logger = logging.getLogger("stretto.ops")

_NEAR = 1.5  # a measurement counts for up to so many times as many rows, or as few
_MAX_CHOICES = 4096
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Autograd(NamedTuple):
    """An operator's backward pass, as `torch.library.register_autograd` takes it.

    save(ctx, inputs, output) saves what the backward pass needs; differentiate(ctx, *gradients) computes them.
    """

    save: Callable[[Any, tuple[Any, ...], Any], None]
    differentiate: Callable[..., Any]


_definitions: dict[str, object] = {}  # torch itself holds operators weakly


def define_operator(
    name: str,
    run: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    count_flops: Callable[..., int],
    autograd: Autograd | None = None,
    tensors: slice = slice(3),
) -> Callable[..., Any]:
    """Register the operator `stretto::name`; returns the function that calls it, by the eager fast path where it can.

    run: the implementation, whose annotations make the schema; autocast is off inside of it, since an operator's dtype
    is its operands'. fake: checks the arguments and returns empty outputs. count_flops: takes the arguments, tensors as
    their shapes. autograd: None for an operator without gradients. tensors: which of the arguments are tensors (x,
    weight and bias by default).
    """
    run = without_autocast(run)
    definition = torch.library.custom_op(f"stretto::{name}", run, mutates_args=())
    _definitions[name] = definition
    definition.register_fake(fake)
    operator = getattr(torch.ops.stretto, name)
    register_flop_formula(operator)(count_flops)
    if autograd is None:
        return _undifferentiated_fast_path(run, operator, tensors)
    autograd = Autograd(autograd.save, without_autocast(autograd.differentiate))
    definition.register_autograd(autograd.differentiate, setup_context=autograd.save)
    return eager_fast_path(name, run, operator, autograd, tensors)


def eager_fast_path(
    name: str, run: Callable[..., Any], operator: Callable[..., Any], autograd: Autograd, tensors: slice
) -> Callable[..., Any]:
    """A function that calls an operator past torch.library, whose dispatch costs the host 10 to 30 us, where it can.

    Where torch does more with a call than run it (`is_traced`), the operator itself is called.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        # Here, since with a setup_context torch would inspect forward's signature at each call.
        autograd.save(ctx, inputs, output)
        return output

    class_name = name.title().replace("_", "")  # in profiles
    members = {"forward": staticmethod(forward), "backward": staticmethod(autograd.differentiate)}
    function: Any = type(class_name, (torch.autograd.Function,), members)

    def call(*inputs: Any) -> Any:
        operands = inputs[tensors]
        if is_traced(*operands):
            require_no_tangents(*operands)
            return operator(*inputs)
        if is_differentiated(*operands):
            return function.apply(*inputs)
        return run(*inputs)

    return call


def _undifferentiated_fast_path(
    run: Callable[..., Any], operator: Callable[..., Any], tensors: slice
) -> Callable[..., Any]:
    """`eager_fast_path` of an operator without gradients."""

    def call(*inputs: Any) -> Any:
        operands = inputs[tensors]
        require_no_tangents(*operands)
        return operator(*inputs) if is_traced(*operands) else run(*inputs)

    return call


def write_to(
    out: Tensor, call: Callable[..., Any], run: Callable[..., Any], *inputs: Any, tensors: slice = slice(3)
) -> None:
    """Run an operator so that its output is in `out`: `run(*inputs, out)`, or, where torch must see it, `call`."""
    operands = inputs[tensors]
    require_no_tangents(*operands)
    if is_traced(out, *operands):
        out.copy_(call(*inputs))
        return
    run(*inputs, out)
    note_write(out)


def note_write(out: Tensor) -> None:
    """Tell autograd that a kernel has written to a tensor, which torch does not see."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def copy_to(out: Tensor | None, result: Tensor) -> Tensor:
    """The result, in `out` if there is one."""
    return result if out is None else out.copy_(result)


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, with autocast off inside of it."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether torch must see a call: it traces, transforms or records it, or has subclasses among the tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # by torch.jit.trace
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether autograd must see a call: some of its tensors need gradients, or may have forward-mode tangents.

    No operator here has forward-mode derivatives, and autograd raises where one is asked for.
    """
    return forward_ad._current_level >= 0 or needs_gradients(*tensors)


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether some of a call's tensors need gradients."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def require_no_tangents(*tensors: Tensor | None) -> None:
    """NotImplementedError for forward-mode derivatives, which torch.library would silently make zeros of."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "stretto's operators have no forward-mode derivatives (jvp): differentiate them backward"
            )


def save_operands(ctx: Any, rows: Tensor, weight: Tensor) -> None:
    """Save the weight for x's gradient and the rows for the weight's, so that a frozen weight keeps no activations."""
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(rows if needs_weight else None, weight if needs_x else None)


def pin_backward(implementation: str) -> str:
    """The `implementation` of the backward pass's operator: a configuration fits one operator and its shapes alone."""
    if implementation in IMPLEMENTATIONS:
        return implementation
    return decode(implementation).implementation


class CallKey(NamedTuple):
    """The key of a call in the cache of choices: all that its checks and its configuration depend on.

    x, weight, bias: what counts of the tensors. options: of the call, which all ranks give alike.
    """

    operator: str
    x: object
    weight: object
    bias: object
    gpu: int | None
    options: tuple[object, ...]


@dataclass
class _GroupChoices:
    """What a group's ranks have agreed on, and how often its calls here ran as what.

    obstacle: why no kernel can run, or "". times: seconds by problem and encoded configuration. choices: a
    configuration and the reason for it. recalled: configurations of calls that were checked before.
    """

    group: "weakref.ref[dist.ProcessGroup]"
    obstacle: str = ""
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choices: dict[tuple[GemmProblem, Machine, str], tuple[KernelConfig, str]] = field(default_factory=dict)
    recalled: dict[CallKey, KernelConfig] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)


_groups: dict[str, _GroupChoices] = {}


def counts(group: dist.ProcessGroup | None = None) -> Mapping[tuple[str, str], int]:
    """Count this rank's calls in a group (None: all ranks) by (operator, "kernel" or "library")."""
    world = dist.group.WORLD if group is None else group
    known = _groups.get("" if world is None else world.group_name)
    return dict(known.counts) if known is not None and known.group() is world else {}


def make_call_key(operator: str, x: Tensor, weight: Tensor, bias: Tensor | None, *options: object) -> CallKey:
    """A call's key."""
    current = torch.cuda.current_device() if x.is_cuda else None
    of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device, bias.is_contiguous())
    of_x = x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
    of_weight = weight.shape, weight.stride(), weight.dtype, weight.device, weight.data_ptr() % 16
    return CallKey(operator, of_x, of_weight, of_bias, current, options)


def recall_config(group: str, key: CallKey) -> KernelConfig | None:
    """Look up the configuration of an equal earlier call, and count this one; None for a new kind of call."""
    known = _groups.get(group)
    if known is None or known.group() is not find_group(group) or is_debugging():
        return None
    config = known.recalled.get(key)
    if config is not None:
        known.counts[key.operator, config.implementation] += 1
    return config


def choose_config(
    problem: GemmProblem, x: Tensor, weight: Tensor, group: str, implementation: str, key: CallKey | None = None
) -> KernelConfig:
    """Choose the configuration of a call: the caller's, else the fastest measured, else a default. Counts the call.

    implementation: "auto", "kernel", "library" or an encoded configuration. key: under which `recall_config` finds the
    choice from now on. Logs each new choice at debug level. ValueError for another implementation, where a kernel was
    asked for and none can run, and where ranks call different things. Collective at the group's first call, and at the
    first of its kind.
    """
    known = _find(group, x.device)
    of_bias, options = (key.bias, key.options) if key else (None, (implementation,))
    description = f"{problem.name}{'' if of_bias is None else ' with a bias'} {options}"
    machine = find_machine(x, weight)
    machine = machine._replace(by_tma=require_agreement(description, machine.by_tma, group, x.device))
    asked = problem, machine, implementation
    if asked not in known.choices:
        if len(known.choices) == _MAX_CHOICES:
            known.choices.clear()
        known.choices[asked] = config, why = _choose(known, *asked)
        logger.debug("group %s: %s runs as %s: %s", group, problem.name, config.encode(), why)
    config, _ = known.choices[asked]
    if key is not None:
        if len(known.recalled) == _MAX_CHOICES:
            known.recalled.clear()
        known.recalled[key] = config
    known.counts[problem.operator, config.implementation] += 1
    return config


def describe_problem(operator: str, m: int, x: Tensor, weight: Tensor, group: str) -> GemmProblem:
    """The problem that a call computes; m: rows of the whole."""
    transposed = not weight.is_contiguous()
    return GemmProblem(operator, m, weight.shape[0], weight.shape[1], x.dtype, transposed, find_group(group).size())


def autotuner(device: torch.device, store: TuningStore | None = None) -> Autotuner[str, KernelConfig]:
    """The measured times of configurations on this machine, by the problem's name."""
    return Autotuner(machine_name(device), TimeKeys(_name_time, _parse_time_key), store)


def machine_name(device: torch.device) -> str:
    """The machine as the tuning store names it."""
    return machine_key(device)


def time_key(problem: GemmProblem, config: KernelConfig) -> str:
    """The key in the tuning store of the seconds that a configuration takes."""
    return _name_time(problem.name, config)


def _name_time(problem: str, config: KernelConfig) -> str:
    return f"ops {problem} by {config.encode()}"


def _parse_time_key(key: str) -> tuple[str, KernelConfig]:
    """The problem's name and the configuration; ValueError for a key that this version cannot read."""
    kind, _, rest = key.partition(" ")
    if kind != "ops":
        raise ValueError(f"{key!r} names no times of an operator")
    problem, _, text = rest.partition(" by ")
    return problem, decode(text)


def clear_choices() -> None:
    """Make every group agree again at its next call, which is then collective: new times have been measured."""
    _groups.clear()


def _choose(
    known: _GroupChoices, problem: GemmProblem, machine: Machine, implementation: str
) -> tuple[KernelConfig, str]:
    config = None if implementation in IMPLEMENTATIONS else decode(implementation)
    if 0 in (problem.m, problem.n, problem.k):
        return LIBRARY, "there is nothing to multiply"
    if config is not None:
        if config.implementation == "kernel":
            _require_kernel(known, problem)
        if config.blocks is None and config != LIBRARY:
            config = config._replace(blocks=default_blocks(problem, machine, config.transfer))
        return config, "it was asked for"
    if implementation == "library":
        return LIBRARY, "it was asked for"
    measured = _find_fastest(known, problem, needs_kernel=implementation == "kernel")
    if implementation == "kernel":
        _require_kernel(known, problem)
        if measured is not None:
            return measured
        config, _ = default_config(problem, machine)
        if config == LIBRARY:
            config = KernelConfig(blocks=default_blocks(problem, machine, KernelConfig().transfer))
        return config, "a kernel was asked for"
    if known.obstacle:
        return LIBRARY, known.obstacle
    return measured or default_config(problem, machine)


def _require_kernel(known: _GroupChoices, problem: GemmProblem) -> None:
    if known.obstacle:
        raise ValueError(f'{problem.operator}: no kernel can run: {known.obstacle}; implementation="library" can')


def _find_fastest(known: _GroupChoices, problem: GemmProblem, *, needs_kernel: bool) -> tuple[KernelConfig, str] | None:
    """The fastest configuration measured at the nearest number of rows, if that is near enough."""
    rows = _measured_rows(known, problem)
    if not rows:
        return None
    nearest = min(rows, key=lambda m: abs(math.log(m / problem.m)))
    times = known.times[problem._replace(m=nearest).name]
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
    for name in known.times:
        if name.startswith(f"{before}m=") and name.endswith(after):
            digits = name[len(before) + 2 : len(name) - len(after)]
            if digits.isdecimal() and int(digits) > 0:
                found.append(int(digits))
    return found


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
    """Exchange what choices depend on: rank 0's measured times, and whether kernels can run. Collective."""
    times = _read_times(device) if dist.get_rank(group) == 0 else {}
    everyone = all_gather_data((socket.gethostname(), times), group, tuple[str, dict[str, dict[str, float]]])
    hosts = {host for host, _ in everyone}
    obstacle = ""
    if len(hosts) > 1:
        obstacle = f"its ranks are on {len(hosts)} machines, and kernels reach the memory of one"
    elif device.type == "cpu" and not INTERPRETED.value:
        obstacle = "on CPUs kernels are interpreted, which takes TRITON_INTERPRET=1 before anything imports triton"
    elif device.type == "cuda":
        obstacle = find_obstacle(group, device) or ""
    return _GroupChoices(weakref.ref(group), obstacle, everyone[0][1])


def _read_times(device: torch.device) -> dict[str, dict[str, float]]:
    """{problem: {encoded configuration: seconds}} of this machine, without entries that this version cannot read."""
    times = autotuner(device).read()
    return {
        problem: {config.encode(): second for config, second in seconds.items()} for problem, seconds in times.items()
    }


def find_machine(x: Tensor, weight: Tensor) -> Machine:
    """The machine, as far as the defaults for these operands depend on it."""
    by_tma = takes_tma(x) and takes_tma(weight if weight.is_contiguous() else weight.t())
    device = x.device
    if device.type == "cpu":
        return Machine(0, by_tma, False)
    return Machine(count_processors(device.index), by_tma, find_capability(device.index) == (9, 0))
