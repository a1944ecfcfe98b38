"""A verified schedule as one kernel on this GPU, for calls on the current stream."""

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stretto.collectives.executor.cuda.lanes import Lanes, lower_to_lanes
from stretto.collectives.executor.cuda.nvrtc import load_or_compile
from stretto.collectives.executor.cuda.source import MAX_THREADS, Variant, parameter_names, write_source
from stretto.collectives.executor.cuda.workspace import MAX_SIMPLE_MAILBOXES, Workspace
from stretto.collectives.executor.layout import Layout, find_layout
from stretto.collectives.schedule import Schedule

DATA_BYTES = {"LL": 8, "LL128": 15, "Simple": 16}
"""Of 16 bytes of a mailbox, those that are data."""
_ALIGNMENT = 16


class LaneKernel:
    """Runs a schedule on one rank, every thread a lane (see `lanes`). All ranks make and call it in the same order.

    in_place: whether it is called with one tensor for input and output. ValueError for a schedule that is made for
    another number of ranks, or cannot run so.
    """

    def __init__(self, schedule: Schedule, workspace: Workspace, variant: Variant, *, in_place: bool) -> None:
        if schedule.collective.ranks != workspace.world_size:
            raise ValueError(
                f"the schedule {schedule.name} is made for {schedule.collective.ranks} ranks, the group has "
                f"{workspace.world_size}"
            )
        self.name = schedule.name
        self.workspace = workspace
        self.variant = variant
        self.lanes = lower_to_lanes(schedule, in_place=in_place)
        if variant.protocol == "Simple" and self.lanes.mailboxes > MAX_SIMPLE_MAILBOXES:
            raise ValueError(
                f"{schedule.name} has {self.lanes.mailboxes} messages to a rank: Simple takes {MAX_SIMPLE_MAILBOXES}"
            )
        self._itemsize = getattr(torch, variant.dtype).itemsize
        block_chunks = find_layout(self.lanes.collective, 0, None).block_chunks
        source = write_source(self.lanes, workspace.rank, block_chunks, variant)
        major, minor = torch.cuda.get_device_capability(workspace.device)
        self._function = _Function(load_or_compile(source, f"sm_{major}{minor}"), parameter_names(workspace.world_size))
        region = workspace.regions[variant.protocol]
        self._half = region.half
        program = self.lanes.ranks[workspace.rank]
        self._senders = {receive.message: receive.peer for level in program.levels for receive in level.receives}
        fixed = {f"peer_{rank}": address for rank, address in enumerate(workspace.peers)}
        fixed |= {"state": workspace.state.data_ptr(), "report": workspace.report.data_ptr(), "limit": workspace.limit}
        self._function.set(**fixed, region=region.start, half=region.half)
        self._sizes: dict[tuple[int, int | None], tuple[int, int]] = {}
        self._last: tuple[int, int | None] | None = None
        self.threads = 256
        self.max_blocks = 128

    def mailbox_bytes(self, chunk_bytes: int) -> int:
        """What one message takes."""
        return 16 * self._slots(chunk_bytes)

    def fits(self, input_elements: int, output_elements: int | None) -> bool:
        """Whether the mailboxes are large enough."""
        chunk = self._layout(input_elements, output_elements).chunk_elements * self._itemsize
        return self.mailbox_bytes(chunk) * self.lanes.mailboxes <= self._half

    def __call__(self, input: Tensor, output: Tensor | None = None) -> None:
        """Run it on flat contiguous tensors: `output` is None in place, where `input` is the one that holds both.

        ValueError for sizes that do not fit, PeerError if an earlier call was given up.
        """
        self.workspace.check(self.name, self._senders)
        sizes = input.numel(), None if output is None else output.numel()
        if sizes != self._last:
            self._resize(input, sizes)
        target = input if output is None else output
        self._function.set(input=input.data_ptr(), output=target.data_ptr())
        self._function.launch(self._blocks, self.threads, torch.cuda.current_stream().cuda_stream)

    def _resize(self, input: Tensor, sizes: tuple[int, int | None]) -> None:
        layout = self._layout(*sizes)
        chunk_bytes = layout.chunk_elements * self._itemsize
        slots = self._slots(chunk_bytes)
        if 16 * slots * self.lanes.mailboxes > self._half:
            raise ValueError(
                f"{self.name} by {self.variant.protocol} needs {self.lanes.mailboxes} mailboxes of {16 * slots} bytes, "
                f"of {self._half} bytes that there are"
            )
        self._function.set(
            stride=16 * slots, block_bytes=layout.block_elements * self._itemsize, chunk_bytes=chunk_bytes, slots=slots
        )
        per_block = self.threads * self.variant.unroll
        self._blocks = max(1, min(-(-slots // per_block), self.max_blocks))
        self._last = sizes

    def _slots(self, chunk_bytes: int) -> int:
        """The places of 16 bytes that a chunk takes in a mailbox."""
        if self.variant.protocol == "LL128":
            lines = -(-chunk_bytes // 120)
            return -(-lines // 4) * 32  # whole warps of four lines
        return -(-chunk_bytes // DATA_BYTES[self.variant.protocol])

    def _layout(self, input_elements: int, output_elements: int | None) -> Layout:
        """Chunks that begin at multiples of 16 bytes where the collective leaves the choice."""
        layout = find_layout(self.lanes.collective, input_elements, output_elements)
        per_access = _ALIGNMENT // self._itemsize
        rounded = -(-layout.chunk_elements // per_access) * per_access
        if layout.block_chunks == 1 or rounded == layout.chunk_elements:
            return layout
        return align(self.lanes, layout, rounded)


def align(lanes: Lanes, layout: Layout, chunk_elements: int) -> Layout:
    """The layout with chunks of that size, if the collective moves none to a place of another length."""
    aligned = replace(layout, chunk_elements=chunk_elements)
    collective = lanes.collective
    for rank in range(collective.ranks):
        for index in range(collective.output_chunks):
            for _, given in collective.expected(rank, index) or ():
                if given % layout.block_chunks != index % layout.block_chunks:
                    return layout
    return aligned


class _Function:
    """A kernel whose parameters, all of 8 bytes, are kept between launches: only what changes is written."""

    def __init__(self, cubin: bytes, names: list[str]) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, ObjectCode

        Device(torch.cuda.current_device()).set_current()
        self._code = ObjectCode.from_cubin(cubin)
        self._kernel = self._code.get_kernel("run")
        self._handle = self._kernel.handle
        self._launch = driver.cuLaunchKernel
        self._error_of = driver.cuGetErrorString
        self._at = {name: index for index, name in enumerate(names)}
        self._values = (ctypes.c_uint64 * len(names))()
        addresses = [ctypes.addressof(self._values) + 8 * index for index in range(len(names))]
        self._pointers = (ctypes.c_void_p * len(names))(*addresses)
        self._parameters = ctypes.addressof(self._pointers)

    def set(self, **values: int) -> None:
        """Set parameters by name."""
        for name, value in values.items():
            self._values[self._at[name]] = value

    def launch(self, blocks: int, threads: int, stream: int) -> None:
        """Launch it. RuntimeError with CUDA's words."""
        result: Any = self._launch(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, self._parameters, 0)
        if result[0] != 0:
            raise RuntimeError(f"a kernel was not launched: {self._error_of(result[0])[1].decode()}")


assert MAX_THREADS >= 256
