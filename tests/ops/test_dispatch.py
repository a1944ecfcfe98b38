# SPDX-License-Identifier: Apache-2.0
"""Which plan is taken: pinned, measured or the default, alike on all ranks."""

import pytest
import torch
from tests.ops import uninterpreted

from stretto import ops
from stretto.ops import KernelConfig
from stretto.ops.gemm.config import LIBRARY, GemmProblem, Machine, decode, require_config
from stretto.ops.gemm.defaults import default_config, vary_blocks, vary_transfers
from stretto.ops.small_m import count_bytes, split_steps

HOPPER = Machine(132, True, True)
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
    ("operator", "m", "group_rows"),
    [
        ("all_gather_matmul", 512, 4),  # programs push: tiles of all four ranks' rows go together
        ("all_gather_matmul", 1024, 2),  # copy engines push: those of one rank's
        ("all_gather_matmul", 8192, 4),
        ("matmul_reduce_scatter", 512, 1),
        ("matmul_reduce_scatter", 1024, 2),
    ],
)
def test_tiles_go_together_whose_rows_come_together(operator, m, group_rows):
    call = call_of(operator, m)
    default, _ = default_config(call, HOPPER)
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
        ('{"blocks": null, "transfer": "radio"}', "a configuration's transfer is one of copies, programs, not 'radio'"),
        ('{"blocks": [128, 100, 64, 8, 8, 4, 132]}', "n of blocks is a multiple of 16, not 100"),
        ('{"blocks": [96, 128, 64, 8, 8, 4, 132]}', "m of blocks is a power of two"),
        ('{"blocks": null, "movers": 0}', "a configuration's movers is a whole number, 1 or more, not 0"),
    ],
)
def test_what_is_no_plan_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        decode(text)


def test_copy_engines_do_not_pull():
    with pytest.raises(ValueError, match='copy engines push: "pull" goes with transfer="programs"'):
        require_config(KernelConfig(direction="pull"))


@pytest.mark.exhaustive
def test_what_was_measured_is_kept_and_taken_by_all_ranks(interpret, tmp_path):
    results = interpret(2, "tune_and_choose", str(tmp_path))
    for measured, chosen, near, far, other in results:
        assert (measured, chosen, near, far, other) == results[0]
        assert len(measured) >= 3
        assert "library" in measured
        assert chosen == near == min(measured, key=measured.__getitem__)
        assert far == other == "default"


@pytest.mark.exhaustive
def test_ranks_take_what_rank_0_has_measured(interpret, tmp_path):
    folders = [str(tmp_path / "one"), str(tmp_path / "other")]
    assert interpret(2, "choose_by_different_stores", folders) == ["library", "library"]


def test_on_cpus_that_do_not_interpret_the_library_runs_and_says_so(ranks):
    for results, warned in ranks(2).run(uninterpreted.run_without_kernels):
        assert results == {(operator, "library"): 1 for operator in OPERATORS}
        assert "operators run by the library, unfused" in warned


def test_more_packets_than_32_bits_count_are_refused():
    assert count_bytes("one-shot", 1 << 18, 4096, 4, torch.float32) == 4 * 4 * 4096 << 18
    with pytest.raises(ValueError, match='give implementation="library", or fewer rows'):
        count_bytes("one-shot", 1 << 19, 4096, 4, torch.float32)


def test_a_config_is_still_found_by_its_old_name():
    with pytest.warns(DeprecationWarning, match=r"stretto\.ops\.Plan is now stretto\.ops\.KernelConfig"):
        assert ops.Plan is KernelConfig


@pytest.mark.parametrize("plan", ["copies", "pushes"])
def test_a_call_passes_few_modules_to_its_kernels_launch(interpret, plan):
    for found in interpret(2, "list_modules_of_a_launch", plan):
        assert {"stretto.ops.all_gather_matmul", "stretto.ops.dispatch"} <= set(found)
        assert len(found) <= 4, found
