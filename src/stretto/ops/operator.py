# SPDX-License-Identifier: Apache-2.0
"""The host's side that all operators share: registration with torch, agreement of ranks, workspaces, and collectives.

`define_operator` registers a function with torch, and has it called past torch's dispatch where torch need not see it.
`require_agreement` compares the ranks' calls; `operands` has checked one's own before. `find_workspace` and `find_kept`
keep symmetric memory between calls, for each group. Collectives of rows are the group's own backend's: operators have
them around a library's GEMM where no kernel runs.
"""

import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from stretto.execution import MIN_WORKSPACE_BYTES, TWO_SLOTS_BYTES
from stretto.memory import failures, find_own_rank, is_debugging, store_all_gather
from stretto.memory.copy_engine import find_current
from stretto.ops.operands import is_differentiated, needs_gradients, require_no_tangents
from stretto.tiles import BlockChannel, PutChannel

CHANNELS = 32
"""Channels of each rank: the most pieces of its shard that are signalled separately."""

_ARRIVALS = 1024
_MAX_KNOWN = 4096
_BY_TMA = ", by TMA"
_MEASURED = ", to be measured"
_PLAIN = {Tensor, torch.nn.Parameter, types.NoneType}

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
    run: Callable[_P, _R],
    *,
    fake: Callable[..., Any],
    count_flops: Callable[..., int] = lambda: 0,
    autograd: Autograd | None = None,
) -> Callable[_P, _R]:
    """Register `run` with torch as the operator `stretto::name`; returns what to call in its place, of its type.

    That calls torch's operator where torch must see the call (`is_traced`), and elsewhere `run` itself: torch.library's
    dispatch costs the host 10 to 30 us.

    run: its annotations make the schema, without a last argument `out`: a tensor to write the result, or the first of
    them, to, or None. Autocast is off inside of it, since an operator's dtype is its operands'. fake: checks the
    arguments and returns empty outputs. count_flops: the arguments' tensors are their shapes; by default it counts
    none, as torch does for what is no product of matrices. Both take the arguments of `run` that they name. autograd:
    None for an operator without gradients.
    """
    compute: Callable[..., Any] = without_autocast(run)

    def compute_new(*inputs: Any) -> Any:
        return compute(*inputs)

    signature = inspect.signature(run)
    inputs_of_schema = [one for one in signature.parameters.values() if one.name != "out"]
    are_tensors = [one.annotation in (Tensor, Tensor | None) for one in inputs_of_schema]
    first = are_tensors.index(True)
    tensors = slice(first, first + len(list(itertools.takewhile(bool, are_tensors[first:]))))
    compute_new.__signature__ = signature.replace(parameters=inputs_of_schema)  # type: ignore[attr-defined]
    definition = torch.library.custom_op(f"stretto::{name}", compute_new, mutates_args=())
    _definitions[name] = definition
    register_fake(definition, fake)
    operator = getattr(torch.ops.stretto, name)
    register_flop_formula(operator)(_give_named(count_flops, inputs_of_schema))
    function = None
    if autograd is not None:
        autograd = Autograd(autograd.save, without_autocast(autograd.differentiate))
        definition.register_autograd(autograd.differentiate, setup_context=autograd.save)
        function = _make_function(name, compute, autograd)

    @functools.wraps(run)
    def call(*inputs: Any, out: Tensor | None = None) -> Any:
        operands = inputs[tensors]
        if out is not None:
            require_no_tangents(*operands)
            if is_traced(out, *operands):
                return _copy_first(operator(*inputs), out)
            results = compute(*inputs, out=out)
            if not out.is_inference():  # autograd is told of the write, which torch does not see
                torch.autograd.graph.increment_version(out)
            return results
        # Of an operator without gradients torch's call raises an error where its result is differentiated.
        if is_traced(*operands) or (function is None and needs_gradients(*operands)):
            require_no_tangents(*operands)
            return operator(*inputs)
        if function is None:
            require_no_tangents(*operands)
        elif is_differentiated(*operands):
            return function.apply(*inputs)
        return compute(*inputs)

    return call  # type: ignore[return-value]  # it takes what run takes


def register_fake(definition: torch.library.CustomOpDef, fake: Callable[..., Any]) -> None:
    """Register the fake implementation of a torch.library operator. It takes those arguments that it names."""
    parameters = inspect.signature(definition._init_fn).parameters
    definition.register_fake(_give_named(fake, list(parameters.values())))


def _give_named(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """A function of all arguments for one that has some of them as its parameters, by name."""
    taken, names = inspect.signature(function).parameters, [one.name for one in parameters]

    def call(*inputs: Any, **others: Any) -> Any:
        given = {one.name: one.default for one in parameters} | dict(zip(names, inputs, strict=False)) | others
        return function(**{name: given[name] for name in taken})

    return call


def _make_function(name: str, run: Callable[..., Any], autograd: Autograd) -> Any:
    """An autograd function for calls past torch.library."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        # Here, since with a setup_context torch would inspect forward's signature at each call.
        autograd.save(ctx, inputs, output)
        return output

    class_name = name.title().replace("_", "")  # in profiles
    members = {"forward": staticmethod(forward), "backward": staticmethod(autograd.differentiate)}
    return type(class_name, (torch.autograd.Function,), members)


def _copy_first(results: Any, out: Tensor) -> Any:
    """An operator's results, the first of them in `out`."""
    return out.copy_(results) if isinstance(results, Tensor) else (out.copy_(results[0]), *results[1:])


def copy_to(out: Tensor | None, result: Tensor) -> Tensor:
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


def is_traced(*tensors: Tensor | None, in_modes: bool = True) -> bool:
    """True if torch must see a call: it traces, transforms or records it, or has subclasses among the tensors.

    in_modes: also if a dispatch mode is active. An operator hides what it calls from the mode, collectives among them.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None  # by torch.jit.trace
        or (in_modes and is_in_torch_dispatch_mode())
        or torch._C._are_functorch_transforms_active()
        or not _PLAIN.issuperset(map(type, tensors))
    )


def save_operands(ctx: Any, rows: Tensor, weight: Tensor) -> None:
    """Save the weight for x's gradient and the rows for the weight's, so that a frozen weight keeps no activations."""
    needs_x, needs_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(rows if needs_weight else None, weight if needs_x else None)


def differentiate_product(
    ctx: Any, grad: Tensor, exchange: Callable[[Tensor, str], Tensor] | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias, for a gradient of the exchanged x @ weight.T, plus a bias.

    exchange: makes of `grad` that of this rank's product; None: it is that. ctx: its `is_replicated` says that all
    ranks' gradients are one and the same, which have no second derivatives: NotImplementedError.
    """
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    if ctx.is_replicated and torch.is_grad_enabled() and grad.requires_grad:
        # They would have to be summed over the ranks, whose parts of x differ.
        raise NotImplementedError(
            'matmul_all_reduce has no second derivatives with grad_convention="replicated-loss": take '
            '"sum-of-losses", and divide the loss by the number of ranks'
        )
    total = grad = grad.contiguous()
    if exchange is not None and (needs_x or needs_weight):
        total = exchange(grad, ctx.group)
    grad_bias = grad.sum(0) if ctx.has_bias and needs_bias else None
    return total @ weight if needs_x else None, total.t() @ x if needs_weight else None, grad_bias


def find_name(group: dist.ProcessGroup | None) -> str:
    """The group's name (None: all ranks), as operators' schemas take it. ValueError for a rank outside of it."""
    if not (group is None or isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER):
        raise ValueError(
            f"group must be a torch.distributed.ProcessGroup, or None for all ranks, not {group!r}: of a mesh's axis, "
            "give mesh.get_group(axis)"
        )
    if not isinstance(group, dist.ProcessGroup):  # of a group, only its ranks have an object
        find_own_rank(group)
        group = dist.group.WORLD
        assert group is not None
    return group.group_name


class AgreedCall(NamedTuple):
    """Facts about a call that all ranks share. is_measured: it is the first one of its kind, and all may time it."""

    by_tma: bool
    is_measured: bool = False


def require_agreement(
    call: str, by_tma: bool, group: str, device: torch.device, *, can_measure: Callable[[], bool] = lambda: False
) -> AgreedCall:
    """Compare a description of this rank's call with the other ranks', through the group's store.

    Ranks compare a call that is new to the group; with STRETTO_DEBUG=1, every call. Kernels that wait for each other
    could not find out that their ranks disagree. by_tma: whether TMA takes this rank's operands, whose addresses may
    differ from other ranks'. can_measure: whether it may time a new call. Returns what held for all ranks, at the first
    call of this kind. ValueError where another rank makes a different call, PeerError if one makes none within the
    group's time limit.
    """
    known: dict[str, bool] = find_known(group, device, "calls", dict)  # by call, whether TMA takes all ranks' operands
    if call in known and not is_debugging():
        return AgreedCall(known[call])
    failures.check()  # before this rank waits for ranks that may never come
    sent = call + _BY_TMA * by_tma + _MEASURED * can_measure()
    received, rank = exchange_text(sent, group, device), dist.get_rank(find_group(group))
    for peer, other in enumerate(received):
        if other.removesuffix(_MEASURED).removesuffix(_BY_TMA) != call:
            raise ValueError(
                f"ranks of a group make the same calls, with the same shapes and in the same order: rank {rank} calls "
                f"{sent}; rank {peer} calls {other}"
            )
    if len(known) >= _MAX_KNOWN:
        known.clear()
    by_tma = all(other.removesuffix(_MEASURED).endswith(_BY_TMA) for other in received)
    known[call] = by_tma
    return AgreedCall(by_tma, all(other.endswith(_MEASURED) for other in received))


def exchange_text(text: str, group: str, device: torch.device) -> list[str]:
    """All ranks' texts, through the group's store: no device has to be idle. All ranks call it in one order."""
    return store_all_gather(text, find_group(group), f"stretto ops {device.type}")


def gather_rows(x: Tensor, group: str) -> Tensor:
    """All-gather x [rows, k] to [world * rows, k], by the group's own backend."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_gather_into_tensor(x, find_group(group).size(), group))


def all_reduce(x: Tensor, group: str) -> Tensor:
    """All-reduce x, by the group's own backend. Of one rank it is x itself."""
    if find_group(group).size() == 1:
        return x
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(x, "sum", group))


def exchange_rows(x: Tensor, group: str) -> Tensor:
    """All-to-all of x's rows in equal blocks: [world * rows, k] -> [world, rows, k], of each rank. Its own inverse."""
    world = find_group(group).size()
    sizes, functional = [x.shape[0] // world] * world, torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_to_all_single(x, sizes, sizes, group)).unflatten(0, (world, sizes[0]))


def scatter_sum(x: Tensor, group: str) -> Tensor:
    """Reduce-scatter x [m, k] to this rank's rows, added in fp32 in rank order, by an all-to-all."""
    parts = exchange_rows(x, group)
    total = parts[0] if x.dtype == torch.float64 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(x.dtype)


def reduce_scatter(x: Tensor, group: str) -> Tensor:
    """Reduce-scatter x [m, k] to this rank's rows: on CPUs by `scatter_sum`, on GPUs by the group's own backend."""
    if not x.is_cuda:
        return scatter_sum(x, group)
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", find_group(group).size(), group))


@dataclass(frozen=True)
class OperatorWorkspace:
    """A channel whose buffer on each rank has `slots` slots of `slot_bytes`.

    arrivals: int32 counters, 0 between calls. slot_cycle: the slot of each call whose slot the host chooses.
    """

    channel: BlockChannel
    slot_bytes: int
    slots: int
    arrivals: Tensor
    slot_cycle: Iterator[int]

    def words(self, slots: int, dtype: torch.dtype) -> int:
        """The number of elements of a dtype in so many slots."""
        return slots * self.slot_bytes // dtype.itemsize

    def take_slot(self) -> tuple[int, int | None]:
        """(where the next call's slot begins, in bytes, and its number for `begin`, if there are two)."""
        slot = next(self.slot_cycle)
        return slot * self.slot_bytes, slot if self.slots == 2 else None


class _Cache:
    """The workspaces of one group; they are freed with the group, or when another group has its name."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group, _drop_caches)
        self.workspaces: dict[tuple[str, int, torch.device], OperatorWorkspace] = {}
        self.kept: dict[Any, Any] = {}
        self.abandoned: list[Any] = []
        self.stream: torch.cuda.Stream | None = None


_caches: dict[str, _Cache] = {}


def _drop_caches(_: object, caches: dict[str, _Cache] = _caches) -> None:  # at exit modules have lost their names
    """Free the workspaces of groups that no longer exist, abandoned ones too."""
    for name, cache in list(caches.items()):
        if cache.group() is None:
            caches.pop(name, None)


def find_group(name: str) -> dist.ProcessGroup:
    """The process group of that name. ValueError if there is none, or if this process is not in it."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]  # a GroupName, which is a str
    except RuntimeError as error:
        raise ValueError(f"there is no process group {name!r} that this process is in: {error}") from error


def find_workspace(
    name: str, device: torch.device, size: int, purpose: str, *, follows: bool = True
) -> OperatorWorkspace:
    """Find or allocate a workspace of the group with slots of `size` bytes or more, for one call.

    purpose: "barrier", for calls that `BlockChannel.begin`: two slots in turn or, above `TWO_SLOTS_BYTES`, one;
    "copy_engine", the same for calls that other ranks' copies and moves signal; "double_buffered", two slots for calls
    that `enter`; "packets", two slots that hold only packets. Purposes do not disturb each other.

    All ranks call it with the same arguments. Sizes are rounded up to powers of two, so that allocation, a collective,
    is rare. Nothing but `close_workspaces` frees it while the group lives, since CUDA graphs may hold its address.
    Calls of one group run one after another: a call on another stream waits for earlier calls. follows: False on a
    stream that was forked since the last of these, and will be joined. ValueError if it would allocate while a CUDA
    graph is captured.
    """
    cache = _find_cache(name)
    slots = 1 if purpose in ("barrier", "copy_engine") and size > TWO_SLOTS_BYTES else 2
    key = purpose, max(1 << (size - 1).bit_length(), MIN_WORKSPACE_BYTES), device
    if key not in cache.workspaces:
        require_no_capture(device)
        group = find_group(name)
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to in training
            channel = BlockChannel.allocate(
                group,
                channels=1 if purpose == "packets" else CHANNELS * group.size(),
                data_bytes=slots * key[1],
                backend="cuda" if device.type == "cuda" else "host",
            )
            arrivals = torch.zeros(_ARRIVALS, dtype=torch.int32, device=device)
        cache.workspaces[key] = OperatorWorkspace(channel, key[1], slots, arrivals, itertools.cycle(range(slots)))
    if follows:
        _follow_calls(cache, device)
    return cache.workspaces[key]


def find_kept(name: str, device: torch.device, key: Any, make: Callable[[], Any]) -> Any:
    """Find or make what an operator keeps for its calls in the group; streams follow as in `find_workspace`.

    All ranks call it with the same keys, so `make` may be a collective.
    """
    cache = _find_cache(name)
    kept = _find_in(cache, device, key, make)
    _follow_calls(cache, device)
    return kept


def find_known(name: str, device: torch.device, key: Any, make: Callable[[], Any]) -> Any:
    """`find_kept` for values of the host, which no kernel uses: no stream waits for another."""
    return _find_in(_find_cache(name), device, key, make)


def is_kept(name: str, device: torch.device, key: Any) -> bool:
    """True if `find_kept` or `find_known` has made this, so that it would not be a collective."""
    return (device, key) in _find_cache(name).kept


def abandon(name: str, channel: BlockChannel) -> None:
    """Retire a channel after an error of the host in the middle of a call: no later call uses it.

    Counters of the channel may be behind its peers'. The next call of each rank that abandoned it allocates a new one,
    which is a collective: after an error on all ranks, such as a kernel that cannot be compiled, calls go on. After an
    error on one rank the others wait for it, and raise PeerError. The memory is kept while the group lives, since
    copies and kernels of peers may still store to it.
    """
    cache = _find_cache(name)
    if failures.has_failed():  # the group can no longer be used, and its failure is kept
        return
    for table in (cache.workspaces, cache.kept):
        for key, value in list(table.items()):
            if channel is _find_channel(value):
                cache.abandoned.append(table.pop(key))


def list_channels(name: str) -> list[tuple[str, BlockChannel]]:
    """List (purpose, channel) of the group's workspaces, with those that `find_kept` keeps and abandoned ones."""
    cache = _find_cache(name)
    found = [(purpose, workspace.channel) for (purpose, _, _), workspace in cache.workspaces.items()]
    kept = [(key, _find_channel(value)) for key, value in cache.kept.items()]
    kept += [((None, ("abandoned",)), _find_channel(value)) for value in cache.abandoned]
    for (_, key), channel in kept:
        if channel is not None and all(channel is not other for _, other in found):  # some keep one together
            found.append((str(key[0]), channel))
    for inner in list_node_groups(name):
        found += list_channels(inner)
    return found


def list_groups() -> list[str]:
    return [name for name, cache in list(_caches.items()) if cache.group() is not None]


def close_workspaces(name: str) -> None:
    """Free the group's workspaces, abandoned ones too. No rank's kernels or copies may use them any more."""
    channels = [channel for _, channel in list_channels(name)]
    cache = _find_cache(name)
    put_channels = list_put_channels(name)
    for inner in (cache, *map(_find_cache, list_node_groups(name))):
        inner.workspaces.clear()
        inner.abandoned.clear()
        for key, value in list(inner.kept.items()):
            if _find_channel(value) is not None or isinstance(value, PutChannel):
                del inner.kept[key]
    for channel in channels:
        channel.close()
    for puts in put_channels:
        puts.close()


def list_node_groups(name: str) -> list[str]:
    """The names of the groups of this rank's node that the group keeps, for calls between nodes: one, or none."""
    return [value.group_name for value in _find_cache(name).kept.values() if isinstance(value, dist.ProcessGroup)]


def list_put_channels(name: str) -> list[PutChannel]:
    """The slots through which the group's kernels put to other nodes."""
    return [value for value in _find_cache(name).kept.values() if isinstance(value, PutChannel)]


def _find_channel(value: Any) -> BlockChannel | None:
    """The channel that a kept value is, or uses."""
    ring = getattr(value, "ring", value)
    channel = ring if isinstance(ring, BlockChannel) else getattr(ring, "channel", None)
    return channel if isinstance(channel, BlockChannel) else None


def list_kept(name: str) -> list[Any]:
    """All values that `find_kept` keeps for the group."""
    return list(_find_cache(name).kept.values())


def _find_in(cache: _Cache, device: torch.device, key: Any, make: Callable[[], Any]) -> Any:
    found = cache.kept.get((device, key))
    if found is None:
        require_no_capture(device)
        with torch.inference_mode(False):
            found = cache.kept[device, key] = make()
    return found


def _find_cache(name: str) -> _Cache:
    cache = _caches.get(name)
    if cache is not None and cache.group() is find_group(name):
        return cache
    for known, old in list(_caches.items()):
        if known == name or old.group() is None:
            del _caches[known]
    return _caches.setdefault(name, _Cache(find_group(name)))


def _follow_calls(cache: _Cache, device: torch.device) -> None:
    """Make the current stream wait for the group's last call, if that was on another stream."""
    if device.type != "cuda":
        return
    stream = find_current(device)
    if stream is not cache.stream and not torch.cuda.is_current_stream_capturing():
        if cache.stream is not None and cache.stream != stream:
            stream.wait_stream(cache.stream)
        cache.stream = stream


def require_no_capture(device: torch.device) -> None:
    """ValueError while a CUDA graph is captured, where a first call would allocate or exchange something."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "the first call of a size allocates memory that all ranks share, which a CUDA graph cannot hold: call "
            "the operator once with these shapes before the graph is captured"
        )


def count_product_flops(x: torch.Size, weight: torch.Size) -> int:
    """The FLOPs of x [m, k] times weight [n, k]."""
    return 2 * x[0] * weight.numel()


def count_bytes(*shape: int, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
