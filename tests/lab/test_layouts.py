# SPDX-License-Identifier: Apache-2.0
"""`python -m lab layouts`: files of layouts, predictions before measurements, and the runs beside FSDP2."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.planning.layout_file import predictions_file, read_layout_predictions, read_layouts, shrink
from lab.planning.layouts import BENCH, LayoutsSetting
from stretto.axes import name_grid
from stretto.bench.training.settings import grids_of
from stretto.cluster import Cluster
from stretto.train.gpt.model_source import GPTSource
from stretto.train.gpt.preflight import plan_of_run

ROOT = Path(__file__).parents[2]
BASE = """
[config.model]
layers = 4
hidden = 64
heads = 8
vocab = 256
positions = "rotary"
activation = "swiglu"
norm = "rmsnorm"
bias = false
num_experts = 4
[config.train]
batch = 8
seq_len = 32
dtype = "fp32"
"""
TWO = (
    BASE
    + """
[layouts."pipe=2, 1f1b"]
grid = { pipe = 2 }
train.micro_batch = 2
[layouts."data=2 expert=2, state on the host"]
grid = { data = 2, expert = 2 }
train.dtype = "bf16"
train.optimizer_state = "host"
[peers."FSDP2"]
micro_batch = 2
recompute = true
"""
)


def written(folder: Path, text: str) -> Path:
    path = folder / "tiny.toml"
    path.write_text(text)
    return path


def predict(file: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    """Run the bench's prediction; returns its rows."""
    rows: list[dict[str, Any]] = BENCH(LayoutsSetting(file, "dgx-h100", **options), out)["rows"]
    return rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 layouts"),
        ("layouts = 3", "layouts is 3, but must be a table"),
        ("[layout.a]", "there is no section 'layout'"),
        ("x = [", "is no file of layouts"),
        (BASE + "[layouts.a]\ngrid = { q = 2 }\n", "grid.q"),
        (BASE + "[layouts]\na = 4\n", "the layout 'a' is 4"),
        (BASE + "[layouts.a]\n[layouts.b]\ngrid = { z = 2 }\n", "'b' has another number of ranks than 'a': 2, not 1"),
        (BASE + "[layouts.a]\n[layouts.b]\ntrain.batch = 4\n", "'b' has another train.batch than 'a': 4, not 8"),
        (BASE + "[layouts.a]\n[peers.p]\nmicro_batch = 3\n", "'p' has micro_batch=3, which does not divide"),
        (BASE + "[layouts.a]\n[peers.p]\nmicro_batch = 0\n", "micro_batch is 0"),
        (BASE + "[layouts.a]\n[peers.p]\nrecompute = 1\n", "recompute is 1, but must be true or false"),
        (BASE + "[layouts.a]\n[peers.p]\noptimizer_state = 'disk'\n", "optimizer_state is 'disk'"),
        (BASE + "[layouts.a]\n[peers.p]\nmicro_bacth = 1\n", "did you mean micro_batch"),
    ],
)
def test_a_wrong_file_is_refused_with_the_layout_and_the_rule(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as refused:
        read_layouts(written(tmp_path, text))
    assert "tiny.toml" in str(refused.value) or "section" in message


def test_measurements_need_earlier_predictions_with_the_same_options(tmp_path):
    file = read_layouts(written(tmp_path, TWO))
    with pytest.raises(ValueError, match=r"no file of predictions at .*predictions-tiny\.json; write it before you"):
        read_layout_predictions(tmp_path, file)
    predict(written(tmp_path, TWO.replace("data=2 expert=2, state", "another, state")), tmp_path)
    written(tmp_path, TWO)
    with pytest.raises(ValueError, match="no prediction for the layout 'data=2 expert=2, state on the host'"):
        read_layout_predictions(tmp_path, file)
    predict(file.path, tmp_path)
    assert [row["grid"] for row in read_layout_predictions(tmp_path, file)] == list(file.layouts)
    other = read_layouts(written(tmp_path, TWO.replace("micro_batch = 2\n[layouts", "micro_batch = 1\n[layouts")))
    with pytest.raises(ValueError, match="predicts the layout 'pipe=2, 1f1b' with other options"):
        read_layout_predictions(tmp_path, other)
    predictions_file(tmp_path, "tiny").write_text('{"rows": [3]}')
    with pytest.raises(ValueError, match="holds no predictions"):
        read_layout_predictions(tmp_path, file)


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_the_committed_layouts_can_be_and_are_predicted_as_stretto_plan_does(tmp_path, name):
    file = read_layouts(ROOT / "lab" / "results" / "layouts" / f"{name}.toml")
    assert len(file.layouts) <= 12
    assert {layout.ranks for layout in file.layouts.values()} == {4}
    sizes = [layout.grid.sizes() for layout in file.layouts.values()]
    assert max(each["pipe"] for each in sizes) == 4
    assert max(each.get("expert", 1) for each in sizes) == (4 if name == "experts" else 1)
    cluster = Cluster.preset("dgx-h100")
    (row, *_) = predict(file.path, tmp_path)
    model = file.first.model.to_gpt(data_vocab=0, seq_len=file.first.train.seq_len)
    plan = plan_of_run(file.first, GPTSource(model), cluster)
    assert row["predicted_milliseconds"] == plan.step_time * 1e3
    assert row["predicted_gib"] == plan.peak_memory / 2**30
    assert shrink(file).first.model.hidden <= 256


def test_a_committed_file_has_every_grid_of_four_gpus():
    file = read_layouts(ROOT / "lab" / "results" / "plan" / "gpt-5b.toml")
    assert set(file.layouts) == {name_grid(sizes) for sizes in grids_of(4)}
    assert all(name_grid(layout.grid.sizes()) == name for name, layout in file.layouts.items())


@pytest.mark.exhaustive
def test_layouts_and_peers_are_trained_and_compared(tmp_path):
    file = read_layouts(written(tmp_path, TWO))
    predict(file.path, tmp_path, small=True)
    result = BENCH(LayoutsSetting(file.path, small=True, warm_up=0, repeats=1, rounds=2), tmp_path)
    rows = {row["grid"]: row for row in result["rows"]}
    assert set(rows) == {*file.layouts, "FSDP2"}
    for row in rows.values():
        assert row["reason"] is None, row
        assert len(row["seconds"]) == 2
        assert 4.5 < row["loss"] < 7  # of 256 tokens that are equally likely: 5.5 and the routers' loss
    assert result["summary"]["grids"] == 2
    assert result["summary"]["failed"] == 0
    assert json.loads((tmp_path / "layouts-tiny.json").read_text())["rows"] == result["rows"]
