# SPDX-License-Identifier: Apache-2.0
"""A run that names its cluster has predictions beside its measurements, and says at once when it cannot."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import Ranks
from tests.train import runs

from stretto.cluster import GPU, Cluster, FlopRates, HostLink, NodeLink
from stretto.cluster.host_memory import HostMemoryLimit
from stretto.planner import predict
from stretto.report import write_report
from stretto.train.gpt import preflight as preflight_of_gpts
from stretto.train.gpt.model_source import GPTSource
from stretto.train.gpt.preflight import check_state_fits, gpu_memory_of_cluster, predict_run
from stretto.train.preflight import preflight

MACHINE = Cluster(
    name="mine",
    gpus_per_node=4,
    gpu=GPU(name="mine", memory=1e9, memory_bandwidth=1e10, peak_flops=FlopRates(fp32=1e10)),
    in_node=NodeLink(bandwidth=1e8),
)


@pytest.mark.long
def test_the_summary_has_the_planners_prediction_of_this_run(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    MACHINE.save(tmp_path / "mine.toml")
    config = runs.configure(
        tmp_path / "run",
        f'cluster="{tmp_path / "mine.toml"}"',
        "grid.x=2",
        "grid.z=2",
        "train.micro_batch=2",
        "train.steps=2",
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


def test_memory_of_a_machine_without_gpus_counts_weights_gradients_and_state_in_their_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(preflight_of_gpts, "check_room", lambda size, *_: needed.append(size))
    each = {"bf16": 2 + 2 + 10, "fp16": 2 + 2 + 12, "fp32": 4 + 4 + 8}
    for dtype in each:
        config = on_host(tmp_path, f'train.dtype="{dtype}"')
        preflight_of_gpts._check_fits_machine(config, GPTSource(config.model.to_gpt(data_vocab=256, seq_len=16)))
    tokens = config.train.batch * config.train.seq_len * 8
    whole = 40 * (12 * 512**2 + 13 * 512) + 274 * 512
    assert needed == [whole * size + tokens for size in each.values()]


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


def on_host(tmp_path: Path, *changes: str) -> runs.TrainConfig:
    """40 blocks of width 512, tokens of 256 and 16 positions: 40 x (12 x 512^2 + 13 x 512) + 273 x 512 parameters and
    another norm; their state in bf16 takes 10 bytes each."""
    sizes = "model.layers=40", "model.hidden=512", 'train.dtype="bf16"', 'train.optimizer_state="host"'
    return runs.configure(tmp_path / "run", *sizes, *changes)


def find_layers(message: str) -> int:
    (found,) = re.findall(r"would fit, of this GPT model\.layers=(\d+)", message)
    return int(found)


def test_state_that_host_memory_cannot_hold_is_refused_with_the_largest_model_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPTSource, "build", lambda self: pytest.fail("the model was built"))
    block, outside = 12 * 512**2 + 13 * 512, (256 + 16 + 2) * 512
    whole = 40 * block + outside
    refused = rf"state of {whole:,} parameters takes 1\.262 GB of host memory \(ranks here: 1, 1\.262 GB each\)"
    with pytest.raises(ValueError, match=refused) as refusal:
        preflight(on_host(tmp_path, "train.host_memory=3.2e8"))
    assert "but there are 0.32 GB (the number given); at most 32,000,000 parameters" in str(refusal.value)
    assert find_layers(str(refusal.value)) == (32_000_000 - outside) // block
    # Both ranks of z have half of all weights, and all norms and biases, whose state is there twice.
    with pytest.raises(ValueError, match=r"\(ranks here: 2, 0\.6326 GB each\)") as refusal:
        preflight(on_host(tmp_path, "train.host_memory=3.2e8", "grid.z=2"))
    assert find_layers(str(refusal.value)) == (32_000_000 - outside) // block
    with pytest.raises(ValueError, match="not one layer"):
        preflight(on_host(tmp_path, "train.host_memory=3e7"))
    with pytest.raises(ValueError, match=r"state of .* takes 2\.525 GB of host memory"):  # both of data have all of it
        preflight(on_host(tmp_path, "train.host_memory=2.5e9", "grid.data=2"))


def test_state_that_fits_host_memory_is_taken_and_without_a_number_the_machine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = 40 * (12 * 512**2 + 13 * 512) + 274 * 512
    for kind, each in (("bf16", 10), ("fp16", 12), ("fp32", 8)):
        config = on_host(tmp_path, f'train.dtype="{kind}"', f"train.host_memory={whole * each}")
        architecture = GPTSource(config.model.to_gpt(data_vocab=256, seq_len=16)).architecture(16)
        check_state_fits(config, architecture, None)
        config = on_host(tmp_path, f'train.dtype="{kind}"', f"train.host_memory={whole * each - 1}")
        with pytest.raises(ValueError, match=f"at most {whole - 1:,} parameters"):
            check_state_fits(config, architecture, None)
    limit = HostMemoryLimit(10**9, "the cgroup limit /sys/fs/cgroup/memory.max")
    monkeypatch.setattr(preflight_of_gpts, "host_memory_limit", lambda given: limit if given is None else None)
    with pytest.raises(ValueError, match=r"but there are 1 GB \(the cgroup limit /sys/fs/cgroup/memory\.max\)"):
        preflight(on_host(tmp_path))
    for location in ("fp32", "device"):
        check_state_fits(on_host(tmp_path, f"train.optimizer_state={location}"), architecture, None)


def test_weights_that_a_gpu_cannot_hold_even_so_are_refused(tmp_path: Path) -> None:
    replace(MACHINE, gpu=replace(MACHINE.gpu, memory=300e6)).save(tmp_path / "mine.toml")
    config = on_host(tmp_path, f'cluster="{tmp_path / "mine.toml"}"', "train.state_bucket=1024", 'device="cuda"')
    architecture = GPTSource(config.model.to_gpt(data_vocab=256, seq_len=16)).architecture(16)
    # When training begins, 6 bytes a number: 758 MB; with half a million numbers in a bucket nothing else counts.
    needed = r"needs at least 0\.7574 GB on each GPU without any activations, but a GPU has 0\.3 GB"
    with pytest.raises(ValueError, match=needed) as refusal:
        check_state_fits(config, architecture, gpu_memory_of_cluster(config))
    assert "at most 50,000,000 parameters would fit" in str(refusal.value)
    assert find_layers(str(refusal.value)) == (50_000_000 - 274 * 512) // (12 * 512**2 + 13 * 512)
    check_state_fits(config, architecture, 758e6)
    on_cpu = config.model_copy(update={"device": "cpu"})
    assert gpu_memory_of_cluster(on_cpu) is None
    with pytest.raises(ValueError, match=r"at most 50,000,000 parameters would fit, or more of grid\.x"):
        check_state_fits(config, 126_000_000, 300e6)  # of a model that the planner does not know


def test_separate_state_is_predicted_for_a_run_that_names_its_cluster(tmp_path: Path) -> None:
    """On 1 GB/s both ways together, 20 bytes of each of 126 million numbers take 2.5 s at least."""
    link = HostLink(duplex_bandwidth=1e9)
    machine = replace(MACHINE, host_link=link, gpu=replace(MACHINE.gpu, peak_flops=FlopRates(bf16=1e15)))
    replace(machine, gpu=replace(machine.gpu, memory_bandwidth=1e12)).save(tmp_path / "mine.toml")
    config = on_host(tmp_path, f'cluster="{tmp_path / "mine.toml"}"', "train.state_bucket=1048576")
    model = GPTSource(config.model.to_gpt(data_vocab=256, seq_len=16))
    beside = config.model_copy(update={"train": config.train.model_copy(update={"optimizer_state": "fp32"})})
    apart, fp32 = predict_run(config, model), predict_run(beside, model)
    assert 2.5 < apart["step_time"] - fp32["step_time"] < 2.8
    assert apart["peak_memory"] < fp32["peak_memory"]
