# SPDX-License-Identifier: Apache-2.0
"""Tests of predicted times: constants of one machine's measured times give the right choices on the other."""

import json
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from stretto.ops import prediction
from stretto.ops.config import LIBRARY, PUSHED_ROWS, GemmProblem, Machine, default_config, default_kernel
from stretto.ops.gemm import Blocks
from stretto.ops.joint.launch import count_piece_rows
from stretto.ops.prediction import (
    FITTED,
    NEVER_SLOWER,
    Constants,
    GemmCall,
    Speeds,
    count_pieces,
    find_speeds,
    predict_kernel,
    predict_library,
)

RESULTS = Path(__file__).parents[2] / "lab" / "results"
NAMES = {"gather": "all_gather_matmul", "scatter": "matmul_reduce_scatter", "reduce": "matmul_all_reduce"}
# Clocks, bus width and links as the driver gives them.
H200 = Speeds(132 * 1980e6 * 4096, 2 * 3201e6 * 6144 / 8, 18 * 25e9)
H100 = Speeds(132 * 1980e6 * 4096, 2 * 2619e6 * 5120 / 8, 18 * 25e9)
WIDE, FEW = (128, 256, 64, 8, 8, 4, 132), (64, 128, 128, 1, 4, 3, 99)
# `stretto bench ops`, 4 x H100, torch 2.11, NCCL 2.28.9, 2026-11-28, CUDA graphs: m x 12288 x 12288, in milliseconds.
ON_H100 = (  # operator, m, GEMM + NCCL, Stretto, its blocks, what exchanged
    ("gather", 64, 0.126, 0.121, FEW, "programs"),
    ("gather", 1024, 0.596, 0.529, WIDE, "copies"),
    ("gather", 2048, 1.090, 0.960, WIDE, "copies"),
    ("gather", 4096, 2.128, 1.880, WIDE, "copies"),
    ("gather", 8192, 4.157, 4.091, (128, 128, 64, 4, 4, 3, 264), "copies"),
    ("scatter", 64, 0.124, 0.112, FEW, "packets"),
    ("scatter", 1024, 0.577, 0.521, WIDE, "copies"),
    ("scatter", 2048, 1.073, 0.943, WIDE, "copies"),
    ("scatter", 4096, 2.132, 1.852, WIDE, "copies"),
    ("scatter", 8192, 4.067, 3.679, WIDE, "copies"),
)


# `python -m lab joint-schedules`, 2 x H200, 2026-11-30, CUDA graphs: m x 4096 x 7168, GEMM + NCCL and two shots, in ms.
REDUCES_ON_H200 = ((2048, 0.2439, 0.2223), (4096, 0.4627, 0.3844), (8192, 0.9226, 0.7509), (16384, 1.9974, 1.5430))


@pytest.mark.parametrize(("links", "expected"), [(18, H200), (0, None)])
def test_speeds_are_of_the_numbers_that_the_driver_gives(links: int, expected: Speeds | None) -> None:
    found = SimpleNamespace(
        multi_processor_count=132, clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=6144, uuid="GPU"
    )
    with (
        mock.patch.object(torch.cuda, "get_device_properties", return_value=found),
        mock.patch.object(prediction, "count_links", return_value=links),
    ):
        assert find_speeds(torch.device("cuda")) == (expected and pytest.approx(expected))


class Row(NamedTuple):
    call: GemmCall
    speeds: Speeds
    blocks: Blocks
    exchange: str
    shots: int
    library: float
    kernel: float

    def predict(self, constants):
        kernel = predict_kernel(self.call, self.speeds, 132, self.blocks, self.exchange, self.shots, constants)
        return predict_library(self.call, self.speeds, constants), kernel

    def is_right(self, constants):
        """True if what should be chosen reaches that part of the other's speed, as measured."""
        library, kernel = self.predict(constants)
        takes_kernel = NEVER_SLOWER * kernel <= library
        chosen, other = (self.kernel, self.library) if takes_kernel else (self.library, self.kernel)
        return NEVER_SLOWER * chosen <= other


def distance(rows, constants):
    """The median of how far predicted speed-ups of the kernel over the library are from measured ones, in logarithms.

    Nearly all kernels of the committed runs are the faster, so that the choices alone would be right of nearly any
    constants.
    """
    far = []
    for row in rows:
        library, kernel = row.predict(constants)
        far.append(abs(math.log(library / kernel) - math.log(row.library / row.kernel)))
    return statistics.median(far)


def read_rows(folder, itemsize=2):
    """The rows of a committed run in CUDA graphs, on H200."""
    content = json.loads((RESULTS / folder).read_text())
    for row in content["rows"]:
        if row["mode"] != "graph":
            continue
        plan = json.loads(row["plan"])
        is_gather = row["operator"] == "gather"
        exchange = plan["transfer"] if is_gather or plan["exchange"] == "tiles" else "packets"
        if exchange == "programs" and row["m"] > PUSHED_ROWS:
            continue  # measured when programs took so many rows
        call = GemmCall(NAMES[row["operator"]], row["m"], row["n"], row["k"], itemsize, content["ranks"])
        times = row["nccl"] / 1e3, row["stretto"] / 1e3
        yield Row(call, H200, Blocks(*plan["blocks"]), exchange, plan["shots"], *times)


@pytest.fixture(scope="module")
def machines():
    of_h200 = [*read_rows("operators/operators.json"), *read_rows("operators-2-gpus/operators.json")]
    of_h100 = [
        Row(GemmCall(NAMES[name], m, 12288, 12288, 2, 4), H100, Blocks(*blocks), exchange, 1, nccl / 1e3, stretto / 1e3)
        for name, m, nccl, stretto, blocks, exchange in ON_H100
    ]
    return {"H200": of_h200, "H100": of_h100}


def fit(rows):
    """Constants whose predicted times are near to the measured ones: by turns each becomes larger, or smaller."""

    def miss(constants):
        total = 0.0
        for row in rows:
            library, kernel = (math.log(time) for time in row.predict(constants))
            total += (library - math.log(row.library)) ** 2 + (kernel - math.log(row.kernel)) ** 2
            total += 2 * (library - kernel - math.log(row.library / row.kernel)) ** 2
        return total

    found, factor = Constants(0.6, 0.8, 0.5, 1e-5, 1e-5, 2e-5), 1.4
    least = miss(found)
    while factor > 1.04:
        tried = [
            found._replace(**{name: value * by})
            for name, value in found._asdict().items()
            for by in (factor, 1 / factor)
        ]
        best = min(tried, key=miss)
        if miss(best) < least:
            found, least = best, miss(best)
        else:
            factor = math.sqrt(factor)
    return found


@pytest.mark.long
@pytest.mark.parametrize(("known", "other"), [("H200", "H100"), ("H100", "H200")])
def test_one_machines_times_predict_nine_of_ten_choices_of_another(machines, known, other):
    constants = fit([row for row in machines[known] if row.call.world == 4])
    assert sum(row.is_right(constants) for row in machines[other]) >= 0.9 * len(machines[other])
    assert distance(machines[other], constants) < 0.05


def test_the_constants_predict_nine_of_ten_choices_of_each_machine(machines):
    machines |= {"fp8": list(read_rows("operators-2-gpus/operators-fp8.json", 1))}
    for name, rows in machines.items():
        assert sum(row.is_right(FITTED) for row in rows) >= 0.9 * len(rows)
        assert distance(rows, FITTED) < (0.08 if name == "fp8" else 0.04)


def test_an_all_reduce_of_many_rows_is_predicted_within_a_sixth_and_chosen_where_it_was_faster():
    for m, library, schedule in REDUCES_ON_H200:
        problem = GemmProblem(NAMES["reduce"], m, 4096, 7168, torch.bfloat16, False, 2)
        kernel = default_kernel(problem, Machine(132, True, True, H200))
        assert kernel.exchange == "tiles"
        call = GemmCall(*problem[:4], 2, 2)
        times = predict_library(call, H200), predict_kernel(call, H200, 132, kernel.blocks, "copies")
        assert times[0] == pytest.approx(library / 1e3, rel=0.15)
        assert times[1] == pytest.approx(schedule / 1e3, rel=0.17)
        assert default_config(problem, Machine(132, True, True, H200))[0] == kernel
    few = problem._replace(m=256)  # each rank would wait for other ranks' rows longer than the library takes
    assert default_config(few, Machine(132, True, True, H200))[0] == LIBRARY


def test_slow_links_and_few_programs_make_a_kernel_slower_than_the_library():
    call, blocks = GemmCall("all_gather_matmul", 512, 12288, 12288, 2, 4), Blocks(*WIDE)
    times = [predict_kernel(call, H100, 132, blocks._replace(programs=count), "programs") for count in (132, 99)]
    assert times[0] < predict_library(call, H100) < times[1]
    times = [predict_kernel(call, H100._replace(link=link), 132, blocks, "copies") for link in (450e9, 10e9)]
    assert times[1] > 2 * times[0]


def test_the_sum_of_one_rank_takes_the_library_no_time():
    call = GemmCall("matmul_all_reduce", 1, 4096, 14336, 2, 1)
    library = predict_library(call, H200)
    assert library == pytest.approx(117e6 / 0.84 / H200.memory, rel=0.02)
    assert predict_kernel(call, H200, 132, Blocks(*FEW), "packets") > library


@pytest.mark.parametrize(
    ("operator", "n", "k", "link", "pieces"),
    [
        ("all_gather_matmul", 3072, 4096, 450e9, 1),  # a shard arrives long before the one before it is multiplied
        ("all_gather_matmul", 1024, 4096, 450e9, 2),  # the links are the slower: a small last piece is left
        ("all_gather_matmul", 3072, 4096, 200e9, 4),
        ("all_gather_matmul", 1024, 4096, 50e9, 1),  # nothing is left, and a piece's signal costs more
        ("matmul_reduce_scatter", 4096, 5504, 450e9, 1),
        ("matmul_reduce_scatter", 4096, 2752, 450e9, 2),  # whose sums take longer than the last wave
        ("matmul_reduce_scatter", 4096, 2752, 200e9, 4),
        ("matmul_all_reduce", 4096, 5504, 450e9, 4),  # its sums' last piece comes after the product
    ],
)
def test_copy_engines_transfer_in_no_more_pieces_than_hide_them(operator, n, k, link, pieces):
    """Llama-2 7B's layers on four ranks, 32,768 tokens: eight pieces of 8 MB each, if they were of one size."""
    speeds = H200._replace(link=link)
    problem = GemmProblem(operator, 32768, n, k, torch.bfloat16, False, 4, returns_gathered=True)
    found = default_kernel(problem, Machine(132, True, True, speeds))
    assert count_pieces(GemmCall(operator, 32768, n, k, 2, 4), speeds, 132, found.blocks) == pieces
    width = k if operator == "all_gather_matmul" else n
    assert -(-8192 // count_piece_rows(found, 2 * width)) == pieces
    unknown = default_kernel(problem, Machine(132, True, True))
    assert unknown.piece_bytes == (8 if operator == "all_gather_matmul" else 6) << 20
