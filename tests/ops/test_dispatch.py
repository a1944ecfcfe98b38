# SPDX-License-Identifier: Apache-2.0
"""Tests of which plan is taken: pinned, measured or the default, alike on all ranks."""

import os
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops import uninterpreted
from tests.ops.operands import find_plan, gather_module, random_of

from stretto import ops
from stretto.memory import gpus
from stretto.ops import KernelConfig, choices, config
from stretto.ops.config import (
    LIBRARY,
    GemmProblem,
    Machine,
    decode,
    default_config,
    default_kernel,
    find_refusal,
    require_config,
)
from stretto.ops.joint import launch as joint_module
from stretto.ops.prediction import Speeds
from stretto.ops.small_m import count_bytes, split_steps
from stretto.ops.tuning import vary_blocks, vary_transfers
from stretto.tuning import TuningStore, machine_key

HOPPER = Machine(132, True, True, Speeds(1070e12, 3.35e12, 450e9))

OPERATORS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def call_of(operator, m, n=12288, k=12288, dtype=torch.bfloat16):
    return GemmProblem(operator, m, n, k, dtype, False, 4)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("m", [1, 4, 64, 65, 512, 1000, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_plan_that_is_chosen_or_tried_is_a_plan_and_survives_as_text(operator, m, dtype):
    for machine in (HOPPER, HOPPER._replace(by_tma=False), Machine(108, False, False), Machine(0, True, False)):
        call = call_of(operator, m, dtype=dtype)
        plans = [default_config(call, machine)[0], *vary_blocks(call, machine)]
        for plan in [*plans, *vary_transfers(call, machine, plans[-1])]:
            require_config(plan)
            assert decode(plan.encode()) == plan
            assert plan == LIBRARY or plan.blocks is not None


def test_the_default_is_a_kernel_where_it_was_made_for_and_the_library_elsewhere():
    for operator in OPERATORS:
        assert default_config(call_of(operator, 64), HOPPER)[0].implementation == "kernel"
        assert default_config(call_of(operator, 64, dtype=torch.float32), HOPPER)[0] == LIBRARY
        assert default_config(call_of(operator, 64), HOPPER._replace(by_tma=False))[0] == LIBRARY
        assert default_config(call_of(operator, 64), Machine(108, False, False))[0] == LIBRARY


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float8_e4m3fn}, False),
        ({"n": 12292}, False),
        ({"k": 12292}, False),
    ],
)
def test_kernels_of_experts_are_for_16_bits_and_sizes_that_8_divides(change, is_right):
    call = call_of("all_gather_matmul", 512)._replace(experts=8, top_k=2, **change)
    for machine in (HOPPER, Machine(0, True, False)):
        assert (find_refusal(call, machine) == "") is is_right


def test_more_rows_than_few_are_summed_by_a_schedule_and_of_one_rank_by_the_library():
    call = call_of("matmul_all_reduce", 4096)
    for tried in (default_config(call, HOPPER)[0], *vary_blocks(call, HOPPER)):
        assert (tried.implementation, tried.exchange, tried.transfer) == ("kernel", "tiles", "copies")
    alone, why = default_config(call._replace(world=1), HOPPER)
    assert alone == LIBRARY
    assert "one rank" in why
    assert default_config(call._replace(m=4, world=1), HOPPER)[1].startswith("nothing was measured")
    packets = [one.shots for one in vary_transfers(call._replace(m=128), HOPPER, tried) if one.exchange == "packets"]
    assert packets == [1, 2]


def test_gathered_rows_are_returned_by_copies_alone_whatever_was_asked_for():
    call = call_of("all_gather_matmul", 512)._replace(returns_gathered=True)
    assert call.name.startswith("all_gather_matmul_gathered m=512 ")
    asked = KernelConfig(transfer="programs").encode()
    chosen, _ = choices._choose(SimpleNamespace(obstacle=None, times={}), call, HOPPER, asked)
    tried = list(vary_blocks(call, HOPPER))
    for plan in (chosen, *tried, *vary_transfers(call, HOPPER, tried[0])):
        assert (plan.transfer, plan.direction) == ("copies", "push")


@pytest.mark.parametrize(
    ("operator", "m", "group_rows"),
    [
        ("all_gather_matmul", 256, 2),  # programs push: tiles of all four ranks' rows go together
        ("all_gather_matmul", 512, 1),  # copy engines push: those of one rank's
        ("all_gather_matmul", 1024, 2),
        ("all_gather_matmul", 8192, 4),
        ("matmul_reduce_scatter", 512, 1),
        ("matmul_reduce_scatter", 1024, 2),
    ],
)
def test_tiles_are_grouped_by_the_arrival_of_their_rows(operator, m, group_rows):
    call = call_of(operator, m)
    default = default_kernel(call, HOPPER)
    assert default.blocks.group_rows == group_rows
    rows = m if default.transfer == "programs" and operator == "all_gather_matmul" else m // 4
    tried = [plan.blocks for plan in vary_blocks(call, HOPPER)]
    assert max(blocks.group_rows for blocks in tried if blocks.m == 128) == min(8, rows // 128)


@pytest.mark.parametrize(
    ("n", "columns", "programs"),
    [(4096, 64, 98), (8192, 96, 86), (12288, 128, 96), (28672, 160, 90), (1024, 32, 96)],  # of 99 that may wait,
)
def test_tiles_of_few_rows_are_as_wide_as_a_programs_share(n, columns, programs):
    for operator in OPERATORS:
        blocks = default_config(call_of(operator, 64, n=n), HOPPER)[0].blocks
        assert blocks.n == columns
        assert split_steps(64, n, 12288, blocks)[1] == programs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", "'fast' is no configuration"),
        ('{"blocks": null, "speed": 1}', "is no configuration"),
        ('{"blocks": null, "transfer": "radio"}', "transfer must be one of copies, programs, not 'radio'"),
        ('{"blocks": [128, 100, 64, 8, 8, 4, 132]}', "n of blocks must be a multiple of 16, not 100"),
        ('{"blocks": [96, 128, 64, 8, 8, 4, 132]}', "m of blocks must be a power of two"),
        ('{"blocks": null, "movers": 0}', "a configuration's movers must be a whole number, 1 or more, not 0"),
    ],
)
def test_an_invalid_plan_raises(text, words):
    with pytest.raises(ValueError, match=words):
        decode(text)


@pytest.mark.parametrize("others", [{}, {"transfer": "programs", "schedule": "ring"}])
def test_only_copy_engines_pull_and_by_a_schedule(others):
    with pytest.raises(ValueError, match='"pull" goes with schedule= and "copies"'):
        require_config(KernelConfig(direction="pull", **others))


def tune_and_choose(folder):
    """Plans' times, and what auto takes: there, at nearly as many rows, at many more, and for another weight."""
    os.environ["STRETTO_CACHE"] = folder
    try:
        measured = ops.tune("all_gather_matmul", 48, 40, 32, dtype=torch.float32, device="cpu")
        name = dist.group.WORLD.group_name

        def chosen(rows, n):
            x, weight = torch.zeros(rows, 32), torch.zeros(n, 32)
            call = choices.describe_problem("all_gather_matmul", 2 * rows, x, weight, name)
            plan = choices.choose_config(call, x, weight, name, "auto")
            default, _ = config.default_config(call, choices.find_machine(x, weight))
            return plan.encode() if plan in measured and (rows, n) in ((24, 40), (30, 40)) else plan == default

        texts = {plan.encode(): seconds for plan, seconds in measured.items()}
        far, other = ("default" if chosen(*shape) else "measured" for shape in ((96, 40), (24, 48)))
        return texts, chosen(24, 40), chosen(30, 40), far, other
    finally:
        del os.environ["STRETTO_CACHE"]


@pytest.mark.exhaustive
def test_measured_times_are_stored_and_used_by_all_ranks(interpret, tmp_path):
    results = interpret(2, tune_and_choose, str(tmp_path))
    for measured, chosen, near, far, other in results:
        assert (measured, chosen, near, far, other) == results[0]
        assert len(measured) >= 3
        assert "library" in measured
        assert chosen == near == min(measured, key=measured.__getitem__)
        assert far == other == "default"


def tune_gathered(folder):
    """(what was tuned, what runs then) of a gather that returns its rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", folder)
        measured = ops.tune("all_gather_matmul_gathered", 16, 16, 32, dtype=torch.float32, device="cpu")
        x, weight, name = torch.ones(8, 32), torch.ones(16, 32), dist.group.WORLD.group_name
        chosen = []
        for returns_gathered in (True, False):
            call = choices.describe_problem("all_gather_matmul", 16, x, weight, name, returns_gathered=returns_gathered)
            chosen.append(choices.choose_config(call, x, weight, name, "auto"))
        product, gathered = ops.all_gather_matmul_gathered(x, weight)
        assert torch.equal(product, gathered @ weight.t())
        return measured, chosen


def test_a_gather_that_returns_its_rows_is_tuned_by_itself(interpret, tmp_path):
    for measured, (chosen, other) in interpret(2, tune_gathered, str(tmp_path)):
        assert chosen == min(measured, key=measured.__getitem__)
        assert len(measured) > 3
        assert {(plan.transfer, plan.direction) for plan in measured} == {("copies", "push")}
        assert other.transfer == "programs"  # the default: nothing was measured


def choose_by_different_stores(folders):
    """Return what runs where rank 0's store says the library, and the other's says nothing."""
    os.environ["STRETTO_CACHE"] = folders[dist.get_rank()]
    try:
        x, weight = torch.ones(8, 16), torch.ones(24, 16)
        name = dist.group.WORLD.group_name
        call = choices.describe_problem("all_gather_matmul", 16, x, weight, name)
        if dist.get_rank() == 0:
            keys = {choices.name_time(call.name, config.LIBRARY): [1e-6], "ops nonsense by nothing": [1.0]}
            TuningStore().add(machine_key(x.device), keys)
        ops.all_gather_matmul(x, weight)
        return choices.choose_config(call, x, weight, name, "auto").encode()
    finally:
        del os.environ["STRETTO_CACHE"]


@pytest.mark.exhaustive
def test_ranks_take_what_rank_0_has_measured(interpret, tmp_path):
    folders = [str(tmp_path / "one"), str(tmp_path / "other")]
    assert interpret(2, choose_by_different_stores, folders) == ["library", "library"]


def test_on_cpus_that_do_not_interpret_the_library_runs_and_is_counted(ranks):
    for results, warned in ranks(2).run(uninterpreted.run_without_kernels):
        assert results == {(operator, "library"): 1 for operator in OPERATORS}
        assert "operators run by the library, unfused" in warned


def test_more_packets_than_32_bits_count_are_refused():
    assert count_bytes("one-shot", 1 << 18, 4096, 4, torch.float32) == 4 * 4 * 4096 << 18
    with pytest.raises(ValueError, match='give implementation="library", or fewer rows'):
        count_bytes("one-shot", 1 << 19, 4096, 4, torch.float32)


def list_modules_of_a_launch(plan):
    """The modules of Stretto on the stack when a warm call launches its kernel."""
    module, name = gather_module, "all_gather_gemm_by_programs"
    if plan == "copies":
        module, name = joint_module, "joint_gemm_by_copies"
    kernel, found = getattr(module, name), []

    class Noting:
        def __getitem__(self, grid):
            frame = sys._getframe()
            while frame is not None:
                where = frame.f_globals["__name__"]
                if where.startswith("stretto.") and where not in found:
                    found.insert(0, where)
                frame = frame.f_back
            return kernel[grid]

    x, weight = random_of(dist.get_rank(), 40, 32), random_of(10, 24, 32)
    for _ in range(2):
        ops.all_gather_matmul(x, weight, implementation=find_plan(plan))
    with mock.patch.object(module, name, Noting()):
        ops.all_gather_matmul(x, weight, implementation=find_plan(plan))
    return found


def list_modules_of_a_call(plan):
    """The modules of stretto.ops that a first call of its kind runs, its kernel among it."""
    found = set()

    def note(frame, _event, _argument):
        found.add(frame.f_globals.get("__name__", ""))

    x, weight = random_of(dist.get_rank(), 24, 16), random_of(10, 24, 16)
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        ops.all_gather_matmul(x, weight, implementation=find_plan(plan))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {module.removeprefix("stretto.ops.") for module in found if module.startswith("stretto.ops")}


@pytest.mark.parametrize(("plan", "schedules"), [("auto", True), ("pushes", False)])
def test_seven_modules_have_all_of_a_call_and_four_its_schedule(interpret, plan, schedules):
    """Checks, choice and whether it may be timed, configuration, workspace, launch and kernel: what a reader opens."""
    expected = {"all_gather_matmul", "choices", "config", "confirmation", "gemm", "operands", "operator"}
    if schedules:
        expected |= {f"joint.{module}" for module in ("copies", "kernel", "launch", "registry")}
    for found in interpret(2, list_modules_of_a_call, plan):
        assert found == expected


@pytest.mark.parametrize("plan", ["copies", "pushes"])
def test_a_call_passes_few_modules_to_its_kernels_launch(interpret, plan):
    for found in interpret(2, list_modules_of_a_launch, plan):
        assert {"stretto.ops.all_gather_matmul", "stretto.ops.operator"} <= set(found)
        assert len(found) <= 5, found


def test_a_kernel_that_waits_for_copies_leaves_them_room_where_ranks_share_a_gpu(monkeypatch):
    """A copy within a GPU may need a multiprocessor of its rank, which 8 of 16 programs leave; others have all."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(gpus, "count_processors", lambda index: 16)
    for is_shared, programs in ((False, 132), (True, 8)):
        monkeypatch.setattr(gpus.shared_gpus, "is_enabled", lambda is_shared=is_shared: is_shared)
        gpus.leave_room_for_copies.cache_clear()
        assert gpus.leave_room_for_copies(132, device) == programs
    gpus.leave_room_for_copies.cache_clear()


@pytest.mark.parametrize(("m", "transfer", "programs"), [(512, "copies", 132), (256, "programs", 99)])
def test_only_a_gather_whose_programs_wait_has_fewer_programs_than_multiprocessors(m, transfer, programs):
    chosen = default_kernel(call_of("all_gather_matmul", m), HOPPER)
    assert (chosen.transfer, chosen.blocks.programs) == (transfer, programs)
