# SPDX-License-Identifier: Apache-2.0
"""The grids of `train.grids`: how they are written, which are refused, and which one is chosen."""

from pathlib import Path
from typing import Any

import pytest
from tests.train import runs

from stretto.recommendation.training.config import DLRMTrainConfig
from stretto.train.config import ConfigError, TrainConfig, config_to_toml, load_config, make_config
from stretto.train.gpt import kind
from stretto.train.preflight import preflight
from stretto.train.smaller_grids import choose_grid, choose_grid_of


def configure(tmp_path: Path, *overrides: str) -> TrainConfig:
    return runs.configure(tmp_path / "out", "grid={data=2, x=2}", *overrides)


def click_run(tmp_path: Path, *overrides: str) -> DLRMTrainConfig:
    values = {
        "out": str(tmp_path / "out"),
        "device": "cpu",
        "ranks": 4,
        "model": {"kind": "dlrm", "rows": [40, 30], "dim": 4, "bottom": [8, 4], "top": [8, 1], "dense": 13},
        "data": {"format": "synthetic", "samples": 64, "evaluation_samples": 0},
        "train": {"steps": 2, "batch": 12},
    }
    config = make_config(values, list(overrides))
    assert isinstance(config, DLRMTrainConfig)
    return config


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("none", None),
        ("auto", "auto"),
        ("x=2", ["data=1 x=2 y=1 z=1"]),
        ("data=2 x=1", ["data=2 x=1 y=1 z=1"]),
        ('["x=2", "data=1"]', ["data=1 x=2 y=1 z=1", "data=1 x=1 y=1 z=1"]),
        ("[{x = 2, z = 3}, {pipe = 2}]", ["data=1 x=2 y=1 z=3", "pipe=2 data=1 x=1 y=1 z=1"]),
        ("{data = 2, expert = 2}", ["data=2 x=1 y=1 z=1 expert=2"]),
    ],
)
def test_grids_are_tables_or_texts_and_the_written_configuration_reads_back(
    tmp_path: Path, written: str, read: object
) -> None:
    config = configure(tmp_path, f"train.grids={written}")
    assert config.train.grids == (read if not isinstance(read, list) else [normalized(text) for text in read])
    (file := tmp_path / "config.toml").write_text(config_to_toml(config))
    assert load_config(file) == config


def normalized(text: str) -> str:
    """The same sizes, in the order in which Stretto lists axes."""
    order = ("pipe", "data", "context", "x", "y", "z", "expert")
    return " ".join(sorted(text.split(), key=lambda part: order.index(part.partition("=")[0])))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("data:2", "train.grids has 'data:2', but a grid is written as 'data=2 x=2'"),
        ("[2]", "train.grids has 2, but must be 'auto' or a list of grids"),
        ("[{width = 2}]", "train.grids has the grid 'width=2', where width is no axis"),
        ("[{x = 0}]", "train.grids has the grid 'x=0', where x is 0"),
        ('["x=two"]', "train.grids has the grid 'x=two', where x is 'two'"),
        ('[""]', "train.grids has an empty grid"),
        (str(["x=2"] * 65), "train.grids has 65 grids, but may have at most 64"),
    ],
)
def test_invalid_grids_raise(tmp_path: Path, written: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configure(tmp_path, f"train.grids={written}")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.grids=x=4"], "train.grids has the grid data=1 x=4 y=1 z=1, of 4 ranks, but must have fewer than"),
        (["train.grids=data=3"], "train.grids has the grid data=3 x=1 y=1 z=1, with which train.batch is 8, but"),
        (["train.grids=x=3"], "train.grids has the grid data=1 x=3 y=1 z=1, with which the grid"),
        (["train.grids=[{x=2}, {data=2}]", "train.micro_batch=4", "train.batch=16", "train.shard_sequence=true"], ""),
        (
            ["train.grids=[{x=2}, {pipe=3}]"],
            "train.grids has the grid pipe=3 data=1 x=1 y=1 z=1, with which grid.pipe=3 with 1 stages a rank makes 3",
        ),
    ],
)
def test_every_grid_is_checked_before_a_run_starts(tmp_path: Path, overrides: list[str], message: str) -> None:
    config = configure(tmp_path, *overrides)
    if not message:
        assert preflight(config).grid == config.grid
        return
    with pytest.raises(ValueError) as refused:
        preflight(config)
    assert str(refused.value).startswith(message)


def test_the_largest_named_grid_that_fits_is_taken(tmp_path: Path) -> None:
    config = configure(tmp_path, "train.grids=[{data=1}, {x=2}, {data=2}]")
    chosen = {ranks: choose_grid(config, ranks) for ranks in range(6)}
    assert chosen[0] is None
    grids = {ranks: str(each.config.grid) for ranks, each in chosen.items() if each is not None}
    whole, two = "data=2 x=2 y=1 z=1", "data=1 x=2 y=1 z=1"
    assert grids == {1: "data=1 x=1 y=1 z=1", 2: two, 3: two, 4: whole, 5: whole}
    assert chosen[3] is not None
    assert chosen[3].config.ranks == 2
    assert chosen[3].config.train == config.train
    assert choose_grid_of(config, 3) is None


def test_automatically_the_most_parts_of_the_batch_are_taken_where_nothing_can_be_predicted(tmp_path: Path) -> None:
    config = configure(tmp_path, "train.grids=auto", "train.batch=6")
    three, two = choose_grid(config, 3), choose_grid(config, 2)
    assert three is not None
    assert two is not None
    assert str(three.config.grid) == "data=3 x=1 y=1 z=1"
    assert str(two.config.grid) == "data=2 x=1 y=1 z=1"
    assert three.why == "the only one that can hold the model"
    assert "the most parts of the batch" in two.why
    odd = choose_grid(configure(tmp_path, "train.grids=auto", "train.batch=2"), 3)  # 3 divides neither batch nor heads
    assert odd is not None
    assert odd.config.ranks == 2


def test_grids_without_the_ranks_that_x_folds_into_divide_no_experts(tmp_path: Path) -> None:
    folded = ("grid.expert=4", "grid.expert_tensor=fold", "model.num_experts=4", "train.grids=auto")
    chosen = choose_grid(configure(tmp_path, *folded), 2)
    assert chosen is not None
    assert "of 4 that can hold the model" in chosen.why  # data, x, y or z, each of 2 ranks


def test_a_grid_that_cannot_hold_the_model_is_not_counted_among_those_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(tmp_path, "train.grids=auto")
    before = choose_grid(config, 2)
    assert before is not None
    assert before.why == "the most parts of the batch of 4 that can hold the model"
    check = kind.check_built

    def refuse_one(other: TrainConfig, *built: Any) -> None:
        if other.grid == before.config.grid:
            raise ValueError("the model does not fit")
        check(other, *built)

    monkeypatch.setattr(kind, "check_built", refuse_one)
    after = choose_grid(config, 2)
    assert after is not None
    assert after.config.grid != before.config.grid
    assert after.why == "the most parts of the batch of 3 that can hold the model"


def test_automatically_the_grid_that_the_planner_predicts_to_be_the_fastest_is_taken(tmp_path: Path) -> None:
    from stretto.planner import predict

    shape = "model={layers=2, hidden=256, heads=8, vocab=256, max_seq_len=16}"
    config = configure(tmp_path, "train.grids=auto", "cluster=dgx-h100", "train.dtype=bf16", shape)
    chosen = choose_grid(config, 2)
    assert chosen is not None
    from stretto.cluster import Cluster
    from stretto.train.gpt.preflight import build_source, open_data

    architecture = build_source(config, open_data(config), None).architecture(config.train.seq_len)
    times = {
        axis: predict(
            architecture, Cluster.preset("dgx-h100"), grid={axis: 2}, batch=8, seq_len=16, options=config.execution
        ).step_time
        for axis in ("data", "x", "y", "z")
    }
    fastest = min(times, key=lambda axis: times[axis])
    assert getattr(chosen.config.grid, fastest) == 2
    assert "predicted to be the fastest of 4" in chosen.why


def test_a_recommendation_model_takes_the_axis_data_alone(tmp_path: Path) -> None:
    chosen = choose_grid(click_run(tmp_path, "train.grids=auto"), 3)
    assert chosen is not None
    assert chosen.config.ranks == 3
    with pytest.raises(
        ValueError, match=r"train\.grids has the grid data=1 x=2 .* only the axis data; data=2 would do"
    ):
        preflight(click_run(tmp_path, "train.grids=x=2"))
    assert preflight(click_run(tmp_path, "train.grids=data=2")).ranks == 4
