# SPDX-License-Identifier: Apache-2.0
"""A wait for another rank that fails on a GPU: nothing that came of it is used, and the next look raises PeerError.

A group's time limit is two seconds here, and kernels are compiled before by calls of another group of the same ranks.
"""

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import stretto  # noqa: F401  (makes the backend's name known)
from stretto import ops
from stretto.collectives import call_counts, install
from stretto.collectives.algorithms import find
from stretto.memory import PeerError, compilation, failures, shared_gpus
from stretto.ops.operator import _caches
from stretto.optim import AdamW
from stretto.optim.guard import guard
from stretto.parallel import CapturedStep
from stretto.train.checkpoint.storage import LocalBox, ShardedState
from tests.gpu.sharing import sampled
from tests.gpu.watched import run_watched
from tests.train.saving import save_state

Run = Callable[..., list[Any]]
Step = Callable[[], tuple[Tensor, ...]]

LIMIT = 2.0  # seconds that a wait of the groups under test may take
LONG = 120.0
CYCLES_OF_A_SECOND = 2_000_000_000  # at least as many as any GPU's clock makes
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.ranks(2, own=(2,), among=(2,))

FEW = ops.Blocks(16, 32, 64, 1, 4, 3, 12)
TILES = ops.Blocks(64, 64, 64, 2, 4, 3, 12)
OPERATORS: dict[str, tuple[str, ops.KernelConfig]] = {
    "one shot": ("matmul_all_reduce", ops.KernelConfig(blocks=FEW, exchange="packets")),
    "two shots": ("matmul_all_reduce", ops.KernelConfig(blocks=FEW, exchange="packets", shots=2)),
    "scattered packets": ("matmul_reduce_scatter", ops.KernelConfig(blocks=FEW, exchange="packets")),
    "pushed rows": (
        "all_gather_matmul",
        ops.KernelConfig(blocks=TILES, transfer="programs", movers=8, piece_bytes=4096),
    ),
    "copied rows": ("all_gather_matmul", ops.KernelConfig(blocks=TILES, transfer="copies", piece_bytes=4096)),
    "copied tiles": ("matmul_reduce_scatter", ops.KernelConfig(blocks=TILES, transfer="copies", piece_bytes=4096)),
}
COLLECTIVES = ("LL", "LL128", "Simple", "interpreter", "copies")


@contextlib.contextmanager
def groups(count: int) -> Iterator[list[dist.ProcessGroup]]:
    """So many groups of all ranks with the short time limit; afterwards their failures are gone with them."""
    compilation.ALLOWANCE = 0.0  # whatever was loaded before
    made = [dist.new_group(timeout=timedelta(seconds=LIMIT)) for _ in range(count)]
    try:
        yield made
        torch.cuda.synchronize()
        dist.barrier()
    finally:
        with contextlib.suppress(PeerError):  # it must not be raised again
            failures.check()
        while made:
            dist.destroy_process_group(made.pop())
        gc.collect()


def require_no_failure() -> None:
    """The failures have gone with their groups, and kernels of this process publish again."""
    gc.collect()
    try:
        failures.check()
        device = torch.device("cuda", torch.cuda.current_device())
        assert int(failures.failure_flag(device)) == 0
    finally:
        _caches.clear()  # so that, whatever was kept too long here, other tests are not harmed


def numbers_of(rank: int, *shape: int) -> Tensor:
    """Whole numbers, whose sums are exact, the same on whichever rank asks for them."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-3, 4, shape, generator=generator).float().cuda()


def call_operator(way: str, group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
    operator, plan = OPERATORS[way]
    out: Tensor = getattr(ops, operator)(x, weight, group, implementation=plan)
    return out


def operands_of(rank: int) -> tuple[Tensor, Tensor]:
    return numbers_of(rank, 16, 64), numbers_of(100 + rank, 64, 64)


def expect_of(way: str) -> Tensor:
    """Return what is right on this rank."""
    every = [operands_of(peer) for peer in range(2)]
    rank = dist.get_rank()
    if OPERATORS[way][0] == "all_gather_matmul":
        return torch.cat([x for x, _ in every]) @ every[rank][1].t()
    whole = sum((x @ weight.t() for x, weight in every), torch.zeros((), device="cuda"))
    return whole if OPERATORS[way][0] == "matmul_all_reduce" else whole.chunk(2)[rank]


def warm_up(way: str) -> None:
    """Compile a way's kernels, in a group that has time."""
    group = dist.new_group(timeout=timedelta(seconds=LONG))
    x, weight = operands_of(dist.get_rank())
    for _ in range(3):
        assert torch.equal(call_operator(way, group, x, weight), expect_of(way))
    failures.synchronize(x.device)
    dist.barrier()
    dist.destroy_process_group(group)


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """One call as a graph, whose replays ask nobody on the host."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph


# A training step past a stall.


class Training:
    """A linear layer on each rank's own batch, whose gradients are summed over the ranks by a kernel that waits.

    way: "packets" (an all-reduce) or "tiles" (a reduce-scatter, so that a rank updates its own rows alone).
    """

    def __init__(self, optimizer: str, way: str) -> None:
        torch.manual_seed(dist.get_rank())
        self.x, self.target = torch.randn(16, 64, device="cuda"), torch.randn(16, 32, device="cuda")
        self.weight = torch.nn.Parameter(numbers_of(7, 32, 64))
        self.identity = torch.eye(64, device="cuda")
        self.way, self.group = way, dist.group.WORLD
        if optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = AdamW([self.weight], lr=1e-2)
        else:
            self.optimizer = guard(torch.optim.SGD([self.weight], lr=1e-2, momentum=0.9, fused=True))

    def step(self) -> tuple[Tensor, ...]:
        """Forward, backward, the exchange and the optimizer's step."""
        loss = (torch.nn.functional.linear(self.x, self.weight) - self.target).square().mean()
        loss.backward()
        with torch.no_grad():
            gradient = self.weight.grad
            assert gradient is not None
            if self.way == "packets":
                gradient.copy_(call_operator("one shot", self.group, gradient, self.identity))
            else:
                own = call_operator("copied tiles", self.group, gradient, self.identity)
                gradient.zero_()
                gradient.chunk(2)[dist.get_rank()].copy_(own)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (loss.detach(),)

    def state(self) -> dict[str, Tensor]:
        """Copies of the weight and of all tensors of the optimizer's state."""
        torch.cuda.synchronize()
        state = self.optimizer.state[self.weight]
        kept = {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}
        return {"weight": self.weight.detach().clone()} | kept


def run_often(step: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        step()
        torch.cuda.synchronize()


def train_past_a_stall(out: Path, optimizer: str, way: str, stall: str) -> None:
    rank = dist.get_rank()
    training = Training(optimizer, way)
    training.group = dist.new_group(timeout=timedelta(seconds=LONG))
    for _ in range(2):
        training.step()  # compiles
    failures.synchronize(training.x.device)
    dist.destroy_process_group(training.group)
    with groups(1) as made:
        training.group = made[0]
        step = CapturedStep(training.step)
        try:
            for _ in range(6):
                step()
            failures.synchronize(training.x.device)
            before = training.state()
            dist.barrier()
            if rank == 0:
                step()
                torch.cuda.synchronize()
                looks: Sequence[Callable[[], Any]] = (step, failures.check, training.optimizer.step)
                for look in looks[: 2 if optimizer == "adamw" else 3]:
                    with pytest.raises(PeerError, match="waited in vain for rank 1"):
                        look()
                after = training.state()
                assert sorted(after) == sorted(before)
                changed = [name for name in before if not torch.equal(before[name], after[name])]
                assert not changed, f"the step whose wait failed has changed {changed}"
            elif stall == "on the device":
                torch.cuda._sleep(int(2 * LIMIT * CYCLES_OF_A_SECOND))
                step()
                torch.cuda.synchronize()
            dist.barrier()  # until rank 0 has looked
            weight = training.weight.detach()
            state = {"model.weight": ShardedState(tuple(weight.shape), (LocalBox((0, 0), weight),))}
            with pytest.raises(PeerError, match="waited in vain for rank 1"):  # on all ranks, though one alone knows
                save_state(out, 7, state, {}, keep=2)
            assert not (out / "checkpoints").exists() or not any((out / "checkpoints").iterdir())
            if rank == 1:  # it may have had all of rank 0's gradients, of its last good step; never more
                with pytest.raises(PeerError, match="waited in vain for rank 0"):
                    run_often(step, 3)
        finally:
            step.close()
            del step
            training.group = dist.group.WORLD  # the last reference to the group but `made`
    require_no_failure()


@pytest.mark.parametrize(
    ("optimizer", "way", "stall"),
    sampled(
        [("adamw", "packets", "on the device"), ("sgd", "tiles", "on the host")],
        list(itertools.product(("adamw", "sgd"), ("packets", "tiles"), ("on the device", "on the host"))),
    ),
)
def test_a_captured_step_whose_peer_stalls_changes_no_weight_and_raises_at_the_next_look(
    run_ranks: Run, tmp_path: Path, world: int, optimizer: str, way: str, stall: str
) -> None:
    run_ranks(world, train_past_a_stall, tmp_path, optimizer, way, stall)


# What a process whose wait has failed tells its peers.


def fail_then_replay(ways: Sequence[str]) -> None:
    """Rank 0's wait fails in one group. It then replays another group's call, which rank 1 makes as well."""
    rank = dist.get_rank()
    for way in ways:
        warm_up(way)
        x, weight = operands_of(rank)
        with groups(2) as made:
            for number in range(2):
                assert torch.equal(call_operator(way, made[number], x, weight), expect_of(way)), way
            fail_in_one_and_replay_the_other(
                way, partial(call_operator, way, made[0], x, weight), partial(call_operator, way, made[1], x, weight)
            )
        require_no_failure()


def waited_for(way: str, rank: int) -> str:
    """Return what PeerError says. Of the interpreter's thread blocks one may give up first that waits for
    another one here.
    """
    return "waited in vain for" if way == "interpreter" else f"waited in vain for rank {rank}"


def fail_in_one_and_replay_the_other(name: str, fail: Callable[[], Any], call: Callable[[], Any]) -> None:
    """Rank 1 makes no call of the first group; its call of the second raises that rank 0 has sent nothing."""
    rank = dist.get_rank()
    graph = capture(call) if rank == 0 else None
    failures.synchronize(torch.device("cuda", torch.cuda.current_device()))
    dist.barrier()
    if graph is not None:
        fail()
        torch.cuda.synchronize()
        assert failures.has_failed(), f"{name}: rank 1 did not come, and no wait has failed"
        with pytest.raises(PeerError, match=waited_for(name, 1)):
            failures.check()
        graph.replay()
        torch.cuda.synchronize()
        graph.reset()
        with pytest.raises(PeerError):  # before it is launched
            call()
    dist.barrier()
    if rank == 1:
        call()
        torch.cuda.synchronize()
        assert failures.has_failed(), f"{name}: rank 0 has published what it made after a wait that failed"
        with pytest.raises(PeerError, match=waited_for(name, 0)):
            failures.check()


@pytest.mark.parametrize("way", sampled(["pushed rows"], [way for way in OPERATORS if not way.startswith("copied")]))
def test_after_a_failed_wait_operators_of_other_groups_publish_nothing(run_ranks: Run, world: int, way: str) -> None:
    run_ranks(world, fail_then_replay, [way])


def come_late(way: str) -> str:
    """Rank 1 calls when rank 0 has given up: "right" where its result is, else its error."""
    warm_up(way)
    rank, outcome = dist.get_rank(), ""
    x, weight = operands_of(rank)
    with groups(1) as made:
        for _ in range(2):
            assert torch.equal(call_operator(way, made[0], x, weight), expect_of(way))
        failures.synchronize(x.device)
        dist.barrier()
        if rank == 1:
            torch.cuda._sleep(int(2 * LIMIT * CYCLES_OF_A_SECOND))
        out = call_operator(way, made[0], x, weight)
        torch.cuda.synchronize()
        try:
            failures.check()
            outcome = "right" if torch.equal(out, expect_of(way)) else "wrong, and nothing was raised"
        except PeerError as error:
            outcome = str(error)
    require_no_failure()
    return outcome


@pytest.mark.parametrize("way", sampled(["two shots"], list(OPERATORS)))
def test_a_late_rank_gets_the_right_result_or_peer_error(run_ranks: Run, world: int, way: str) -> None:
    first, second = run_ranks(world, come_late, way)
    assert "waited in vain for rank 1" in first
    assert second == "right" or "waited in vain for rank 0" in second


def come_late_twice(way: str) -> None:
    """Rank 1 is late, as one that compiles, for the first call after a kernel was loaded, and for the second."""
    warm_up(way)
    rank = dist.get_rank()
    x, weight = operands_of(rank)
    with groups(1) as made:
        for _ in range(2):
            call_operator(way, made[0], x, weight)
        compilation.ALLOWANCE = LONG
        compilation.note_loaded_kernel()
        for has_time in (True, False):
            failures.synchronize(x.device)
            dist.barrier()
            if rank == 1:
                torch.cuda._sleep(int(2 * LIMIT * CYCLES_OF_A_SECOND))
            out = call_operator(way, made[0], x, weight)
            torch.cuda.synchronize()
            if has_time:
                failures.check()
                assert torch.equal(out, expect_of(way))
            elif rank == 0:
                with pytest.raises(PeerError, match=f"waited in vain for rank 1.* {LIMIT:g} s: "):
                    failures.check()
    require_no_failure()


@pytest.mark.parametrize("way", sampled(["copied rows"], list(OPERATORS)))
def test_the_first_call_after_a_kernel_was_loaded_waits_for_a_rank_that_compiles_it(
    run_ranks: Run, world: int, way: str
) -> None:
    run_ranks(world, come_late_twice, way)


# Collectives.


def make_collective(kind: str, group: dist.ProcessGroup) -> tuple[Any, Callable[[], Tensor]]:
    """(the workspace, a call that sums 1 and 2)."""
    from stretto.collectives.executor.cuda.copy_engine.executor import CopyEngineExecutor
    from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
    from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
    from stretto.collectives.executor.cuda.variant import Variant
    from stretto.collectives.executor.cuda.workspace import CollectiveWorkspace

    made = CollectiveWorkspace(group, regions={"LL": 1 << 20, "LL128": 1 << 20, "Simple": 2 << 20}, timeout=LIMIT)
    schedule = find("two-shot-all-reduce").compile(ranks=2, in_place=False)
    executors = {"interpreter": InterpretedSchedule, "copies": CopyEngineExecutor}
    protocol = {"interpreter": "Simple", "copies": "Copy"}.get(kind, kind)
    executor = executors.get(kind, FusedScheduleKernel)
    kernel: Any = executor(schedule, made, Variant("int32", "sum", protocol), in_place=False)
    given = torch.full((100_004,), dist.get_rank() + 1, dtype=torch.int32, device="cuda")
    taken = torch.zeros_like(given)

    def call() -> Tensor:
        taken.zero_()
        kernel(given, taken)
        return taken

    return made, call


def fail_collectives(kinds: Sequence[str]) -> None:
    for kind in kinds:
        workspaces = []
        with groups(2) as made:
            try:
                calls = []
                for number in range(2):
                    found, call = make_collective(kind, made[number])
                    workspaces.append(found)
                    calls.append(call)
                dist.barrier()
                for call in calls * 2:
                    assert call().eq(3).all(), kind
                fail_in_one_and_replay_the_other(kind, *calls)
                torch.cuda.synchronize()
                dist.barrier()  # peers' kernels have ended: memory may go
            finally:
                for found in workspaces:
                    found.close()
                workspaces.clear()
        require_no_failure()


@pytest.mark.parametrize("kind", sampled(["Simple"], COLLECTIVES))
def test_after_a_failed_wait_collectives_of_other_groups_publish_nothing(run_ranks: Run, world: int, kind: str) -> None:
    run_ranks(world, fail_collectives, [kind])


def come_late_to_a_collective(kind: str) -> str:
    rank = dist.get_rank()
    with groups(1) as made:
        found, call = make_collective(kind, made[0])
        try:
            dist.barrier()
            for _ in range(2):
                assert call().eq(3).all()
            failures.synchronize(found.device)
            dist.barrier()
            if rank == 1:
                torch.cuda._sleep(int(2 * LIMIT * CYCLES_OF_A_SECOND))
            out = call()
            torch.cuda.synchronize()
            try:
                failures.check()
                outcome = "right" if out.eq(3).all() else "wrong, and nothing was raised"
            except PeerError as error:
                outcome = str(error)
            dist.barrier()
        finally:
            found.close()
    require_no_failure()
    return outcome


@pytest.mark.parametrize("kind", sampled(["LL"], COLLECTIVES))
def test_a_rank_that_is_late_to_a_collective_gets_the_right_result_or_peer_error(
    run_ranks: Run, world: int, kind: str
) -> None:
    first, second = run_ranks(world, come_late_to_a_collective, kind)
    assert waited_for(kind, 1) in first
    assert second == "right" or waited_for(kind, 0) in second


# The watchdog, in processes of their own.


def never_look() -> None:
    """Rank 1 makes no call; rank 0 launches one, and then waits for something else."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.cuda.set_device(shared_gpus.choose_gpu(rank))
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group(shared_gpus.default_backend("cuda"), store=store, rank=rank, world_size=2)
    warm_up("one shot")
    compilation.ALLOWANCE = 0.0
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    x, weight = operands_of(rank)
    call_operator("one shot", group, x, weight)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        call_operator("one shot", group, x, weight)
        (folder / "launched").touch()
    time.sleep(60)


def test_the_watchdog_ends_a_process_that_does_not_look_and_names_the_ranks(tmp_path: Path, world: int) -> None:
    environment = os.environ | {"STRETTO_WATCHDOG": "2", "OMP_NUM_THREADS": "1"}
    code = "from tests.gpu.test_failed_waits import never_look; never_look()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(tmp_path)],
            env=environment,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, output = processes[0].communicate(timeout=100)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert (tmp_path / "launched").exists(), output
    assert processes[0].returncode == -signal.SIGABRT, output
    assert "Stretto's watchdog ends this process" in output
    assert "rank 0 of 2: matmul_all_reduce" in output
    assert "waited in vain for rank 1" in output


# The backend.


def miss_a_call_of_the_backend(folder: Path) -> None:
    """Rank 1 makes no second call; rank 0's Work."""
    torch.cuda.set_device(shared_gpus.choose_gpu(int(os.environ["LOCAL_RANK"])))
    dist.init_process_group("stretto")  # which may build the backend first
    rank, limit = dist.get_rank(), 2 * LIMIT
    group = dist.new_group(timeout=timedelta(seconds=limit))
    install(find("ring-all-reduce").compile(ranks=2), group, max_bytes=4096, dtypes=[torch.int32])
    x = torch.ones(1000, dtype=torch.int32, device="cuda")
    dist.all_reduce(x, group=group)
    assert x.eq(2).all()
    assert any("ring-all-reduce" in ran for _, ran in call_counts(group)), call_counts(group)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        torch.cuda.synchronize()
        for look in (work.is_completed, work.wait, partial(dist.all_reduce, x, group=group)):
            with pytest.raises(PeerError, match="waited in vain for rank 1"):
                look()
        (folder / "looked").touch()
    else:
        began = time.monotonic()
        while not (folder / "looked").exists() and time.monotonic() - began < 10 * limit:
            time.sleep(0.05)
    with contextlib.suppress(PeerError):
        dist.destroy_process_group()


def test_works_of_the_backend_raise_after_a_failed_wait(tmp_path: Path, world: int) -> None:
    run_watched(world, miss_a_call_of_the_backend, tmp_path)
    assert (tmp_path / "looked").exists()
