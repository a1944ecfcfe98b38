# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule on the processes of a group, one rank each, over shared memory."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from stretto.collectives.collective import Buffer
from stretto.collectives.executor.layout import Buffers, overlap
from stretto.collectives.executor.plan import DEFAULT_TILE_BYTES, ExecutionPlan, make_plan
from stretto.collectives.executor.rank_run import RankRun
from stretto.collectives.executor.turns import Coroutine, ExecutionError, list_waits, start_thread_blocks
from stretto.collectives.schedule import Schedule
from stretto.memory import Backoff, HostMemory, PeerError, allocate, exchange, find_own_rank, group_timeout

_SECONDS_BETWEEN_LOOKS = 0.1


def run_on_host(
    schedule: Schedule,
    input: Tensor,
    output: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    reduction: str | None = None,
    tile_bytes: int = DEFAULT_TILE_BYTES,
    slots: int | None = None,
    timeout: float | None = None,
) -> Tensor:
    """Run this rank's part of a schedule; all ranks of the group call it. Returns the output.

    input, output: contiguous CPU tensors of any shape, dtypes as in `plan.DTYPES`, laid out as torch.distributed has
    them. In place there is one tensor, `input`, with the collective's larger buffer (an all-gather's output, a
    reduce-scatter's input): it holds the input in its place before and the output, of which a flat view is returned,
    in its place after; its other contents depend on the schedule. Out of place, the input is not written. After an
    error the tensors that are written hold anything.

    group: a group of as many processes, all of this machine; None for all. reduction: "sum", "max", "min" or "prod",
    None for the schedule's own, or else the sum; partial sums are sent in the tensors' dtype, and fp16 and bf16 are
    added in fp32 and rounded at each step. tile_bytes: chunks are cut into tiles of so much, which thread blocks pass
    on one by one; slots: FIFO slots a connection, None for the protocol's; timeout: seconds without any step ended,
    None for the group's own limit.

    ValueError for what cannot run, before anything is allocated, and where ranks do not ask for the same;
    ExecutionError, which names what each thread block waits for, where the schedule comes to a stop, at once where a
    peer has died or failed; PeerError for ranks that do not come.
    """
    plan = _plan(schedule, input, output, reduction, tile_bytes, slots)
    rank, group_size = find_own_rank(group)
    timeout = group_timeout(group) if timeout is None else timeout
    if group_size != plan.collective.ranks:
        raise ValueError(f"{schedule.name} is for {plan.collective.ranks} ranks, and the group has {group_size}")
    _require_same(plan.describe(), rank, group, timeout)
    flat = input.detach().view(-1)
    buffers = Buffers(schedule, plan.collective, plan.layout, rank, flat, None if output is None else output.view(-1))
    with allocate(plan.buffer_bytes, group, signals=plan.signals, timeout=timeout) as memory:
        assert isinstance(memory, HostMemory)
        run = RankRun(plan, rank, memory, buffers)
        try:
            run_thread_blocks(run, timeout)
        except BaseException:
            for peer in range(group_size):
                memory.signal(peer, plan.gave_up)  # so that no peer waits for this rank any longer
            raise
    return buffers.finish()


def run_thread_blocks(run: RankRun, timeout: float) -> None:
    """Run all thread blocks of this rank to their end, a step each in turn.

    ExecutionError after `timeout` seconds without a step, or where a peer that is waited for has died or failed.
    """
    waiting, waiter = start_thread_blocks(run), _PeerWaiter(run, timeout)
    while waiting:
        advanced = [coroutine.advance() for coroutine in waiting]
        if any(advanced):
            waiting = [coroutine for coroutine in waiting if not coroutine.has_ended]
            waiter.reset()
        else:
            waiter.wait(waiting)


class _PeerWaiter:
    """Waits for other ranks, with pauses that leave them the core, up to a time limit and while they are alive."""

    def __init__(self, run: RankRun, timeout: float) -> None:
        self._run = run
        self._timeout = timeout
        self._backoff = Backoff(run.memory.pause)
        self.reset()

    def reset(self) -> None:
        """Start over: a step has ended."""
        self._backoff.reset()
        self._ended: set[int] = set()
        self._looked = 0.0

    def wait(self, waiting: Sequence[Coroutine]) -> None:
        """Pause; ExecutionError after the limit, or where a peer that is waited for has died or failed."""
        waited = self._backoff.pause()
        if waited > self._timeout:
            self._stop(waiting, f"no step has ended for {self._timeout:g} s: verify the schedule, with these slots")
        if waited - self._looked < _SECONDS_BETWEEN_LOOKS:
            return
        self._looked = waited
        memory = self._run.memory
        for coroutine in waiting:
            peer = self._run.awaited_peer(coroutine.number, coroutine.awaited) if coroutine.awaited else None
            if peer is not None:
                try:
                    memory.check(peer)
                except PeerError as error:
                    self._stop(waiting, str(error))
        failed = [rank for rank in range(memory.world_size) if memory.has_reached(rank, self._run.plan.gave_up, 1)]
        if failed:
            self._stop(waiting, f"rank {failed[0]} has failed")
        # A peer may have sent all its messages and ended. A message that a second look does not find never arrives.
        peers = {
            self._run.awaited_peer(coroutine.number, coroutine.awaited) for coroutine in waiting if coroutine.awaited
        }
        ended = {peer for peer in peers if peer is not None and memory.has_ended(peer)}
        if ended & self._ended:
            self._stop(waiting, f"the process of rank {min(ended & self._ended)} has ended")
        self._ended = ended

    def _stop(self, waiting: Sequence[Coroutine], why: str) -> None:
        plan = self._run.plan
        raise ExecutionError(
            f"{plan.schedule.name} stops on rank {self._run.rank} of {plan.collective.ranks} with {plan.slots} slots, "
            f"{why}:\n{list_waits(waiting)}"
        )


def _plan(
    schedule: Schedule, input: Tensor, output: Tensor | None, reduction: str | None, tile_bytes: int, slots: int | None
) -> ExecutionPlan:
    """Plan the run on these tensors. Raises ValueError for tensors that cannot be used."""
    for what, tensor in (("input", input), ("output", output)):
        if tensor is None:
            continue
        if tensor.device.type != "cpu":
            raise ValueError(f"the host executor takes CPU tensors: the {what} is on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"the {what} is not contiguous: use .contiguous()")
    if output is not None and output.dtype != input.dtype:
        raise ValueError(f"input and output have one dtype, not {str(input.dtype)[6:]} and {str(output.dtype)[6:]}")
    if output is not None and overlap(input, output):
        raise ValueError("input and output share memory: give one tensor, the larger one, to a schedule in place")
    in_place = output is None
    larger = Buffer.IN if schedule.collective.input_chunks >= schedule.collective.output_chunks else Buffer.OUT
    return make_plan(
        schedule,
        None if in_place and larger is Buffer.OUT else input.numel(),
        input.numel() if output is None and larger is Buffer.OUT else None if output is None else output.numel(),
        in_place=in_place,
        dtype=input.dtype,
        reduction=reduction,
        tile_bytes=tile_bytes,
        slots=slots,
    )


def _require_same(own: dict[str, object], rank: int, group: dist.ProcessGroup | None, timeout: float) -> None:
    """Raise ValueError if ranks do not run the same schedule on the same sizes."""
    for peer, theirs in enumerate(exchange(own, group, timeout, dict[str, object])):
        for what, value in own.items():
            if theirs.get(what) != value:
                raise ValueError(
                    f"all ranks must run the same: {what} is {value} on rank {rank} and {theirs.get(what)} on rank "
                    f"{peer}"
                )
