# SPDX-License-Identifier: Apache-2.0
"""Lets several ranks share one GPU, for tests: `STRETTO_SHARE_GPUS=1`, set before the ranks start.

NCCL refuses to use a GPU twice, so the group's backend is gloo for GPU tensors too; only this module knows that. gloo
implements only some collectives for GPU tensors, and torch 2.11's functional collectives (`torch.ops._c10d_functional`,
which DTensor uses) end the process with it. Therefore `install` registers kernels with torch's dispatcher for the
device type CUDA, which stage a collective on the host:

    dist.all_reduce(x on the GPU) -> torch's dispatcher -> kernel of `_HostStagingKernels`
        1. copies the tensors to the host                      (`_to_host`)
        2. runs the same operator there, on the same group     (redispatch with the key CPU: gloo)
        3. waits for it, and copies the results back           (`_copy_back`, `_to_device`)

All callers of collectives are covered without knowing it: `torch.distributed`, DTensor, DistributedDataParallel, FSDP2
and compiled graphs.

Such a collective blocks the host: its Work is complete when the call returns (only a receive runs in a thread of its
own, so that ranks may post receives before sends). A CUDA graph cannot capture it. Stretto's own kernels need none of
this: they share memory on one GPU as they do between GPUs, with TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, which
`install` sets.
"""

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from stretto.quantities import read_switch

SWITCH = "STRETTO_SHARE_GPUS"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_libraries: list[torch.library.Library] = []  # registrations live as long as these objects


# Settings of a job whose ranks may share GPUs.


def is_enabled() -> bool:
    """Check whether ranks may share GPUs: STRETTO_SHARE_GPUS is 1."""
    return read_switch(SWITCH)


def suffix() -> str:
    """Suffix of the machine's name in stores of measured times, which must not be used where each rank has a GPU."""
    return ", GPUs shared by ranks" if is_enabled() else ""


def default_backend(device_type: str) -> str:
    """The `backend` for `init_process_group` in a job whose tensors are on such devices ("cpu" or "cuda")."""
    if device_type != "cuda":
        return "gloo"
    if not is_enabled():
        return "cpu:gloo,cuda:nccl"
    install()
    return "cpu:gloo,cuda:gloo"


def choose_gpu(local_rank: int) -> int:
    """The GPU index for a machine's `local_rank`-th rank: its own one or, if ranks share GPUs, round-robin.

    ValueError if there is no GPU for it.
    """
    count = torch.cuda.device_count()
    if is_enabled() and count > 0:
        return local_rank % count
    if local_rank >= count:
        raise ValueError(
            f"this is local rank {local_rank}, but the machine has {count} GPUs: start one rank a GPU"
            + (f", or for a test set {SWITCH}=1, by which ranks share GPUs" if count else "")
        )
    return local_rank


def runs_on_gpus() -> bool:
    """Check whether the group of all ranks has a backend for GPU tensors: NCCL, or gloo if ranks share GPUs."""
    config = str(dist.get_backend_config())
    return "nccl" in config or (is_enabled() and torch.cuda.is_available() and "cuda:" in config)


def barrier(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Wait on the host until all ranks have arrived and their current streams have finished all earlier work."""
    if device.type != "cuda":
        dist.barrier(group=group)
    elif not is_enabled():
        dist.barrier(group=group, device_ids=[device.index])
    else:
        torch.cuda.current_stream(device).synchronize()  # as NCCL's barrier, a kernel, would
        dist.barrier(group=group)


# Registering the kernels. The first argument of each c10d operator is its output.

_REDUCTIONS = (
    "allreduce_",
    "allreduce_coalesced_",
    "reduce_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
)
_MOVES = (
    "broadcast_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "alltoall_base_",
    "gather_",
    "scatter_",
    "recv_any_source_",
)
_FUNCTIONAL_REDUCTIONS = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced",
)
_FUNCTIONAL_MOVES = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
)


def install(device_key: str = "CUDA", host_key: str = "CPU") -> None:
    """Stage collectives on GPU tensors on the host, in this process, from now on. Repeated calls have no effect.

    device_key, host_key: the dispatch keys of the two kinds of devices; a test without a GPU passes other ones.
    """
    if _libraries:
        return
    os.environ.setdefault(OVERLAPPING, "1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")  # replacing kernels is the purpose
        collectives = torch.library.Library("c10d", "IMPL")
        functional = torch.library.Library("_c10d_functional", "IMPL")
        kernels = _HostStagingKernels(device_key, host_key)
        for name in (*_REDUCTIONS, *_MOVES):
            op = getattr(torch.ops.c10d, name).default
            collectives.impl(op, kernels.collective(op, is_reduction=name in _REDUCTIONS), device_key)
        for name, make in (
            ("alltoall_", kernels.all_to_all_of_lists),
            ("send", kernels.send),
            ("recv_", kernels.receive),
            ("barrier", kernels.barrier),
        ):
            op = getattr(torch.ops.c10d, name).default
            collectives.impl(op, make(op), device_key)
        for name in (*_FUNCTIONAL_REDUCTIONS, *_FUNCTIONAL_MOVES):
            op = getattr(torch.ops._c10d_functional, name).default
            functional.impl(op, kernels.functional(op, is_reduction=name in _FUNCTIONAL_REDUCTIONS), device_key)
        _libraries.extend((collectives, functional))
        tensors = torch.library.Library("_dtensor", "IMPL")
        op = torch.ops._dtensor.shard_dim_alltoall.default
        tensors.impl(op, kernels.functional(op, is_reduction=False), device_key)
        _libraries.append(tensors)


def uninstall() -> None:
    """Unregister what `install` has registered, for tests."""
    for library in _libraries:
        library._destroy()
    _libraries.clear()


class _HostStagingKernels:
    """The kernels that `install` registers. Each gets the operator's arguments as the dispatcher passes them."""

    def __init__(self, device_key: str, host_key: str) -> None:
        self.device = torch.device(device_key.lower())
        self.host_keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, host_key))

    def collective(self, op: Any, *, is_reduction: bool) -> Callable[..., Any]:
        """Make the kernel for a c10d operator whose first argument is its output."""
        group_index = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "process_group")

        def kernel(*args: Any) -> Any:
            if not self._is_staged(op, dist.ProcessGroup.unbox(args[group_index])):
                return op.redispatch(self.host_keys, *args)
            staged = [_to_host(arg, is_reduction) for arg in args[:group_index]]
            returned = op.redispatch(self.host_keys, *staged, *args[group_index:])
            work = returned[-1] if isinstance(returned, tuple) else returned
            dist.Work.unbox(work).wait()
            _copy_back(args[0], staged[0])
            return (args[0], work) if isinstance(returned, tuple) else work

        return kernel

    def all_to_all_of_lists(self, op: Any) -> Callable[..., Any]:
        """Make the kernel for `alltoall_`, which torch 2.11's gloo lacks: concatenates the lists and passes sizes."""
        single = torch.ops.c10d.alltoall_base_.default

        def kernel(outputs: list[Tensor], inputs: list[Tensor], group: Any, *options: Any) -> Any:
            if not self._is_staged(op, dist.ProcessGroup.unbox(group)):
                return op.redispatch(self.host_keys, outputs, inputs, group, *options)
            sent = torch.cat([tensor.reshape(-1) for tensor in _to_host(inputs, False)])
            parts = _to_host(outputs, False)
            taken = torch.cat([tensor.reshape(-1) for tensor in parts])
            sizes = [tensor.numel() for tensor in parts]
            sent_sizes = [tensor.numel() for tensor in _to_host(inputs, False)]
            work = single.redispatch(self.host_keys, taken, sent, group, sizes, sent_sizes, *options)
            dist.Work.unbox(work).wait()
            _copy_back(outputs, [one.view(part.shape) for one, part in zip(taken.split(sizes), parts, strict=True)])
            return outputs, work

        return kernel

    def send(self, op: Any) -> Callable[..., Any]:
        """Make the kernel for `send`: gloo keeps the copy on the host until its Work has ended."""

        def kernel(tensors: list[Tensor], group: Any, *options: Any) -> Any:
            if self._is_staged(op, dist.ProcessGroup.unbox(group)):
                tensors = _to_host(tensors, False)
            return op.redispatch(self.host_keys, tensors, group, *options)

        return kernel

    def receive(self, op: Any) -> Callable[..., Any]:
        """Make the kernel for `recv_`: a thread waits for the message and copies it, so this rank can send."""

        def kernel(tensors: list[Tensor], group: Any, *options: Any) -> Any:
            if not self._is_staged(op, dist.ProcessGroup.unbox(group)):
                return op.redispatch(self.host_keys, tensors, group, *options)
            before = self._record_event()
            staged = _to_host(tensors, False)
            returned = op.redispatch(self.host_keys, staged, group, *options)
            work = returned[-1] if isinstance(returned, tuple) else returned
            ended: torch.futures.Future[list[Tensor]] = torch.futures.Future()

            def finish() -> None:
                try:
                    dist.Work.unbox(work).wait()
                    self._copy_after(before, tensors, staged)
                    ended.set_result(tensors)
                except Exception as error:  # noqa: BLE001  (any exception must reach the waiting caller)
                    ended.set_exception(error)  # type: ignore[arg-type]

            threading.Thread(target=finish, name="stretto-receive", daemon=True).start()
            return c10d._create_work_from_future(ended).boxed()  # type: ignore[attr-defined]

        return kernel

    def barrier(self, op: Any) -> Callable[..., Any]:
        """Make the kernel for a barrier for which torch has chosen the GPU."""

        def kernel(tensor: Tensor, group: Any, device_ids: Any = (), *options: Any) -> Any:
            if not self._is_staged(op, dist.ProcessGroup.unbox(group)):
                return op.redispatch(self.host_keys, tensor, group, list(device_ids), *options)
            return op.redispatch(self.host_keys, tensor.cpu(), group, [], *options)

        return kernel

    def functional(self, op: Any, *, is_reduction: bool) -> Callable[..., Any]:
        """Make the kernel for a functional collective. Its result is complete on return; `wait_tensor` does nothing."""
        names = [argument.name for argument in op._schema.arguments]
        group_index = names.index("group_name")
        written = [argument.name for argument in op._schema.arguments if argument.alias_info is not None]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            if not self._is_staged(op, _resolve(args[group_index])):
                return op.redispatch(self.host_keys, *args, **kwargs)
            staged = {
                name: _to_host(value, is_reduction) if _holds_tensors(value) else value
                for name, value in arguments.items()
            }
            positional = [staged.pop(name) for name in names[: len(args)]]
            result = op.redispatch(self.host_keys, *positional, **staged)
            wait = torch.ops._c10d_functional.wait_tensor
            result = [wait(one) for one in result] if isinstance(result, (list, tuple)) else wait(result)
            if written:
                _copy_back(arguments[written[0]], result)
                return arguments[written[0]]
            return _to_device(result, arguments[names[0]])

        return kernel

    def _is_staged(self, op: Any, group: dist.ProcessGroup) -> bool:
        """Decide whether to stage a call: the group's backend for this kind of device is gloo.

        The backend stretto stages its own calls, those that its kernels do not support. RuntimeError for a group of
        another backend, and for a call to stage while a CUDA graph is captured.
        """
        backend, on_host = (group._get_backend(torch.device(kind)) for kind in (self.device.type, "cpu"))
        if backend.name() == "gloo":
            if self.device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{op} goes by way of the host because {SWITCH} is set, which a CUDA graph cannot hold: capture "
                    "what only Stretto's kernels exchange, or use a GPU a rank"
                )
            return True
        if backend.name() == on_host.name():  # one backend object for both kinds of devices
            return False
        raise RuntimeError(
            f"{op}: {SWITCH} is set, and this group's backend for {self.device.type} is {backend.name()}: use "
            f"{default_backend('cuda')} or stretto, or unset {SWITCH}"
        )

    def _record_event(self) -> torch.cuda.Event | None:
        """An event after what has been enqueued on the current stream so far."""
        if not torch.cuda.is_available():
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _copy_after(self, before: torch.cuda.Event | None, tensors: list[Tensor], staged: list[Tensor]) -> None:
        """Copy to the device on a stream of this thread's own, after the event, and wait until that is done."""
        if before is None:
            _copy_back(tensors, staged)
            return
        with torch.cuda.device(tensors[0].device), torch.cuda.stream(torch.cuda.Stream()):
            before.wait()
            _copy_back(tensors, staged)
            torch.cuda.current_stream().synchronize()


def _resolve(group: Any) -> dist.ProcessGroup:
    """The group that a functional collective was given: by name or, since torch 2.13, the group itself."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return dist.ProcessGroup.unbox(group)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (list, tuple)) and bool(value) and all(_holds_tensors(one) for one in value)
    )


# Copies between device and host.

_GLOO_DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool,
    }
)  # fmt: skip


def _to_host(value: Any, is_reduction: bool) -> Any:
    """New contiguous tensors on the host in place of those of a tensor, a list, or a list of lists.

    If gloo does not support the dtype, data without a reduction is sent as bytes [..., itemsize], and integers that
    are added are sent as int32.
    """
    if isinstance(value, (list, tuple)):
        return [_to_host(one, is_reduction) for one in value]
    host: Tensor = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if host.dtype in _GLOO_DTYPES:
        return host
    if is_reduction:
        return host if host.is_floating_point() or host.is_complex() else host.to(torch.int32)
    return host.unsqueeze(-1).view(torch.uint8)


def _copy_back(target: Any, source: Any) -> None:
    """Copy what `_to_host` has made of `target` back into it."""
    if isinstance(target, (list, tuple)):
        for one, other in zip(target, source, strict=True):
            _copy_back(one, other)
        return
    target.detach().copy_(_as_dtype(source, target.dtype))


def _to_device(host: Any, like: Any) -> Any:
    """Convert a functional collective's results to the device and dtype of its inputs."""
    if isinstance(host, (list, tuple)):
        return [_to_device(one, given) for one, given in zip(host, like, strict=True)]
    return _as_dtype(host, like.dtype).to(like.device)


def _as_dtype(host: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor that was sent unchanged, as bytes, or as int32 back to this dtype."""
    if host.dtype == dtype:
        return host
    return host.to(dtype) if host.dtype == torch.int32 else host.view(dtype).squeeze(-1)
