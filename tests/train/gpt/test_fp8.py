# SPDX-License-Identifier: Apache-2.0
"""Runs in float8: their losses beside bf16's, resumption on other grids, and what the configuration refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import Ranks
from tests.train import runs
from tests.train.test_trainer import on_grid, run

from stretto.train.checkpoint import checkpoint_path

MakeRanks = Callable[[int], Ranks]
MODEL = ("model.layers=4", "model.hidden=64", "model.heads=4", "model.ffn=128", "train.lr=1e-3")
IN_FP8 = (*MODEL, "train.dtype=fp8")


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        pytest.param("tensorwise", 6, marks=pytest.mark.long),
        pytest.param("tensorwise", 40, marks=pytest.mark.exhaustive),
        pytest.param("rowwise", 40, marks=pytest.mark.exhaustive),
    ],
)
def test_the_loss_is_near_that_of_bf16_and_a_run_resumes_on_other_grids(
    ranks: MakeRanks, tmp_path: Path, recipe: str, steps: int
) -> None:
    options, half = (*IN_FP8, f"train.fp8_recipe={recipe}", f"train.steps={steps}"), steps // 2
    whole = run(ranks, tmp_path / "fp8", *options, *on_grid(z=2), f"train.checkpoint_every={half}")
    in_bf16 = run(ranks, tmp_path / "bf16", *MODEL, "train.dtype=bf16", f"train.steps={steps}", *on_grid(z=2))
    assert [line["loss"] for line in whole] != [line["loss"] for line in in_bf16]
    for ours, theirs in zip(whole, in_bf16, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01), ours["step"]
    middle = checkpoint_path(tmp_path / "fp8", half)
    for name, *more in (("x", *on_grid(x=2)), ("pipe", *on_grid(pipe=2), "train.micro_batch=4")):
        resumed = run(ranks, tmp_path / name, *options, *more, f"train.resume={middle}")
        assert [line["step"] for line in resumed] == list(range(half + 1, steps + 1))
        for ours, theirs in zip(resumed, whole[half:], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_loss_of_500_steps_is_within_half_a_percent_of_bf16s(ranks: MakeRanks, tmp_path: Path, recipe: str) -> None:
    options = (*on_grid(z=2), "train.steps=500", "train.batch=16")
    found = run(ranks, tmp_path / "fp8", *IN_FP8, f"train.fp8_recipe={recipe}", *options)
    expected = run(ranks, tmp_path / "bf16", *MODEL, "train.dtype=bf16", *options)
    last = [sum(line["loss"] for line in lines[-50:]) / 50 for lines in (found, expected)]
    first = [sum(line["loss"] for line in lines[:50]) / 50 for lines in (found, expected)]
    assert first[0] == pytest.approx(first[1], rel=0.005)
    assert last[0] == pytest.approx(last[1], rel=0.005, abs=0.005)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.fp8_recipe=nvfp4", "train.dtype=fp8"], "'nvfp4' has 4 bits"),
        (["train.fp8_recipe=rowwise"], "train.fp8_recipe is 'rowwise', but train.dtype is 'fp32'"),
        (['train.fp8_leave_out=["first"]', "train.dtype=fp8"], "('head', 'first') would do"),
        (["train.dtype=fp8", "train.sparsity=0.5", "train.optimizer_state=device"], "train.dtype='bf16' would do"),
        (["train.dtype=mxfp8"], "'fp8'"),
    ],
)
def test_the_configuration_says_what_would_do(tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="train") as raised:
        runs.configure(tmp_path / "run", *options)
    assert message in str(raised.value)
