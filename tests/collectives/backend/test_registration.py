# SPDX-License-Identifier: Apache-2.0
"""The backend's name is known, whoever is imported first; it costs nothing until it is used, and leaves nothing."""

import copy
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.collectives.backend import operations

from stretto.collectives import call_counts, install
from stretto.collectives.algorithms import find


def run_python(code, **environment):
    """A new process's outcome, with Stretto on its path as here."""
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_importing_stretto_imports_no_torch_and_builds_nothing():
    code = "import stretto, sys; print('torch' in sys.modules, 'stretto.collectives' in sys.modules)"
    assert run_python(code).stdout.split() == ["False", "False"]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("imports", "environment"),
    [
        ("import stretto; import torch.distributed as dist", {}),
        ("import torch.distributed as dist; import stretto", {}),
        ("import torch.distributed as dist", {"DIST": "1"}),
    ],
)
def test_the_backend_is_registered_in_any_order_of_imports(tmp_path, imports, environment):
    """The last one names stretto nowhere: torch finds it by the entry point of the installed package."""
    if environment:
        folder = tmp_path / "found-0.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: found\nVersion: 0.1\n")
        (folder / "entry_points.txt").write_text(_entry_points())
        environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    before = "'stretto.collectives' in sys.modules"
    code = f"import sys; {imports}; print(dist.Backend('stretto'), dist.is_backend_available('stretto'), {before})"
    done = run_python(code, **environment)
    assert done.stdout.split() == ["stretto", "True", "False"], done.stderr


def _entry_points():
    """As pyproject.toml has them."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    (line,) = project["entry-points"]["torch.backends"].items()
    return "[torch.backends]\n{} = {}\n".format(*line)


START = """
import torch.distributed as dist, stretto, torch
dist.init_process_group("stretto", store=dist.HashStore(), rank=0, world_size=1)
"""
RUN = """
from stretto.collectives import install, call_counts
from stretto.collectives.algorithms import find
install(find("ring-all-reduce").compile(ranks=1))
work = dist.all_reduce(torch.ones(3), async_op=True)
work.get_future()
print(call_counts())
"""


@pytest.mark.usefixtures("forks_torch_processes")
def test_without_a_compiler_the_error_names_what_is_missing(tmp_path):
    done = run_python(START, PATH="", STRETTO_CACHE=str(tmp_path))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "CompilerError: the backend stretto compiles a small C++ part at its first use" in last
    assert "there is no C++ compiler 'c++' on PATH: install g++" in last
    assert "or use the backend gloo or nccl" in last


@pytest.mark.usefixtures("forks_torch_processes")
def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'bindings.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run_python(START, CXX=str(compiler), STRETTO_CACHE=str(tmp_path))
    assert "does not compile with" in done.stderr
    assert "bindings.cpp:1: error: no such thing" in done.stderr
    assert not list(tmp_path.glob("**/*.so"))


@pytest.mark.long
def test_a_process_that_never_leaves_its_group_ends_well():
    done = run_python(START + RUN)
    assert (done.returncode, done.stdout) == (0, "{('allreduce', 'schedule ring-all-reduce'): 1}\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "terminate" not in done.stderr


def leave_nothing():
    threads = {thread.name for thread in threading.enumerate()}
    group = dist.new_group(backend="stretto")
    operations.install_all(group)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert "memfd:stretto" in Path("/proc/self/maps").read_text()
    backend = group._get_backend(torch.device("cpu"))
    dispatcher = weakref.ref(backend.dispatch)
    del backend
    dist.destroy_process_group(group)
    assert {thread.name for thread in threading.enumerate()} <= threads
    del group
    gc.collect()
    assert dispatcher() is None
    assert "memfd:stretto" not in Path("/proc/self/maps").read_text()


def test_a_destroyed_group_leaves_no_thread_no_memory_and_no_object(ranks):
    ranks(2).run(leave_nothing)


def abort():
    """A call that waits for a rank which never comes ends when its group is aborted."""
    group = dist.new_group(backend="stretto")
    install(find("ring-all-reduce").compile(ranks=2), group)
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        aborting = threading.Timer(0.3, group.abort)
        aborting.start()
        with pytest.raises(RuntimeError, match="was destroyed or aborted during allreduce"):
            work.wait()
        aborting.join()
        with pytest.raises(RuntimeError, match=r"allreduce: the process group .* was destroyed or aborted"):
            dist.all_reduce(torch.ones(3), group=group)
    dist.barrier()


def test_aborting_a_group_ends_its_calls(ranks):
    ranks(2).run(abort)


class Collected(logging.Handler):
    """Keeps logged messages."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def say_why():
    group = dist.new_group(backend="stretto")
    install(find("ring-all-reduce").compile(ranks=2), group, min_bytes=100)
    logger, collected = logging.getLogger("stretto.collectives"), Collected()
    logger.addHandler(collected)
    logger.setLevel(logging.DEBUG)
    for tensor in 2 * (torch.ones(50), torch.ones(3, dtype=torch.bfloat16)):  # equal calls are logged once
        dist.all_reduce(tensor, group=group)
    dist.broadcast(torch.ones(2, dtype=torch.int64), 0, group)
    dist.barrier(group)
    logger.removeHandler(collected)
    logger.setLevel(logging.NOTSET)
    ends = [line.partition(": ")[2] for line in collected.lines]
    assert ends == [
        "allreduce sum of 50 float32 (200 bytes) on cpu runs as schedule ring-all-reduce: it is installed for such "
        "calls",
        "allreduce sum of 3 bfloat16 (6 bytes) on cpu runs as gloo: schedule ring-all-reduce: it is for at least 100 "
        "bytes",
        "broadcast of 2 int64 (16 bytes) on cpu runs as gloo: no schedule is installed for broadcast",
        "barrier of 0 elements (0 bytes) on cpu runs as gloo: no schedule does this operation",
    ]
    assert len(call_counts(group)) == 4


def test_debug_level_logs_what_ran_and_why(ranks):
    ranks(2).run(say_why)


def watch_under_detail():
    """torch's own checks put a wrapper around the backend."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(backend="stretto")
        install(find("ring-all-reduce").compile(ranks=3), group)
        group.monitored_barrier(timedelta(seconds=30))  # in which rank 0 sends more than others
        dist.all_reduce(torch.ones(3), group=group)
        assert call_counts(group)["allreduce", "schedule ring-all-reduce"] == 1
        with pytest.raises(RuntimeError, match="mismatch between collectives"):
            dist.all_reduce(torch.ones(3 + dist.get_rank()), group=group)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_it_works_under_torchs_detailed_checks(ranks):
    ranks(3).run(watch_under_detail)


def count_calls():
    """Once for each collective, by a schedule or not; never for what only some ranks call."""
    group = dist.new_group(backend="stretto")
    backend = group._get_backend(torch.device("cpu"))
    assert backend._get_sequence_number_for_group() == 0
    dist.all_reduce(torch.ones(3), group=group)
    assert backend._get_sequence_number_for_group() == 1
    install(find("ring-all-reduce").compile(ranks=2), group)
    started = backend._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3), group)
    dist.barrier(group)
    send_or_receive = dist.send if dist.get_rank() == 0 else dist.recv
    send_or_receive(torch.ones(3), 1 - dist.get_rank(), group)
    group.monitored_barrier(timedelta(seconds=30))
    assert backend._get_sequence_number_for_group() == started + 3


def test_the_sequence_number_counts_collectives_whatever_runs_them(ranks):
    ranks(2).run(count_calls)


def read_options():
    group = dist.new_group(backend="stretto", timeout=timedelta(seconds=7))
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == timedelta(seconds=7)
    assert copy.deepcopy(options)._timeout == timedelta(seconds=7)  # as torch.distributed.split_group copies them
    assert options.group_name == group.group_name
    assert options.global_ranks_in_group == [0]
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=9))  # gloo's and NCCL's name for it
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=9)


def test_a_groups_options_tell_its_name_ranks_and_time_limit(ranks):
    ranks(1).run(read_options)


def ask_for_what_nccl_alone_has():
    with pytest.raises(RuntimeError, match="onCompletion hook"):
        dist.new_group(backend="stretto")._register_on_completion_hook(print)


def test_features_of_nccl_alone_raise_by_name(ranks):
    ranks(1).run(ask_for_what_nccl_alone_has)
