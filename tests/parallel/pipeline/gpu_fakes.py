# SPDX-License-Identifier: Apache-2.0
"""The carriers of GPUs on CPU ranks: copies that end late and out of step, as a GPU's do, and gloo in NCCL's place."""

import contextlib
import random
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from stretto.memory import allocate
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

    def empty(self, channel, shape, dtype):
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return torch.empty(num_bytes, dtype=torch.uint8).fill_(99).view(dtype).view(shape)

    def copy(self, channel, pairs, after):
        self._last[channel] = LateEvent(pairs, self._draw.randrange(4), self._last.get(channel))
        return self._last[channel]


class LateEvent:
    """The end of one copy; those of a channel end in order, as on a stream."""

    # Two threads ask for it: one that frees the slot then, and one that takes the message. Each copies once.
    _lock = threading.RLock()

    def __init__(self, pairs, queries, before):
        self._pairs, self._queries, self._before = pairs, queries, before

    def query(self):
        with self._lock:
            self._queries -= 1
            if self._queries < 0:
                self.synchronize()
            return self._pairs is None

    def synchronize(self):
        with self._lock:
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


class FakeNCCL:
    """A communicator of NCCL made of gloo's: sends and receives block until both have come."""

    class Options:
        _timeout = timedelta(seconds=1)

    def __init__(self, store, rank, size, options):
        assert options._timeout > timedelta(days=1)  # torch's watchdog would end the process
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=20))
        self.send, self.recv = self._gloo.send, self._gloo.recv

    def abort(self):
        for peer in range(2):
            with contextlib.suppress(RuntimeError):
                self._gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, 1).wait(timedelta(milliseconds=1))


class FakeEvent:
    """Everything that was launched has ended."""

    def __init__(self, blocking=False):
        pass

    def record(self, stream=None):
        return self

    def wait(self, stream):
        pass

    def synchronize(self):
        pass


class FakeNCCLCarrier(NCCLCarrier):
    """As its base class, between CPU ranks, in whose processes streams and NCCL are replaced while it is open."""

    def __init__(self, group=None, device="cpu"):
        self._fakes = contextlib.ExitStack()
        patch = self._fakes.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        patch.setattr(torch.cuda, "Event", FakeEvent)
        for name in ("device", "stream"):
            patch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
        super().__init__(group, device)

    def close(self):
        super().close()
        self._fakes.close()

    def _make_ready(self, tensors, event):
        return tensors

    def _check_device(self, device):
        pass

    def _make_staging(self):
        return SimpleNamespace(record=FakeEvent)

    def _is_data(self, layout):
        return layout.num_bytes >= SMALLEST_OF_GPU
