# SPDX-License-Identifier: Apache-2.0
"""A run that names its cluster has predictions beside its measurements, and says at once when it cannot."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import Ranks
from tests.train import runs

from stretto.cluster import GPU, Cluster, FlopRates, NodeLink
from stretto.planner import predict
from stretto.report import write_report
from stretto.train.gpt import preflight as preflight_of_gpts
from stretto.train.gpt.model_source import GPTSource
from stretto.train.gpt.preflight import predict_run
from stretto.train.preflight import preflight

MACHINE = Cluster(
    name="mine",
    gpus_per_node=4,
    gpu=GPU(name="mine", memory=1e9, memory_bandwidth=1e10, peak_flops=FlopRates(fp32=1e10)),
    in_node=NodeLink(bandwidth=1e8),
)


def test_the_summary_has_what_the_planner_says_of_this_run(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    MACHINE.save(tmp_path / "mine.toml")
    config = runs.configure(
        tmp_path / "run", f'cluster="{tmp_path / "mine.toml"}"', "grid.x=2", "grid.z=2", "train.micro_batch=2"
    )
    runs.write_config(config)
    ranks(4).run(runs.train_quietly, config)
    model = {"layers": 2, "hidden": 32, "heads": 8, "vocab": 256, "max_seq_len": 16}
    (tmp_path / "model.toml").write_text("\n".join(f"{name} = {value}" for name, value in model.items()))
    expected = predict(
        str(tmp_path / "model.toml"), MACHINE, grid={"x": 2, "z": 2}, batch=8, seq_len=16, micro_batch=2, dtype="fp32"
    )
    predicted = json.loads((tmp_path / "run" / "summary.json").read_text())["predicted"]
    assert predicted["step_time"] == pytest.approx(expected.step_time)
    assert predicted["exposed"] == pytest.approx(dict(expected.exposed))
    assert predicted["peak_memory"] == pytest.approx(expected.peak_memory)
    write_report(tmp_path / "run")
    assert "| step time |" in (tmp_path / "run" / "summary.md").read_text()


def test_a_run_that_hides_nothing_is_predicted_so_though_copy_engines_are_left_on(tmp_path: Path) -> None:
    MACHINE.save(tmp_path / "mine.toml")
    base = f'cluster="{tmp_path / "mine.toml"}"', "grid.z=2", "grid.data=2"
    nothing = [f"overlap.{name}=false" for name in ("all_reduce", "reduce_scatter", "all_gather", "data")]
    hidden, plain = (runs.configure(tmp_path / "run", *base, *changes) for changes in ([], nothing))
    model = hidden.model.to_gpt(data_vocab=256, seq_len=hidden.train.seq_len)
    predictions = [predict_run(config, GPTSource(model)) for config in (hidden, plain)]
    exposed = [sum(predicted["exposed"].values()) for predicted in predictions]
    assert exposed[0] < exposed[1]


def test_memory_of_a_machine_is_checked_with_what_a_rank_holds_of_a_model_by_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(preflight_of_gpts, "check_room", lambda size, *_: needed.append(size))
    config = runs.configure(tmp_path / "run", "grid.x=2", "grid.z=2")
    source = GPTSource(config.model.to_gpt(data_vocab=256, seq_len=config.train.seq_len))
    preflight_of_gpts._check_fits_machine(config, source)
    by_blocks = replace(source.architecture(config.train.seq_len), is_sharded_by_blocks=True)
    monkeypatch.setattr(source, "architecture", lambda seq_len: by_blocks)
    preflight_of_gpts._check_fits_machine(config, source)
    tokens = config.train.batch // 2 * config.train.seq_len * 8
    assert needed[1] - tokens == pytest.approx(2 * (needed[0] - tokens), abs=2)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [("perlmuter", "did you mean 'perlmutter'"), ("absent.toml", "absent.toml"), ("mi210-ib", "fp64")],
)
def test_a_cluster_that_cannot_predict_is_refused_before_anything_starts(
    tmp_path: Path, cluster: str, message: str
) -> None:
    config = runs.configure(tmp_path / "run", f'cluster="{cluster}"', 'train.dtype="fp64"', "grid.x=2")
    if cluster == "mi210-ib":
        Cluster(name="mi210-ib", gpus_per_node=4, gpu=GPU(name="no fp64", memory=1e9, memory_bandwidth=1e9)).save(
            tmp_path / "none.toml"
        )
        config = runs.configure(tmp_path / "run", f'cluster="{tmp_path / "none.toml"}"', 'train.dtype="fp64"')
    with pytest.raises(ValueError, match=message):
        preflight(config)
