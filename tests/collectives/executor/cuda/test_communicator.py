# SPDX-License-Identifier: Apache-2.0
"""The communicator over emulated kernels: what it runs as and why, tables that are refused, links without NVLink."""

import gc
import json
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.collectives.executor.cuda.emulated import COMPILER, add_copy_areas, make_workspaces

from stretto.collectives import selection
from stretto.collectives.algorithms import find
from stretto.collectives.executor.cuda import communicator
from stretto.collectives.executor.cuda.communicator import CudaCommunicator
from stretto.collectives.executor.cuda.copy_engine import planner
from stretto.collectives.executor.cuda.fused.kernel import FusedScheduleKernel
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.selection import LIBRARY, AlgorithmChoice, Table, time_key
from stretto.memory.plain_data import pack, unpack
from stretto.tuning import TuningStore, autotuner

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")
MACHINE = "a GPU, NVLink"


@pytest.fixture
def make(tmp_path, folder, monkeypatch):
    """Makes both ranks' communicators, rank 0's table going to rank 1 as its broadcast would send it."""
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    monkeypatch.setattr(communicator, "machine_name", lambda has_nvlink: MACHINE)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def make_all(has_nvlink=True, **options):
        workspaces = make_workspaces(2, folder, has_nvlink=has_nvlink)
        made, sent = [], []

        def broadcast(value, group, kind):
            if not sent:
                sent.append(pack(value))
            return unpack(sent[0], kind)

        for workspace in workspaces:
            workspace.closes = 0
            workspace.close = lambda one=workspace: setattr(one, "closes", one.closes + 1)
            fakes = SimpleNamespace(get_rank=lambda group, rank=workspace.rank: rank)
            monkeypatch.setattr(autotuner, "dist", fakes)
            monkeypatch.setattr(autotuner, "broadcast_data", broadcast)
            monkeypatch.setattr(communicator, "CollectiveWorkspace", lambda group, timeout, one=workspace: one)
            try:
                made.append(CudaCommunicator(**options))
            except ValueError as error:
                made.append(error)
        return made, workspaces

    return make_all


def run_both(communicators, *arguments):
    with ThreadPoolExecutor(2) as pool:
        tensors = [[one.clone() if isinstance(one, torch.Tensor) else one for one in arguments] for _ in communicators]
        calls = [pool.submit(one.run, *given) for one, given in zip(communicators, tensors, strict=True)]
    names = [call.result() for call in calls]
    for one in communicators:
        one.workspace.drain()
    return names, tensors


def test_equal_calls_are_logged_once_with_what_ran_and_why(make, caplog):
    both, _ = make()
    small = torch.ones(4, dtype=torch.int32)
    with caplog.at_level(logging.DEBUG, "stretto.collectives"):
        for _ in range(3):
            names, tensors = run_both(both, "allreduce", small)
            assert names == ["one-shot-all-reduce LL"] * 2
            assert all(given[1].tolist() == [2] * 4 for given in tensors)
            assert run_both(both, "allreduce", small.bool())[0] == [None] * 2
            assert run_both(both, "allreduce", small, None, "band")[0] == [None] * 2
            assert run_both(both, "allreduce", small[:0])[0] == [None] * 2
            assert run_both(both, "allreduce", small.view(2, 2).t())[0] == [None] * 2
    default = "nothing was measured for it, and it is the default on 2 ranks over NVLink"
    assert sorted(set(caplog.messages)) == sorted(
        [
            f"group 0: allreduce sum of 4 int32 (16 bytes) runs as one-shot-all-reduce LL: {default}",
            "group 0: allreduce sum of 4 bool (4 bytes) runs as the library: Stretto's kernels have no bool",
            "group 0: allreduce band of 4 int32 (16 bytes) runs as the library: Stretto's kernels have no reduction "
            "band",
            "group 0: allreduce sum of 0 int32 (0 bytes) runs as the library: it has no elements",
            "group 0: allreduce sum of 4 int32 (16 bytes) runs as the library: its tensors are not contiguous",
        ]
    )
    assert len(caplog.messages) == 2 * 5  # each rank each line once


@pytest.mark.exhaustive
def test_large_arrays_go_by_copies_unless_there_is_no_memory_for_that(make, caplog, monkeypatch):
    monkeypatch.setattr(selection, "_LARGEST", 1 << 10)
    monkeypatch.setattr(selection, "COPY_ENGINE_MIN_BYTES", 1 << 12)
    both, workspaces = make()
    x = torch.ones(2000, dtype=torch.int32)

    def refuse():
        raise ValueError("rank 1 has no symmetric memory to give: 768 MB are too much")

    for workspace in workspaces:
        workspace.copy_area = refuse
    with caplog.at_level(logging.DEBUG, "stretto.collectives"):
        assert run_both(both, "allreduce", x)[0] == [None] * 2
    assert "runs as the library: two-shot-all-reduce Copy x4 has no memory: rank 1 has no" in caplog.text
    both, workspaces = make()
    add_copy_areas(workspaces, planner.HEAD + (1 << 20))
    names, tensors = run_both(both, "allreduce", x)
    assert names == ["two-shot-all-reduce Copy x4"] * 2
    assert all((given[1] == 2).all() for given in tensors)
    assert run_both(both, "allreduce", x[:500])[0] == ["two-shot-all-reduce LL128"] * 2  # between the two limits


def test_nothing_is_logged_if_logging_is_off(make, caplog):
    both, _ = make()
    run_both(both, "allreduce", torch.ones(4, dtype=torch.int32))
    assert caplog.messages == []


def test_a_measured_table_chooses_and_is_named(make, tmp_path, caplog, monkeypatch):
    file = tmp_path / "table.json"
    two_shot = AlgorithmChoice("two-shot-all-reduce", "Simple")
    rows = {time_key("allreduce", "int32", 2, 16, way): [t] for way, t in ((LIBRARY, 2.0), (two_shot, 1.0))}
    TuningStore(file).add(MACHINE, rows)
    monkeypatch.setenv("STRETTO_COLLECTIVES_TABLE", str(file))
    both, _ = make()
    with caplog.at_level(logging.DEBUG, "stretto.collectives"):
        assert run_both(both, "allreduce", torch.ones(4, dtype=torch.int32))[0] == [two_shot.name] * 2
    assert f"it was the fastest at 16 bytes of int32, measured {file}" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"another GPU": {}}, "was measured on another GPU, and this is a GPU, NVLink"),
        ({MACHINE: {time_key("allreduce", "int32", 4, 16, LIBRARY): [1.0]}}, "measured on 4 ranks, and this group has"),
        ([], "it holds no table"),
    ],
)
def test_a_table_from_elsewhere_is_an_error_on_all_ranks_before_anything_runs(make, tmp_path, content, message):
    file = tmp_path / "table.json"
    file.write_text(json.dumps(content))
    errors, workspaces = make(table=file)
    assert len(errors) == 2
    for error in errors:
        with pytest.raises(ValueError, match=message):
            raise error
    assert [(one.closes, int(one.state[0])) for one in workspaces] == [(1, 0)] * 2


def test_measurements_of_other_machines_are_not_used_from_the_store(make):
    TuningStore().add(
        "another GPU", {time_key("allreduce", "int32", 2, 16, AlgorithmChoice("two-shot-all-reduce", "LL")): [1.0]}
    )
    both, _ = make()
    assert both[0].table == Table(has_nvlink=True)


def test_a_closed_communicator_keeps_no_kernel(make, monkeypatch):
    class Kernel:
        def __call__(self, input, output):
            pass

    both, _ = make()
    monkeypatch.setattr(CudaCommunicator, "load", lambda *arguments, **options: Kernel())
    for one in both:
        call = ("allreduce", torch.ones(4, dtype=torch.int32), None, "sum")
        assert one.run(*call) == "one-shot-all-reduce LL"
        kernel = weakref.ref(one.find(*call).kernel)
        assert kernel() is not None
        one.close()
        gc.collect()
        assert kernel() is None


def test_without_nvlink_neither_choice_nor_schedule_uses_ll128(make):
    both, workspaces = make(has_nvlink=False)
    assert not both[0].table.has_nvlink
    for exponent in range(2, 21):
        way = both[0].table.choose("allreduce", "int32", 1 << exponent, 2).choice
        assert way.protocol != "LL128"
    schedule = find("ring-all-reduce").compile(ranks=2, in_place=True)
    for kind in (FusedScheduleKernel, InterpretedSchedule):
        with pytest.raises(ValueError, match=r"ring-all-reduce by LL128 needs NVLink .* take LL or Simple"):
            kind(schedule, workspaces[0], Variant("int32", "sum", "LL128"), in_place=True)
        kind(schedule, workspaces[0], Variant("int32", "sum", "LL"), in_place=True)


def test_a_schedule_that_is_not_verified_is_not_loaded_unless_that_is_waived(make):
    made, _ = make()
    schedule, variant = find("one-shot-all-reduce").compile(ranks=2), Variant("float32", "sum", "LL")
    first, *others = schedule.ranks
    damaged = replace(schedule, ranks=(first._replace(thread_blocks=first.thread_blocks[:-1]), *others))
    for one in made:
        assert isinstance(
            one.load(schedule, variant, in_place=True, waive=("replica_consistency",)), FusedScheduleKernel
        )
        with pytest.raises(ValueError, match="is not safe to run"):
            one.load(damaged, variant, in_place=True, waive=("replica_consistency",))
        with pytest.raises(ValueError, match="'races' cannot be waived"):
            one.load(schedule, variant, in_place=True, waive=("races",))
