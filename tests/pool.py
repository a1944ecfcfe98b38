# SPDX-License-Identifier: Apache-2.0
"""One pool of worker processes for a whole test session, so that a test of several ranks takes milliseconds.

Workers are forked from a server that has imported what they need. They start in a fraction of a second, also again
after one has died. The server is forked from pytest when that has collected the tests, with all that they import; or it
is a process of its own (`python`), which has the workers' environment variables at its imports: Triton, for one, reads
them then.
Workers on GPUs are fresh processes.

A job sends every rank a function's name and arguments; each rank joins a fresh default process group (gloo), runs the
function and leaves the group again. A rank that raises costs its own test only. A rank that dies or hangs takes the
pool with it: the next job gets a new one.

Synchronization: the parent waits for all ranks' outcomes, then tells the ranks that returned to leave the group, so
that no rank closes its sockets while another still needs them. A rank that raised leaves at once, which wakes its
peers.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.processes import LIMIT, fork_program

POOL_SIZE = 8
FEW = 4  # workers that are started at first: the others only for a job of more ranks
PATIENCE = 10  # ranks get this many times a job's limit: machines are slow and loaded, and caches empty
START_LIMIT = 1200.0  # seconds for all workers to come up
MANY_OBJECTS = 1000
MAX_COLLECTIONS = 5
JOIN_LIMIT = 100.0  # seconds for all ranks to join the process group
JOIN_ATTEMPTS = 3
GRACE = 30.0  # seconds for the other ranks to end once one has raised
LEAVING = 600.0  # and for all to leave the process group: NCCL gives back dozens of communicators on shared GPUs
GROUP_LIMIT = timedelta(minutes=30)  # longer than any job's: the parent ends a hang, and knows who hung


class RankError(Exception):
    """A rank's exception that could not be sent as it was, or a rank that died or did not answer in time."""


@dataclass(frozen=True)
class _Job:
    """Order to a worker to run one rank: `call` is the pickled (function, args, kwargs)."""

    rank: int
    world_size: int
    store_path: str
    call: bytes


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a rank's function. pickled: its result or its exception (None: it cannot be pickled)."""

    raised: bool
    pickled: bytes | None
    text: str = ""


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    pipe: Connection


class Pool:
    """A pool of `size` processes, which runs jobs of up to `size` ranks. They start with the first job that needs them.

    environment: variables of the workers, set before they import what reads them once. modules: what the server imports
    for them beside torch; None for all of Stretto that this session has imported. backend: of the process groups; where
    it names one for "cuda", rank r has GPU r modulo their number, and else none. python: the executable that starts the
    server, such as one of tests.processes, whose process has imported torch already; None for this process's own.
    Close it when done (`close`): until then its processes and one temporary folder stay.
    """

    def __init__(
        self,
        size: int = POOL_SIZE,
        environment: dict[str, str] | None = None,
        *,
        modules: list[str] | None = None,
        backend: str = "gloo",
        python: str | None = None,
    ) -> None:
        self.size = size
        self._environment = environment or {}
        self._modules = modules
        self._backend = backend
        self._python = python
        self._server = forkserver.ForkServer()
        self._workers: list[_Worker] = []
        self._folder: Path | None = None
        self._jobs = 0

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float, **kwargs: Any
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on ranks 0 to world_size - 1 and return their results in rank order.

        `timeout` is in seconds of a machine that does nothing else: on CPUs PATIENCE times as long are waited. Raises
        the first rank's exception with the rank and its traceback as a note; RankError when a rank died or did not end
        in time.
        """
        timeout *= 1 if _uses_gpus(self._backend) else PATIENCE
        if not 1 <= world_size <= self.size:
            raise ValueError(f"{world_size} ranks asked of a pool of {self.size}: 1 to {self.size} will do")
        call = _pickle_call(function, args, kwargs)
        try:
            self._start(world_size)
            self._begin_job(world_size, call)
            return self._run_job(self._workers[:world_size], timeout)
        except _RankRaised as failure:
            error = failure.error
        except BaseException:  # a dead or hung rank, Ctrl-C, pytest's own time limit: no worker can be trusted now
            self.kill()
            raise
        raise error

    def _begin_job(self, world_size: int, call: bytes) -> None:
        """Have the ranks join a process group, and begin once all have.

        Now and then gloo's connections of many ranks never come about. Nothing of the job has run then: new workers
        take it.
        """
        for attempt in range(JOIN_ATTEMPTS):
            workers = self._workers[:world_size]
            self._jobs += 1
            for rank, worker in enumerate(workers):
                with contextlib.suppress(BrokenPipeError):  # it died while idle: waiting for it says so
                    worker.pipe.send(_Job(rank, world_size, str(self._store_path()), call))
            missing = set(range(world_size))
            deadline = time.monotonic() + JOIN_LIMIT
            while missing and (messages := self._receive(workers, sorted(missing), deadline)):
                for rank, message in messages:
                    if isinstance(message, _Outcome):
                        raise _error_of(rank, world_size, message)
                    missing.remove(rank)
            if not missing:
                for worker in workers:
                    with contextlib.suppress(BrokenPipeError):
                        worker.pipe.send("begin")
                return
            if attempt == JOIN_ATTEMPTS - 1:
                raise RankError(self._describe_hang(workers, sorted(missing), JOIN_LIMIT))
            print(f"the pool's ranks {sorted(missing)} of {world_size} have not joined: new workers try again")
            self.kill()
            self._start(world_size)

    def _store_path(self) -> Path:
        """The current job's store."""
        assert self._folder is not None
        return self._folder / f"store-{self._jobs}"

    def _run_job(self, workers: list[_Worker], timeout: float) -> list[Any]:
        store_path = self._store_path()
        deadline = time.monotonic() + timeout
        outcomes: dict[int, _Outcome] = {}
        first_to_raise: int | None = None
        while len(outcomes) < len(workers):
            waiting = [rank for rank in range(len(workers)) if rank not in outcomes]
            try:
                messages = self._receive(workers, waiting, deadline)
                if not messages:
                    raise RankError(self._describe_hang(workers, waiting, timeout))
            except RankError as failure:
                # No peer's error kills a process so: the others raised because it was gone, and were only faster.
                if first_to_raise is None or "signal SIGKILL" in str(failure):
                    raise
                self.kill()  # the others died of, or still wait for, a rank that has raised: its error says why
                break
            for rank, outcome in messages:
                outcomes[rank] = outcome
                if outcome.raised and first_to_raise is None:
                    first_to_raise = rank
                    deadline = min(deadline, time.monotonic() + GRACE)
        if self._workers:
            self._leave_group(workers, outcomes)
            store_path.unlink(missing_ok=True)
        if first_to_raise is not None:
            raise _RankRaised(_error_of(first_to_raise, len(workers), outcomes[first_to_raise]))
        return [pickle.loads(outcomes[rank].pickled) for rank in range(len(workers))]

    def _receive(self, workers: list[_Worker], ranks: list[int], deadline: float) -> list[tuple[int, Any]]:
        """Wait until a rank has sent something, and return all that has arrived; nothing after the deadline."""
        pipes = {workers[rank].pipe: rank for rank in ranks}
        messages = []
        for pipe in wait(list(pipes), max(0.0, deadline - time.monotonic())):
            rank = pipes[pipe]
            try:
                messages.append((rank, pipe.recv()))
            except (EOFError, ConnectionResetError):
                raise RankError(self._describe_death(workers, rank)) from None
        return messages

    def _leave_group(self, workers: list[_Worker], outcomes: dict[int, _Outcome]) -> None:
        """Have every rank leave the process group, and wait until all have."""
        for rank, outcome in outcomes.items():
            if not outcome.raised:
                workers[rank].pipe.send("leave")
        remaining = set(outcomes)
        deadline = time.monotonic() + LEAVING
        while remaining:
            messages = self._receive(workers, sorted(remaining), deadline)
            if not messages:
                raise RankError(self._describe_hang(workers, sorted(remaining), LEAVING))
            remaining -= {rank for rank, _ in messages}

    def _describe_death(self, workers: list[_Worker], rank: int) -> str:
        process = workers[rank].process
        process.join(GRACE)
        code = process.exitcode
        cause = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return f"rank {rank} of {len(workers)} died ({cause}) before it returned"

    def _describe_hang(self, workers: list[_Worker], ranks: list[int], limit: float) -> str:
        """Name the ranks that have not ended, with the stack of each."""
        for rank in ranks:
            os.kill(workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # faulthandler writes from the signal's handler; nothing tells us when it has
        stacks = [
            f"--- rank {rank} ---\n{_stack_file(self._folder, workers[rank].process.pid).read_text()}" for rank in ranks
        ]
        names = ", ".join(map(str, ranks))
        return f"rank {names} of {len(workers)} did not end within {limit:g} s:\n" + "\n".join(stacks)

    def _start(self, world_size: int) -> None:
        """Start the workers that a job of so many ranks needs and that do not run yet, but no fewer than a few."""
        first = len(self._workers)
        count = self.size if _uses_gpus(self._backend) else min(self.size, FEW if world_size <= FEW else self.size)
        if first >= count:
            return
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="stretto-tests-"))
        context = multiprocessing.get_context("spawn" if _uses_gpus(self._backend) else "forkserver")
        with self._forking():
            for _ in range(first, count):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work, args=(theirs, str(self._folder), self._environment, self._backend), daemon=True
                )
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))
        remaining = set(range(first, count))
        deadline = time.monotonic() + START_LIMIT
        while remaining:
            messages = self._receive(self._workers, sorted(remaining), deadline)
            if not messages:
                raise RankError(f"{len(remaining)} of {count} workers did not start within {START_LIMIT:g} s")
            remaining -= {rank for rank, _ in messages}

    @contextlib.contextmanager
    def _forking(self) -> Iterator[None]:
        """A context in which processes are forked from this pool's server."""
        if _uses_gpus(self._backend):
            yield
            return
        self._server.set_forkserver_preload(_modules_to_preload(self._modules))
        python = multiprocessing.spawn.get_executable() if self._python is None else os.fsencode(self._python)
        with (
            mock.patch.dict(os.environ, self._environment),  # which the server's imports read
            mock.patch.object(multiprocessing.spawn, "_python_exe", python),
        ):
            self._server.ensure_running()
        with mock.patch.object(forkserver, "connect_to_new_process", self._server.connect_to_new_process):
            yield

    def fork_server(self) -> None:
        """Fork the workers' server from this process, with all that it has imported, rather than start a Python.

        Before this process has threads or has run a backward pass: in what is forked after one, torch refuses another.
        """
        with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork_program), self._forking():
            pass

    def pids(self) -> list[int]:
        """The workers' process ids; none before the first job."""
        return [worker.process.pid for worker in self._workers]

    def kill(self) -> None:
        """End every worker at once; the next job starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def close(self) -> None:
        """End every worker and remove the pool's folder."""
        self.kill()
        self._server._stop()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None


def fork_default_server() -> None:
    """Fork multiprocessing's own server, of its context "forkserver", from this process, as `Pool.fork_server` does."""
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork_program):
        forkserver.ensure_running()


class _RankRaised(Exception):
    """Carries a rank's own error out of `_run_job`, apart from errors that cost the pool."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def _modules_to_preload(modules: list[str] | None) -> list[str]:
    """The modules that a server imports before it forks: what workers need, and `modules`, or this session's."""
    needed = ["torch", "torch.distributed.tensor", "torch.distributed.tensor.debug", "pytest"]
    if modules is None:
        modules = [name for name in sys.modules if name.partition(".")[0] in ("stretto", "transformers")]
        modules += ["stretto.parallel.install"] * ("stretto.parallel.api" in sys.modules)  # which a call imports
    return needed + modules


def _fork_program(python: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """Run the program of `python -c PROGRAM` in a forked process, which keeps these open files; its process id."""
    return fork_program(lambda: exec(arguments[-1], {}), tuple(descriptors))


def _uses_gpus(backend: str) -> bool:
    return "cuda:" in backend


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"{name} cannot run on ranks ({error}): pass a function from the top level of a module, and arguments "
            "that can be pickled"
        ) from error


def _error_of(rank: int, world_size: int, outcome: _Outcome) -> BaseException:
    """The rank's exception, with its rank and traceback as a note; RankError where it could not be pickled."""
    title = f"raised on rank {rank} of {world_size}:\n{outcome.text}"
    if outcome.pickled is None:
        return RankError(title)
    error = pickle.loads(outcome.pickled)
    error.add_note(title)
    return error


def _stack_file(folder: str | Path | None, pid: int) -> Path:
    return Path(folder or "") / f"stack-{pid}"


# What follows runs in the workers.


def _work(pipe: Connection, folder: str, environment: dict[str, str], backend: str) -> None:
    """Run jobs in a worker until the parent closes the pipe or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    if not _uses_gpus(backend):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    torch.set_num_threads(1)
    if _uses_gpus(backend):
        _sleep_while_gpus_work()
    else:
        forget_stacks()
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        _keep_dtypes_of_interpreter()
        _keep_types_of_interpreter()
    caches = _find_caches()
    gc.freeze()  # the preloaded modules, so that collecting after each job is cheap
    gc.set_threshold(10_000, 20, 20)  # each job ends with a collection: few are needed while it runs
    with _stack_file(folder, os.getpid()).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        pipe.send("started")
        with contextlib.suppress(EOFError):
            while True:
                _run_rank(pipe, pipe.recv(), caches, backend)


def _sleep_while_gpus_work() -> None:
    """Make CUDA block instead of spin while it waits: tests have more ranks than the machine has cores."""
    driver = ctypes.CDLL("libcuda.so.1")
    scheduling_by_blocking = 4  # CU_CTX_SCHED_BLOCKING_SYNC
    driver.cuInit(0)
    for device in range(torch.cuda.device_count()):
        driver.cuDevicePrimaryCtxSetFlags_v2(device, scheduling_by_blocking)


def forget_stacks() -> None:
    """Have torch store no stack of its caller with seeds that wait for a GPU's first use, nor with fake tensors' modes.

    torch.manual_seed formats it for each kind of GPU, which a process without any never gets to see. DTensor makes a
    mode for each operation that it has not seen yet, whose stack only the error of mixed modes shows.
    """
    from torch._subclasses import fake_tensor

    fake_tensor.traceback = types.SimpleNamespace(extract_stack=list, format_list=traceback.format_list)
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if hasattr(kind, "traceback"):
            kind.traceback = types.SimpleNamespace(format_stack=list)


def _keep_dtypes_of_interpreter() -> None:
    """Look NumPy's dtypes up once: Triton's interpreter makes its table of them anew for every operation."""
    from triton.runtime import interpreter

    stock, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        key = type(scalar), scalar.name
        if key not in found:
            found[key] = stock(scalar)
        return found[key]

    interpreter._get_np_dtype = get_np_dtype


def _keep_types_of_interpreter() -> None:
    """Make a block's shape once for all blocks that have it, and look whether two have the same before all else.

    Triton's interpreter makes shapes and names of types, and compares them, with each of a kernel's operations on a few
    numbers: that takes more than half of its time.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_type, make_tensor, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    broadcast = TritonSemantic.broadcast_impl_value
    types_made: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    shapes_made: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def make_known_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in types_made:
            make_type(self, element_ty, shape)
            types_made[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types_made[key]

    def make_known_tensor(self: Any, handle: Any, type: Any) -> None:
        key = (*type.shape,) if type.is_block() else ()
        if key not in shapes_made:
            make_tensor(self, handle, type)
            shapes_made[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes_made[key]

    def is_equal(self: Any, other: Any) -> Any:
        return self.name == other.name if type(self) is type(other) is core.dtype else equal(self, other)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        are_blocks = lhs.type.is_block() and rhs.type.is_block()
        return (lhs, rhs) if are_blocks and [*lhs.type.shape] == [*rhs.type.shape] else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__ = make_known_type, make_known_tensor, is_equal
    TritonSemantic.broadcast_impl_value = broadcast_others


def _end_with_parent() -> None:
    """End this process when pytest is gone, whatever this rank waits for."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _find_caches() -> list[Callable[[], object]]:
    """Functions that empty torch's caches of meshes.

    They would keep each job's process groups, whose threads (gloo's poll a hundred times a second) add up until
    nothing else gets to run.
    """
    from torch.distributed.tensor import _redistribute, debug  # slow to import, and only workers need it

    gc.unfreeze()  # what pytest has frozen before it forked is not listed
    wrappers = [item for item in gc.get_objects() if type(item) is functools._lru_cache_wrapper]
    ours = [wrapper.cache_clear for wrapper in wrappers if str(wrapper.__module__).startswith("torch.distributed")]
    return [*ours, _redistribute.clear_redistribute_planner_cache, debug._clear_sharding_prop_cache]


def _run_rank(pipe: Connection, job: _Job, caches: list[Callable[[], object]], backend: str) -> None:
    threads = _count_threads()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    try:
        store = dist.FileStore(job.store_path, job.world_size)
        if _uses_gpus(backend):
            torch.cuda.set_device(job.rank % torch.cuda.device_count())
            os.environ["LOCAL_RANK"] = str(job.rank)
        # No device_id: the groups of a later job would be split from NCCL's communicator, which then crashes (2.11).
        whose = {"rank": job.rank, "world_size": job.world_size}
        dist.init_process_group(backend, store=store, timeout=GROUP_LIMIT, **whose)
        pipe.send("joined")
        pipe.recv()  # all ranks have
        if compilation := sys.modules.get("stretto.memory.compilation"):
            compilation._loaded.value = 0  # or meetings would wait as long as for peers that compile an earlier job's
        function, args, kwargs = pickle.loads(job.call)
        outcome = _Outcome(raised=False, pickled=pickle.dumps(function(*args, **kwargs)))
        assert torch.is_grad_enabled(), f"{function} has left this rank's gradients off"
    except BaseException as error:  # noqa: BLE001  (an assertion, a SystemExit: all belong to the test)
        text = traceback.format_exc()
        outcome = _Outcome(raised=True, pickled=_pickle_error(error), text=text)
    torch.set_grad_enabled(True)
    pipe.send(outcome)
    if not outcome.raised:
        pipe.recv()  # all ranks have an outcome
    if dist.is_initialized():
        dist.destroy_process_group()
    # Until the process groups' threads have ended: what one collection frees may hold, in C++, what only the next one
    # finds. The rest would be frozen and never be freed.
    for _ in range(MAX_COLLECTIONS):
        for clear in caches:
            clear()
        gc.collect()
        if _count_threads() <= threads:
            break
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.freeze()  # modules and torch's caches, so that collecting stays cheap
    pipe.send("left")


def _count_threads() -> int:
    """The threads of this process, those of C++ too; 0 where there is no /proc."""
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 0


def _pickle_error(error: BaseException) -> bytes | None:
    """Pickle an exception; None if its class does not survive pickling and unpickling."""
    error.__traceback__ = None
    error.__cause__ = error.__context__ = None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001  (a class's own __reduce__ or __init__ may raise anything)
        return None
    return pickled


def run_processes(function: Callable[[int, str], None], folder: Path) -> None:
    """Run function(rank, folder) in three processes that are no pool's, as some of them are killed, until all end."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=function, args=(rank, str(folder))) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        process.kill()
