# SPDX-License-Identifier: Apache-2.0
"""Schedules among a tuner's candidates, and what "auto" makes of their times."""

import pytest
import torch
import torch.distributed as dist
from tests.ops.operands import BLOCKS

from stretto import ops
from stretto.ops import choices
from stretto.ops.config import GemmProblem, Machine
from stretto.ops.joint import registry
from stretto.ops.tuning import vary_puts, vary_transfers
from stretto.tuning import TuningStore, machine_key


@pytest.mark.parametrize("operator", list(registry.CANDIDATES))
def test_a_tuner_measures_schedules_with_several_numbers_of_movers(operator):
    problem = GemmProblem(operator, 4096, 4096, 4096, torch.bfloat16, False, 4)
    config = ops.KernelConfig(blocks=BLOCKS)
    measured = [one for one in vary_transfers(problem, Machine(132, True, True), config) if one.schedule]
    assert {one.schedule.rpartition(" ")[0] for one in measured} == set(registry.CANDIDATES[operator])
    assert {one.movers for one in measured} == {16, 32}
    for other in (problem._replace(world=1), problem._replace(m=16), problem._replace(dtype=torch.float8_e4m3fn)):
        assert not [one for one in vary_transfers(other, Machine(132, True, True), config) if one.schedule]


@pytest.mark.parametrize("operator", list(registry.CANDIDATES))
def test_between_nodes_a_tuner_measures_two_levels_first_and_only_schedules_whose_programs_put(operator):
    problem, machine = GemmProblem(operator, 4096, 4096, 4096, torch.bfloat16, False, 4), Machine(132, True, True)
    for nodes, algorithm in (((0, 0, 1, 1), "hierarchical"), ((0, 0, 0, 1), ""), ((0, 1, 0, 1), "")):
        configs = list(vary_puts(problem, machine, nodes))
        assert {one.transfer for one in configs} == {"programs"}
        assert all(one.schedule and one.blocks for one in configs)
        assert ("hierarchical" in configs[0].schedule) == bool(algorithm)


def call_by_a_stored_choice(folder):
    """(the schedule that runs, whether its product is right, what runs where a stored schedule is unknown)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_CACHE", folder)
        x, weight = torch.ones(12, 16), torch.ones(24, 16)
        name, found = dist.group.WORLD.group_name, []
        (ring,) = [one for one in registry.list_candidates("all_gather_matmul", 2) if one.startswith("ring")]
        for schedule in (ring, "ring-all-gather 0123456789ab"):
            registry._schedules.clear()  # as in another process
            registry._names.clear()
            call = choices.describe_problem("all_gather_matmul", 24, x, weight, name)
            if dist.get_rank() == 0:
                config = ops.KernelConfig(blocks=BLOCKS, movers=1, schedule=schedule)
                keys = {choices.name_time(call.name, config): [1e-9 if schedule == ring else 1e-10]}
                TuningStore().add(machine_key(x.device), keys)
            dist.barrier()
            choices.clear_choices()
            product = ops.all_gather_matmul(x, weight)
            assert torch.equal(product, torch.full((24, 24), 16.0))
            found.append(choices.choose_config(call, x, weight, name, "auto").schedule)
        return found == [ring, ring]


def test_a_stored_schedule_runs_in_another_process_and_an_unknown_one_does_not(interpret, tmp_path):
    assert interpret(2, call_by_a_stored_choice, str(tmp_path)) == [True, True]
