# SPDX-License-Identifier: Apache-2.0
"""Brings the weights of a model that trains, on any grid, to vLLM's workers: vLLM's weight transfer, backend "stretto".

    VLLM_PLUGINS=stretto vllm serve MODEL --weight-transfer-config '{"backend": "stretto"}'
    sender = WeightSender(model, HTTPVLLMWeightSyncClient(url), workers=4)  # on each rank of the job that trains
    sender.send()  # after a step

A worker receives what its model's loaders read of each tensor, from the ranks that hold it, and keeps it in host
memory, 2 bytes a number, so that a patch (`weights.WeightChanges`) can follow. vLLM then loads it as it does a
checkpoint, with its own names, packing and quantization, into the storage that its CUDA graphs read.

Which parts its loaders read is found by running them once on tensors of the meta device, before anything is sent.
"""

import functools
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stretto.inference.weights import HeldBox, HeldWeight, WeightChanges, exchange, patch_weights, tell, weights_of
from stretto.memory import PeerError, store_all_gather
from stretto.quantities import require_whole

_POLL = 0.005  # seconds
_stores: list[dist.TCPStore] = []  # rank 0's, for other ranks that read why a sender has failed


class Client(Protocol):
    """The calls that `WeightSender` makes of a server: vLLM's `HTTPVLLMWeightSyncClient`, say."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    def finish_weight_update(self) -> None: ...


@dataclass
class InitInfo:
    """The place where a server's workers meet the ranks that train. token: of this meeting. timeout: seconds."""

    address: str
    port: int
    token: str
    trainers: int
    workers: int
    timeout: float
    through_host: bool


@dataclass
class UpdateInfo:
    """The number of an update, from 1 on, and whether it is of patches."""

    number: int
    has_patches: bool


class WeightSender:
    """Sends a model's weights to a vLLM server: all of them, or, with `changes_only`, what has changed since.

    model: one that `parallelize` has returned, on any grid, or a plain one in a job of one rank. client: calls the
    server, on rank 0. workers: the server's, tensor times pipeline times data parallel. address: rank 0's, as workers
    reach it. dtype: the server's, to which parameters are rounded. through_host: send from and to GPUs by gloo, too
    (NCCL cannot where a worker shares a GPU with a rank that trains). timeout: seconds in which all must answer.

    Collective over the job. Raises ValueError for weights that the server's model does not take, RuntimeError for what
    the server has raised, PeerError that names the ranks and workers that do not answer.
    """

    def __init__(
        self,
        model: nn.Module,
        client: Client,
        workers: int,
        *,
        address: str = "127.0.0.1",
        dtype: torch.dtype = torch.bfloat16,
        changes_only: bool = False,
        through_host: bool = False,
        timeout: float = 300.0,
    ) -> None:
        workers = require_whole("workers", workers, rest=", as many as the server has")
        if changes_only:
            WeightChanges(nn.Module(), dtype)  # refuses dtypes that patches do not have
        self._model, self._client, self._dtype, self._number = model, client, dtype, 0
        self._changes_only = changes_only
        self._changes: WeightChanges | None = None
        self._calls = ThreadPoolExecutor(1)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        listener, place = None, "[]"
        if rank == 0:
            listener = socket.create_server((address, 0), backlog=128)
            place = json.dumps([secrets.token_hex(8), listener.getsockname()[1]])
        if (world := dist.group.WORLD) is not None and ranks > 1:
            place = store_all_gather(place, world, "stretto vllm", timeout)[0]
        token, port = json.loads(place)
        info = InitInfo(address, port, token, ranks, workers, timeout, through_host)
        self._meeting = _Meeting(info, rank, next(model.parameters()).device, listener)
        answer = self._call(lambda: client.init_weight_transfer_engine(asdict(info)))
        held = weights_of(model)
        dtypes = {
            name: str(dtype if weight.is_parameter else weight.dtype).removeprefix("torch.")
            for name, weight in held.items()
        }
        all_held = self._meeting.gather("held", json.dumps([tell(held), dtypes]), answer)
        self._dtypes = _parse_dtypes(all_held)
        all_wanted = self._meeting.gather("wanted", "{}", answer)
        self._everyone = [
            [json.loads(own)[0], json.loads(want)] for own, want in zip(all_held, all_wanted, strict=True)
        ]
        self._meeting.finish("init", answer)
        taken = {name for _, wanted in self._everyone for name, (_, boxes) in wanted.items() if boxes}
        if left := sorted(self._dtypes.keys() - taken):
            names = ", ".join(left[:3])
            raise ValueError(f"the server's model does not take {names} ({len(left)} of {len(self._dtypes)} weights)")

    def send(self, *, everything: bool = False) -> int:
        """Send the weights of now, and return once the server has them: the bytes that this rank has sent.

        everything: all weights, with `changes_only`, too; as the first time, and after an error. Collective over the
        job.
        """
        self._number += 1
        patch = None if everything or self._changes is None else self._changes.make_patch()
        answer = self._call(partial(self._update, UpdateInfo(self._number, patch is not None)))
        self._meeting.gather(f"update {self._number}", str(len(patch or b"")), answer)
        before = self._meeting.sent
        if patch is not None:
            self._meeting.send_patch(patch)
        else:
            self._meeting.exchange(self._everyone, weights_of(self._model), {}, self._dtypes)
            if self._changes_only:
                self._changes = WeightChanges(self._model, self._dtype)
        self._meeting.finish(f"update {self._number}", answer)
        return self._meeting.sent - before

    def _call(self, call: Callable[[], None]) -> "Future[None] | None":
        """Call the server, on rank 0, while this job meets its workers."""
        return self._calls.submit(call) if self._meeting.rank == 0 else None

    def _update(self, info: UpdateInfo) -> None:
        self._client.start_weight_update()
        self._client.update_weights(asdict(info))
        self._client.finish_weight_update()


class _Meeting:
    """The ranks of a job that trains, which come first, and a server's workers, in one group."""

    def __init__(self, info: InitInfo, rank: int, device: torch.device, listener: socket.socket | None = None) -> None:
        descriptor: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
        limit = timedelta(seconds=info.timeout)
        store = dist.TCPStore(
            info.address, info.port, is_master=rank == 0, timeout=limit, wait_for_workers=False, **descriptor
        )
        if rank == 0:
            _stores.append(store)
        self._store = dist.PrefixStore(info.token, store)
        self.info, self.rank, self.sent = info, rank, 0
        self._size, self._device = info.trainers + info.workers, device
        self._is_staged = info.through_host or device.type == "cpu"
        self._group: Any = None

    def gather(self, topic: str, text: str, answer: "Future[None] | None" = None) -> list[str]:
        """All-gather a string, by the host. answer: rank 0's call to the server, whose failure ends the wait of all."""
        self._store.set(f"{topic} {self.rank}", text)
        for rank in range(self._size):
            self._wait(topic, f"{topic} {rank}", answer)
        return [self._store.get(f"{topic} {rank}").decode() for rank in range(self._size)]

    def finish(self, topic: str, answer: "Future[None] | None") -> None:
        """Wait, on ranks that train, until rank 0's call to the server has returned. Raises what it has raised."""
        if answer is None:
            self._wait(topic, f"{topic} done")
            return
        if error := answer.exception(self.info.timeout):
            raise self.report(topic, error) from error
        self._store.set(f"{topic} done", "")

    def exchange(self, everyone: Any, held: Any, wanted: Any, dtypes: Mapping[str, torch.dtype]) -> None:
        """See `weights.exchange`."""
        exchange(everyone, self.rank, held, wanted, dtypes, self._device, self._all_to_all)

    def send_patch(self, patch: bytes) -> None:
        """Send a rank's patch to all workers."""
        sizes = [0] * self.info.trainers + [len(patch)] * self.info.workers
        sent = torch.frombuffer(bytearray(patch), dtype=torch.uint8).repeat(self.info.workers)
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._all_to_all(nothing, sent.to(self._device), [0] * self._size, sizes)

    def receive_patches(self, lengths: Sequence[int]) -> list[bytes]:
        """Receive the patches of all ranks that train."""
        received = torch.empty(sum(lengths), dtype=torch.uint8, device=self._device)
        self._all_to_all(received, received[:0].clone(), lengths, [0] * self._size)
        return [part.cpu().numpy().tobytes() for part in received.split(list(lengths))[: self.info.trainers]]

    def _connect(self) -> Any:
        """Connect all ranks, at their first exchange."""
        limit = timedelta(seconds=self.info.timeout)
        if self._is_staged:
            return dist.ProcessGroupGloo(self._store, self.rank, self._size, timeout=limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        with torch.cuda.device(self._device):
            return dist.ProcessGroupNCCL(self._store, self.rank, self._size, options)

    def _all_to_all(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        self._group = self._group or self._connect()
        to, data = (received.cpu(), sent.cpu()) if self._is_staged else (received, sent)
        self._group.alltoall_base(to, data, received_sizes, sent_sizes, dist.AllToAllOptions()).wait()
        if to is not received:
            received.copy_(to)
        self.sent += len(sent)

    def _wait(self, topic: str, key: str, answer: "Future[None] | None" = None) -> None:
        deadline = time.monotonic() + self.info.timeout
        while not self._store.check([key]):
            if answer is not None and answer.done() and (error := answer.exception()):
                raise self.report(topic, error) from error
            if self._store.check([f"{topic} failed"]):
                raise RuntimeError(self._store.get(f"{topic} failed").decode())
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self._size) if not self._store.check([f"{topic} {rank}"])]
                names = [f"rank {r}" if r < self.info.trainers else f"worker {r - self.info.trainers}" for r in missing]
                raise PeerError(
                    f"{topic}: no answer within {self.info.timeout:g} s from {', '.join(names) or 'rank 0'}"
                )
            time.sleep(_POLL)

    def report(self, topic: str, error: BaseException) -> RuntimeError:
        """End the waits of all ranks for a topic, as a server or a worker has raised an error."""
        message = f"{topic}: the server has raised {type(error).__name__}: {error}"
        self._store.set(f"{topic} failed", message)
        return RuntimeError(message)


def _parse_dtypes(texts: Sequence[str]) -> dict[str, torch.dtype]:
    found = {}
    for name, text in ((name, text) for each in texts for name, text in json.loads(each)[1].items()):
        dtype = getattr(torch, text, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has the dtype {text!r}, which torch does not have; 'bfloat16' is one")
        found[name] = dtype
    return found


class _ReadParts(TorchDispatchMode):
    """Records which rectangles of placeholders (tensors on the meta device) a loader copies, in place of copying."""

    def __init__(self, placeholders: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._shapes = {name: tensor.shape for name, tensor in placeholders.items()}
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in placeholders.items()}
        self.boxes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: set() for name in placeholders}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            if (name := self._name_of(args[1])) is not None:
                self._add(name, _rectangle(args[1], self._shapes[name]))
            return args[0]
        result = func(*args, **(kwargs or {}))
        made = {self._name_of(each) for each in tree_leaves(result)}
        for name in {self._name_of(each) for each in tree_leaves((args, kwargs))} - made - {None}:
            self._add(name, None)  # computed on, not viewed
        return result

    def _add(self, name: str, box: Any) -> None:
        shape = tuple(self._shapes[name])
        self.boxes[name].add(box or ((0,) * len(shape), shape))

    def _name_of(self, value: Any) -> Any:
        return self._names.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) and value.is_meta else None


def _rectangle(view: Tensor, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of the part of a contiguous tensor that a view is; None if it is none, or in another order."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    left, offsets = view.storage_offset(), []
    for stride in strides:
        offsets.append(left // stride)
        left %= stride
    sizes = [1] * len(shape)
    own = {stride: dim for dim, stride in enumerate(strides) if shape[dim] > 1}
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size > 1:
            if stride not in own:
                return None
            sizes[own.pop(stride)] = size
    fits = all(first + size <= limit for first, size, limit in zip(offsets, sizes, shape, strict=True))
    return (tuple(offsets), tuple(sizes)) if fits else None


def _find_read_parts(
    model: nn.Module, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """Run a vLLM model's loaders on placeholders: the boxes that they read of each. The model is as before."""
    reload: Any = import_module("vllm.model_executor.model_loader.reload.layerwise")
    placeholders = {name: torch.empty(shape, dtype=dtypes[name], device="meta") for name, shape in shapes.items()}
    reader = _ReadParts(placeholders)
    reload.initialize_layerwise_reload(model)  # which keeps the tensors in use, and gives loaders those of a checkpoint
    try:
        for module in model.modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = reload._get_original_loader(tensor)
        with reader:
            model.load_weights(iter(placeholders.items()))  # type: ignore[operator]
    finally:
        for module in model.modules():
            info = reload.get_layerwise_info(module)
            if info.can_load():
                reload._place_kernel_tensors(module, info)
                info.reset()
        model._do_torchao_reload = model._original_do_torchao_reload
    return reader.boxes


def __getattr__(name: str) -> Any:
    """vLLM finds the worker's engine by its name; it is made of vLLM's own class at first use."""
    if name == "WeightTransferEngine":
        return _make_engine()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _make_engine() -> type:
    base: Any = import_module("vllm.distributed.weight_transfer.base").WeightTransferEngine

    class WeightTransferEngine(base):
        """Receives weights from a `WeightSender`. Nothing is loaded before all of an update is here, and fits."""

        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        supports_draft_weight_update = False
        meeting: _Meeting | None = None

        def init_transfer_engine(self, info: InitInfo) -> None:
            config = self.parallel_config
            rank = info.trainers + config.data_parallel_index * config.world_size + config.rank
            self.meeting = meeting = _Meeting(info, rank, self.device)
            all_held = meeting.gather("held", "[{}, {}]")
            held = [json.loads(text)[0] for text in all_held]
            try:
                self.dtypes = _parse_dtypes(all_held)
                shapes = {name: tuple(shape) for told in held for name, (shape, _) in told.items()}
                boxes = _find_read_parts(self.model, shapes, self.dtypes)
            except BaseException as error:
                meeting.report("wanted", error)  # the other workers wait for this one, and the server for them
                raise
            self.weights = {
                name: HeldWeight(
                    shape,
                    self.dtypes[name],
                    False,  # its dtype is as the sender says
                    [
                        HeldBox(first, sizes, torch.empty(sizes, dtype=self.dtypes[name], device="cpu"))
                        for first, sizes in sorted(boxes[name])
                    ],
                )
                for name, shape in shapes.items()
            }
            self.everyone = [[told, {}] for told in held]
            for each, want in zip(self.everyone, meeting.gather("wanted", json.dumps(tell(self.weights))), strict=True):
                each[1] = json.loads(want)
            self.step: int | None = None

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()

        def receive_weights(self, info: UpdateInfo) -> None:
            meeting = self.meeting
            if meeting is None:
                raise RuntimeError("weights were sent before a WeightSender was made")
            lengths = [int(each) for each in meeting.gather(f"update {info.number}", "0")]
            if info.has_patches:
                self.step = patch_weights(self.weights, meeting.receive_patches(lengths), self.step)
            else:
                meeting.exchange(self.everyone, {}, self.weights, self.dtypes)
                self.step = 0
            reload: Any = import_module("vllm.model_executor.model_loader.reload.layerwise")
            reload.initialize_layerwise_reload(self.model)
            self.model.load_weights((name, self.whole(each)) for name, each in self.weights.items() if each.parts)
            reload.finalize_layerwise_reload(self.model, self.model_config)

        def whole(self, weight: HeldWeight) -> Tensor:
            """A tensor of the whole, whose numbers are right where the loaders read it."""
            tensor = torch.empty(weight.shape, dtype=weight.dtype, device=self.device)
            for first, sizes, numbers in weight.parts:
                tensor[tuple(slice(at, at + size) for at, size in zip(first, sizes, strict=True))] = numbers.to(
                    self.device
                )
            return tensor

        def start_weight_update(self) -> None:
            """Do nothing: an update that fails leaves the weights as they were."""

        def finish_weight_update(self) -> None:
            """Do nothing: `receive_weights` has loaded them."""

        def shutdown(self) -> None:
            self.meeting = None

    return WeightTransferEngine
