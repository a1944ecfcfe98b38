# SPDX-License-Identifier: Apache-2.0
"""`stretto bench ops`, all but the timing, between interpreted ranks."""

import importlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab.operators.peers_plot import plot_operators
from stretto.bench.interleaved import Timed
from stretto.bench.operators.settings import CASES, FEW_ROWS, OPERATORS, OperatorsSetting, OperatorsTuning, local_shape


def bench_dryly(folder, dtype="bf16"):
    """The bench of operators in tiny shapes, its timing left out; rank 0's rows."""
    module = importlib.import_module("stretto.bench.operators.run")
    shapes = importlib.import_module("stretto.bench.operators.settings")

    def time_nothing(runs, size, **options):
        for name, run in runs.items():
            if name != "async_tp":
                run()
        return {name: Timed(1e-3 * (1 + place), 1e-5) for place, name in enumerate(runs)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time_interleaved", time_nothing)
        patch.setattr(shapes, "CASES", {"flux": (64, 32)})
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        setting = shapes.OperatorsSetting(cases=("flux",), ms=(16,), implementation="kernel", dtype=dtype)
        module.measure_all(dist.get_world_size(), Path(folder), setting)
    dist.barrier()
    name = setting.file_name
    return json.loads((Path(folder) / f"{name}.json").read_text())["rows"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_every_operator_is_measured_with_its_peers_and_reports_what_ran(interpret, tmp_path, dtype):
    rows = interpret(2, bench_dryly, str(tmp_path), dtype)[0]
    names = [name for name in OPERATORS if (name, dtype) != ("gathered", "fp8")]
    expected = [(name, mode) for name in names for mode in ("graph", "eager")]
    assert [(row["operator"], row["mode"]) for row in rows] == expected
    for row in rows:
        assert row["ran"] == "kernel"
        assert row["error"] < 0.02
        # The fake times are 1 ms for the GEMM, 2 for GEMM + NCCL, then 3 for async-TP, and the last for Stretto.
        assert row["efficiency"] == pytest.approx(1 - (row["stretto"] - 1) / 1)
        assert (row["async_tp"] is None) == (row["operator"] == "reduce")
    file = tmp_path / ("operators.json" if dtype == "bf16" else "operators-fp8.json")
    plot_operators(json.loads(file.read_text()), tmp_path / "operators.png")
    assert (tmp_path / "operators.png").stat().st_size > 10_000


@pytest.mark.long
def test_rows_of_an_earlier_run_stay_unless_they_are_measured_again(interpret, tmp_path):
    interpret(2, bench_dryly, str(tmp_path))
    file = tmp_path / "operators.json"
    file.write_text(file.read_text().replace('"m": 16', '"m": 32'))
    rows = interpret(2, bench_dryly, str(tmp_path))[0]
    assert sorted({row["m"] for row in rows}) == [16, 32]
    assert len(rows) == 16


def test_shapes_are_a_ranks_and_what_tma_takes():
    for case in CASES:
        for world in (2, 3, 4):
            m, n, k = local_shape("gather", case, 512, world)
            assert local_shape("scatter", case, 512, world) == (m, k, n)
            assert n % 16 == 0
            assert k % 16 == 0
    assert OperatorsSetting().rows_of("reduce", "llama-7b") == FEW_ROWS
    assert OperatorsSetting().rows_of("gather", "attention-4096") == ()
    assert OperatorsSetting(ms=(7,)).rows_of("scatter", "flux") == (7,)


def test_all_forms_that_training_and_inference_call_are_tuned():
    shapes = {"cases": ("flux",), "ms": (1024,)}
    calls = [(operator, transposed) for operator, _, _, _, transposed in OperatorsTuning(**shapes).calls(4)]
    gathered, scatter = "all_gather_matmul_gathered", "matmul_reduce_scatter"  # with backward passes
    assert set(calls) == {
        *((name, False) for name in OPERATORS.values()),
        *((name, True) for name in (gathered, scatter)),
    }
    problems = OperatorsTuning(**shapes).problems(4)
    assert f"{scatter} 1024 x 12288 x 12288 bf16 transposed" in problems
    assert len(problems) == len(calls)
    assert not any("gathered" in problem for problem in OperatorsTuning(**shapes, dtype="fp8").problems(4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cases": ("gpt",)}, "there is no case 'gpt': there are flux, llama-7b"),
        ({"operators": ("scan",)}, "there is no operator 'scan': there are gather, gathered, scatter, reduce"),
        ({"modes": ("lazy",)}, "there is no mode 'lazy'"),
        ({"implementation": "best"}, "there is no implementation 'best'"),
        ({"operators": ("gathered",), "dtype": "fp8"}, "gathered has no fp8 form: gather has one"),
        ({"dtype": "fp4"}, "there is no dtype 'fp4': there are bf16, fp8"),
    ],
)
def test_missing_inputs_raise(options, words):
    with pytest.raises(ValueError, match=words):
        OperatorsSetting(**options)
