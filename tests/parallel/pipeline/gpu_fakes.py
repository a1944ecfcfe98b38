# SPDX-License-Identifier: Apache-2.0
"""The carriers of GPUs on CPU ranks: copies that end late and out of step, as a GPU's do, and gloo in NCCL's place."""

import contextlib
import random
from datetime import timedelta

import torch
import torch.distributed as dist

from stretto.memory import allocate
from stretto.parallel.pipeline.message_format import as_bytes
from stretto.parallel.pipeline.nccl_carrier import NCCLCarrier
from stretto.parallel.pipeline.symmetric_memory_carrier import SymmetricMemoryCarrier

SMALLEST_OF_GPU = 200  # bytes: larger tensors stand for those on a GPU


class LateCopies:
    """Copies that take place when their end is asked for the last time: a slot that is reused early is found."""

    def __init__(self):
        self._draw = random.Random(7)
        self._last = {}

    def ready(self):
        return None

    def empty(self, channel, layout):
        return torch.empty(layout.num_bytes, dtype=torch.uint8).fill_(99).view(layout.dtype).view(layout.shape)

    def copy(self, channel, pairs, after):
        self._last[channel] = LateEvent(pairs, self._draw.randrange(4), self._last.get(channel))
        return self._last[channel]


class LateEvent:
    """The end of one copy; those of a channel end in order, as on a stream."""

    def __init__(self, pairs, queries, before):
        self._pairs, self._queries, self._before = pairs, queries, before

    def query(self):
        self._queries -= 1
        if self._queries < 0:
            self.synchronize()
        return self._pairs is None

    def synchronize(self):
        if self._before is not None:
            self._before.synchronize()
            self._before = None
        for target, source in self._pairs or ():
            target.copy_(source)
        self._pairs = None


class LateCarrier(SymmetricMemoryCarrier):
    """As its base class, with tensors in host memory instead of a GPU's."""

    def __init__(self, group=None, device="cpu", **options):
        super().__init__(group, device, **({"data_slot_bytes": 1 << 16, "slots": 3} | options))

    def _check_device(self, device):
        pass

    def _make_copies(self):
        return LateCopies()

    def _allocate_data(self, num_bytes):
        return allocate(num_bytes, self.group)

    def _is_data(self, layout):
        return layout.num_bytes >= SMALLEST_OF_GPU

    def _make_ready(self, tensors, event):
        if event is not None:
            event.synchronize()
        return tensors


class FakeLink:
    """A direction of NCCL, made of gloo's sends and receives of two ranks, which block until both have come."""

    def __init__(self, store, rank):
        self._gloo = dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=20))

    def send(self, tensors, ready):
        for tensor in tensors:
            self._gloo.send([as_bytes(tensor)], 1, 0).wait()

    def receive(self, layouts):
        tensors = [torch.empty(layout.shape, dtype=layout.dtype) for layout in layouts]
        for tensor in tensors:
            if tensor.nbytes:
                self._gloo.recv([as_bytes(tensor)], 0, 0).wait()
        return tensors, None

    def abort(self):
        with contextlib.suppress(RuntimeError):
            self._gloo.recv([torch.empty(1, dtype=torch.uint8)], 0, 1).wait(timedelta(milliseconds=1))
        with contextlib.suppress(RuntimeError):
            self._gloo.recv([torch.empty(1, dtype=torch.uint8)], 1, 1).wait(timedelta(milliseconds=1))


class FakeStaging:
    """Events of tensors that are on the host already."""

    def record(self):
        return self

    def synchronize(self):
        pass


class FakeNCCLCarrier(NCCLCarrier):
    """As its base class, between CPU ranks."""

    def __init__(self, group=None, device="cpu"):
        super().__init__(group, device)

    def _check_device(self, device):
        pass

    def _make_staging(self):
        return FakeStaging()

    def _is_data(self, layout):
        return layout.num_bytes >= SMALLEST_OF_GPU

    def _make_link(self, source, destination):
        store = dist.PrefixStore(f"{self._topic} link {source} {destination}", self._store)
        return FakeLink(store, 0 if self.rank == source else 1)
