"""Which plan a call is done by: what its caller pinned, else what was the fastest by measured times, else a default.

All ranks of a group choose alike: their calls are alike, and what choices depend on besides (times that were measured,
whether GPUs reach each other) is rank 0's or all ranks', exchanged once, at the group's first call.
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

from stretto.memory import failures, is_debugging, shared_gpus
from stretto.memory.gpus import find_obstacle
from stretto.ops.checks import require_agreement
from stretto.ops.gemm.config import (
    IMPLEMENTATIONS,
    LIBRARY,
    GemmProblem,
    KernelConfig,
    Machine,
    decode,
    default_blocks,
    default_config,
)
from stretto.ops.gemm.tile import count_processors, find_capability, takes_tma
from stretto.ops.workspace import find_group, require_no_capture
from stretto.tiles import INTERPRETED
from stretto.tuning import TuningStore

logger = logging.getLogger("stretto.ops")

_NEAR = 1.5  # measured rows may be so many times as many, or as few
_MOST_CHOICES = 4096


class CallKey(NamedTuple):
    """All that a call's checks and choice depend on, for `recall_config`: on a host that launches, microseconds count.

    x, weight, bias: what of the tensors counts. options: of the call, which all ranks give alike.
    """

    operator: str
    x: object
    weight: object
    bias: object
    gpu: int | None
    options: tuple[object, ...]


@dataclass
class _Group:
    """What a group's ranks have agreed on, and what its calls here ran as."""

    group: "weakref.ref[dist.ProcessGroup]"
    obstacle: str = ""
    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choices: dict[tuple[GemmProblem, Machine, str], tuple[KernelConfig, str]] = field(default_factory=dict)
    recalled: dict[CallKey, KernelConfig] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)


_groups: dict[str, _Group] = {}


def counts(group: dist.ProcessGroup | None = None) -> Mapping[tuple[str, str], int]:
    """How often this rank's calls in a group (None: all ranks) ran as what: (operator, "kernel" or "library")."""
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
    """The plan of a call like one that was checked and chosen before, which is counted; None for a new one."""
    known = _groups.get(group)
    if known is None or known.group() is not find_group(group) or is_debugging():
        return None
    plan = known.recalled.get(key)
    if plan is not None:
        known.counts[key.operator, plan.implementation] += 1
    return plan


def choose_config(
    call: GemmProblem, x: Tensor, weight: Tensor, group: str, implementation: str, key: CallKey | None = None
) -> KernelConfig:
    """The plan of this call, which is counted and, once for calls that are alike, said at debug level.

    implementation: "auto", "kernel", "library" or a config's text. key: have `recall_config` give it from now on.
    ValueError for
    another implementation, where a kernel was asked for and none can run, and where ranks call different things.
    Collective at the group's first call, and at the first of its kind.
    """
    known = _find(group, x.device)
    of_bias, options = (key.bias, key.options) if key else (None, (implementation,))
    said = f"{call.name}{'' if of_bias is None else ' with a bias'} {options}"
    machine = find_machine(x, weight)
    machine = machine._replace(by_tma=require_agreement(said, machine.by_tma, group, x.device))
    asked = call, machine, implementation
    if asked not in known.choices:
        if len(known.choices) == _MOST_CHOICES:
            known.choices.clear()
        known.choices[asked] = plan, why = _choose(known, *asked)
        logger.debug("group %s: %s runs as %s: %s", group, call.name, plan.encode(), why)
    plan, _ = known.choices[asked]
    if key is not None:
        if len(known.recalled) == _MOST_CHOICES:
            known.recalled.clear()
        known.recalled[key] = plan
    known.counts[call.operator, plan.implementation] += 1
    return plan


def describe_problem(operator: str, m: int, x: Tensor, weight: Tensor, group: str) -> GemmProblem:
    """What is computed; m: rows of the whole."""
    transposed = not weight.is_contiguous()
    return GemmProblem(operator, m, weight.shape[0], weight.shape[1], x.dtype, transposed, find_group(group).size())


def machine_name(device: torch.device) -> str:
    """What measured times are kept by."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return f"{name}, torch {torch.__version__}{shared_gpus.suffix()}"


def time_key(call: GemmProblem, plan: KernelConfig) -> str:
    """The name in the store of the seconds of one plan."""
    return f"ops {call.name} by {plan.encode()}"


def clear_choices() -> None:
    """Have every group agree again at its next call, in which all ranks are to meet: times have been measured."""
    _groups.clear()


def _choose(known: _Group, call: GemmProblem, machine: Machine, implementation: str) -> tuple[KernelConfig, str]:
    plan = None if implementation in IMPLEMENTATIONS else decode(implementation)
    if 0 in (call.m, call.n, call.k):
        return LIBRARY, "there is nothing to multiply"
    if plan is not None:
        if plan.implementation == "kernel":
            _require_kernel(known, call)
        return plan if plan.blocks or plan == LIBRARY else plan._replace(blocks=default_blocks(call, machine)), (
            "it was asked for"
        )
    if implementation == "library":
        return LIBRARY, "it was asked for"
    measured = _find_fastest(known, call, needs_kernel=implementation == "kernel")
    if implementation == "kernel":
        _require_kernel(known, call)
        if measured is not None:
            return measured
        plan, _ = default_config(call, machine)
        if plan == LIBRARY:
            plan = KernelConfig(blocks=default_blocks(call, machine))
        return plan, "a kernel was asked for"
    if known.obstacle:
        return LIBRARY, known.obstacle
    return measured or default_config(call, machine)


def _require_kernel(known: _Group, call: GemmProblem) -> None:
    if known.obstacle:
        raise ValueError(f'{call.operator}: no kernel can run: {known.obstacle}; implementation="library" can')


def _find_fastest(known: _Group, call: GemmProblem, *, needs_kernel: bool) -> tuple[KernelConfig, str] | None:
    """The plan that was the fastest at the nearest number of rows, if that is near."""
    ways = {}
    for m in _measured_rows(known, call):
        ways[m] = known.times[call._replace(m=m).name]
    if not ways:
        return None
    nearest = min(ways, key=lambda m: abs(math.log(m / call.m)))
    plans = ((decode(text), seconds) for text, seconds in ways[nearest].items())
    timed = [(seconds, plan) for plan, seconds in plans if not (needs_kernel and plan == LIBRARY)]
    if not timed or not 1 / _NEAR <= nearest / call.m <= _NEAR:
        return None
    seconds, plan = min(timed, key=lambda pair: pair[0])
    return plan, f"it was the fastest at m={nearest}, {seconds * 1e6:.1f} us"


def _measured_rows(known: _Group, call: GemmProblem) -> list[int]:
    before, after = call._replace(m=0).name.split("m=0")
    found = []
    for name in known.times:
        if name.startswith(f"{before}m=") and name.endswith(after):
            digits = name[len(before) + 2 : len(name) - len(after)]
            if digits.isdecimal() and int(digits) > 0:
                found.append(int(digits))
    return found


def _find(name: str, device: torch.device) -> _Group:
    group = find_group(name)
    known = _groups.get(name)
    if known is None or known.group() is not group:
        require_no_capture(device)
        failures.check()  # before ranks are met that may never come
        for gone in [other for other, old in _groups.items() if old.group() is None]:
            del _groups[gone]
        known = _groups[name] = _agree(group, device)
        if known.obstacle:
            logger.warning("group %s: operators run by the library, unfused: %s", name, known.obstacle)
    return known


def _agree(group: dist.ProcessGroup, device: torch.device) -> _Group:
    """Exchange what choices depend on. Collective."""
    times = _read_times(device) if dist.get_rank(group) == 0 else {}
    own = (socket.gethostname(), times)
    everyone = [own] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    hosts = {host for host, _ in everyone}
    obstacle = ""
    if len(hosts) > 1:
        obstacle = f"its ranks are on {len(hosts)} machines, and kernels reach the memory of one"
    elif device.type == "cpu" and not INTERPRETED.value:
        obstacle = "on CPUs kernels are interpreted, which takes TRITON_INTERPRET=1 before anything imports triton"
    elif device.type == "cuda":
        obstacle = find_obstacle(group, device) or ""
    return _Group(weakref.ref(group), obstacle, everyone[0][1])


def _read_times(device: torch.device) -> dict[str, dict[str, float]]:
    """{call: {plan: seconds}} of this machine; what this version cannot read is left out."""
    found: dict[str, dict[str, float]] = {}
    for key, seconds in TuningStore().read(machine_name(device)).items():
        kind, _, rest = key.partition(" ")
        name, _, text = rest.partition(" by ")
        if kind != "ops" or len(seconds) != 1:
            continue
        try:
            decode(text)
        except ValueError:
            continue
        found.setdefault(name, {})[text] = seconds[0]
    return found


def find_machine(x: Tensor, weight: Tensor) -> Machine:
    """What the defaults for these operands depend on."""
    by_tma = takes_tma(x) and takes_tma(weight if weight.is_contiguous() else weight.t())
    device = x.device
    if device.type == "cpu":
        return Machine(0, by_tma, False)
    return Machine(count_processors(device.index), by_tma, find_capability(device.index) == (9, 0))


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_TENSORS = 3  # x, weight and bias, which come first

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, in which no autocast casts: an operator's dtype is its operands', whatever runs it."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether torch does more with a call than run it: traces, transforms or watches it, or has classes of its own."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # by torch.jit.trace
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether torch is to be told of a call: some of its tensors need gradients, or may have forward-mode tangents.

    No operator here has forward-mode derivatives, and torch says so of what it is told of.
    """
    return forward_ad._current_level >= 0 or needs_gradients(*tensors)


def needs_gradients(*tensors: Tensor | None) -> bool:
    """Whether some of a call's tensors need gradients."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def require_no_tangents(*tensors: Tensor | None) -> None:
    """NotImplementedError for forward-mode derivatives, of which torch.library would make zeros without a word."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "stretto's operators have no forward-mode derivatives (jvp): differentiate them backward"
            )


def eager_fast_path(
    name: str,
    run: Callable[..., Any],
    operator: Callable[..., Any],
    save: Callable[[Any, tuple[Any, ...], Any], None],
    differentiate: Callable[..., Any],
) -> Callable[..., Any]:
    """The operator, which takes x, weight, bias and more, as a function that goes past torch.library where it can.

    name: in profiles. run: what the operator does; save, differentiate: as `register_autograd` takes them. Where torch
    does more with a call than run it, the operator itself is called.
    """

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        save(ctx, inputs, output)  # here, since a setup_context has torch look at forward's signature at each call
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    function: Any = type(name, (torch.autograd.Function,), members)

    def call(*inputs: Any) -> Any:
        tensors = inputs[:_TENSORS]
        if is_traced(*tensors):
            require_no_tangents(*tensors)
            return operator(*inputs)
        if is_differentiated(*tensors):
            return function.apply(*inputs)
        return run(*inputs)

    return call


def save_operands(ctx: Any, rows: Tensor, weight: Tensor) -> None:
    """The weight for x's gradient, and the rows for the weight's."""
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(rows if needs_weight else None, weight if needs_x else None)


def pin_backward(implementation: str) -> str:
    """What the other operator of a backward pass is to be done by: a plan is of one operator and its shapes alone."""
    if implementation in ("auto", "kernel", "library"):
        return implementation
    return decode(implementation).implementation
