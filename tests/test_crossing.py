# SPDX-License-Identifier: Apache-2.0
"""Tests of how the rounds of tests/gpu/crossing.py are drawn, and its kernels for a GPU that is not there."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.crossing import KINDS, ORDERS_OF_GROUPS, RANKS, STAND_IN, Setting, find_order, find_pair


def test_sixteen_rounds_have_every_order_of_two_groups_over_four_ranks():
    leads = {
        tuple(
            find_order(7, number, rank).index("row") < find_order(7, number, rank).index("column")
            for rank in range(RANKS)
        )
        for number in range(ORDERS_OF_GROUPS)
    }
    assert len(leads) == 2**RANKS


def test_each_rank_launches_its_three_kernels_in_all_six_orders():
    for rank in range(RANKS):
        orders = {find_order(7, number, rank) for number in range(200)}
        assert orders == set(itertools.permutations(("row", "column", STAND_IN)))


def test_every_pair_of_kinds_is_used_before_one_repeats():
    setting = Setting(7, 1000, 1.0)
    pairs = [find_pair(setting, batch) for batch in range(2 * len(KINDS) ** 2)]
    assert (
        sorted(pairs[: len(KINDS) ** 2]) == sorted(pairs[len(KINDS) ** 2 :]) == sorted(itertools.product(KINDS, KINDS))
    )
    assert pairs != [find_pair(Setting(8, 1000, 1.0), batch) for batch in range(len(pairs))]


def test_a_kind_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no kinds \\['three shots'\\]: there are one-shot, "):
        Setting(7, 1000, 1.0, ("one-shot", "three shots"))


COMPILE = """
import torch
from tests.gpu.crossing import note_end, stand_in
from stretto.tiles.compile_only import compile_kernel
words, longs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
arguments = longs, words, longs, words, words, words, 16, 20 * 10**9, 1, 4
print(compile_kernel(stand_in, arguments, {"num_warps": 4}, "sm_90")["ptx"])
compile_kernel(note_end, (words, words, words, words, 16, 2**31 - 1), {"num_warps": 1}, "sm_90")
"""


@pytest.mark.long
@pytest.mark.usefixtures("forks_torch_processes")
def test_the_stand_in_signals_its_three_peers_and_waits_by_loads_that_acquire():
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", COMPILE], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("atom.global.sys.release.add.u32") == RANKS - 1
    assert ran.stdout.count("ld.global.sys.acquire.b32") >= RANKS - 1
