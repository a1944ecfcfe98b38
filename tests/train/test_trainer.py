# SPDX-License-Identifier: Apache-2.0
"""Training runs: the loss is that of plain PyTorch, whatever the grid, the accumulation, the stops and resumptions."""

import math
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Ranks
from tests.pool import Pool
from tests.processes import find_free_port
from tests.train import runs
from torch.nn import functional as F

from stretto.axes import NAMES
from stretto.memory import group_timeout
from stretto.models import GPT
from stretto.train.checkpoint import checkpoint_path, find_checkpoint
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.storage import read_tensor
from stretto.train.config import TrainConfig, make_config
from stretto.train.data import Sampler, open_dataset
from stretto.train.gpt.task import GPTTask
from stretto.train.observe.metrics import DivergenceError
from stretto.train.optimizer import learning_rate
from stretto.train.trainer import train

MakeRanks = Callable[[int], Ranks]


def on_grid(**sizes: int) -> list[str]:
    return [f"grid.{axis}={size}" for axis, size in sizes.items()]


def run(ranks: MakeRanks, out: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train on the configuration's grid. Returns the lines of metrics.jsonl."""
    config = runs.configure(out, *overrides)
    ranks(config.ranks).run(runs.train_quietly, config, timeout=120)
    return runs.metrics_of(out)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps on x=2 z=2, with a checkpoint every three."""
    config = runs.configure(tmp_path_factory.mktemp("whole") / "run", *on_grid(x=2, z=2), "train.checkpoint_every=3")
    pool.run(4, runs.train_quietly, config, timeout=120)
    return config.out


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    entries = read_metadata(checkpoint).tensors
    return {
        name.removeprefix("model."): read_tensor(checkpoint, entry)
        for name, entry in entries.items()
        if name.startswith("model.")
    }


def assert_same_state(first: Path, second: Path) -> None:
    """Two checkpoints hold the same bits."""
    entries, others = read_metadata(first).tensors, read_metadata(second).tensors
    assert entries.keys() == others.keys()
    for name, entry in entries.items():
        assert torch.equal(read_tensor(first, entry), read_tensor(second, others[name])), name


def plain_losses(config: TrainConfig, weights: dict[str, torch.Tensor], start: int) -> list[float]:
    """The losses of steps `start` + 1 on, of a loop over whole batches in plain PyTorch, from these weights and SGD."""
    options = config.train
    dataset = open_dataset(config.data.path, seq_len=options.seq_len)
    sampler = Sampler(len(dataset), options.batch, options.seed)
    model = GPT(config.model.to_gpt(data_vocab=256, seq_len=options.seq_len)).double()
    model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    losses = []
    for step in range(start + 1, options.steps + 1):
        rows = torch.stack([torch.from_numpy(dataset[index]) for index in sampler.indices(step - 1)])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip or math.inf)
        lr = learning_rate(step, options)
        with torch.no_grad():
            for parameter in model.parameters():
                decay = options.weight_decay if parameter.dim() >= 2 else 0.0
                assert parameter.grad is not None
                parameter.sub_(lr * (parameter.grad + decay * parameter))
    return losses


@pytest.mark.long
def test_the_losses_are_those_of_plain_pytorch(ranks: MakeRanks, tmp_path: Path) -> None:
    options = ["train.optimizer=sgd", "train.dtype=fp64", "train.lr=0.1", "train.clip=0.5"]
    start = 2
    run(ranks, tmp_path / "first", *options, f"train.steps={start}")
    metrics = run(
        ranks,
        tmp_path / "run",
        *options,
        *on_grid(x=2, z=2),
        "train.micro_batch=2",
        f"train.resume={tmp_path / 'first'}",
    )
    weights = weights_of(checkpoint_path(tmp_path / "first", start))
    expected = plain_losses(runs.configure(tmp_path / "run", *options), weights, start)
    assert [line["step"] for line in metrics] == [3, 4, 5, 6]
    assert [line["loss"] for line in metrics] == pytest.approx(expected, abs=1e-10)
    assert expected[0] - expected[-1] > 0.05, "the model does not learn: the comparison says little"


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        on_grid(y=2),
        pytest.param([*on_grid(pipe=2), "train.micro_batch=4"], marks=pytest.mark.long),
        pytest.param(on_grid(data=2, x=2, z=2), marks=pytest.mark.exhaustive),
    ],
    ids=["fewer ranks", "stages", "more ranks"],
)
def test_a_run_resumes_on_another_grid_with_the_same_losses(
    ranks: MakeRanks, tmp_path: Path, whole: Path, options: list[str]
) -> None:
    middle, expected = checkpoint_path(whole, 3), runs.metrics_of(whole)[3:]
    resumed = run(ranks, tmp_path / "resumed", *options, f"train.resume={middle}")
    assert [line["step"] for line in resumed] == [4, 5, 6]
    for ours, theirs in zip(resumed, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["tokens"] == theirs["tokens"]
        assert ours["lr"] == theirs["lr"]


@pytest.mark.exhaustive
def test_muon_trains_and_resumes_on_another_grid(ranks: MakeRanks, tmp_path: Path) -> None:
    options = ["train.optimizer=muon", "train.dtype=fp64", "train.lr=0.01"]
    whole = run(ranks, tmp_path / "whole", *options, *on_grid(x=2, z=2), "train.checkpoint_every=3")
    start = checkpoint_path(tmp_path / "whole", 3)
    resumed = run(ranks, tmp_path / "resumed", *options, *on_grid(data=2), f"train.resume={start}")
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in whole[3:]], abs=1e-9)
    assert whole[0]["loss"] - whole[-1]["loss"] > 0.05
    kept = read_metadata(start).tensors
    for name in ("blocks.0.attention.qkv.weight", "embedding.weight"):
        slots = {key.rpartition(".")[2] for key in kept if key.startswith(f"optimizer.{name}.")}
        assert slots == ({"momentum_buffer"} if name.startswith("blocks") else {"exp_avg", "exp_avg_sq", "step"})


@pytest.mark.exhaustive
def test_a_run_resumes_on_the_same_grid_bit_by_bit(ranks: MakeRanks, tmp_path: Path) -> None:
    options = [*on_grid(z=2), "model.dropout=0.2", "train.micro_batch=2", "train.checkpoint_every=2"]
    options.append("train.keep_checkpoints=3")
    whole = run(ranks, tmp_path / "whole", *options, "train.steps=5")
    resumed = run(
        ranks, tmp_path / "again", *options, "train.steps=5", f"train.resume={checkpoint_path(tmp_path / 'whole', 2)}"
    )
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole[2:]]
    assert_same_state(checkpoint_path(tmp_path / "again", 5), checkpoint_path(tmp_path / "whole", 5))


@pytest.mark.exhaustive
def test_dropout_does_not_depend_on_which_rows_share_a_micro_batch(ranks: MakeRanks, tmp_path: Path) -> None:
    options = ["model.dropout=0.3", "train.steps=2", "train.dtype=fp64"]
    whole = run(ranks, tmp_path / "whole", *options)
    for name, sizes, micro_batch in (("parts", {}, 2), ("z", {"z": 2}, 2), ("data", {"data": 2}, 1)):
        parts = run(ranks, tmp_path / name, *options, *on_grid(**sizes), f"train.micro_batch={micro_batch}")
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in parts] == pytest.approx([line[key] for line in whole], abs=1e-10), name


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after"), [("fp32", "fp64"), ("fp64", "fp32")])
def test_a_run_resumes_in_another_precision(ranks: MakeRanks, tmp_path: Path, before: str, after: str) -> None:
    first = run(ranks, tmp_path, f"train.dtype={before}", "train.steps=4", "train.checkpoint_every=2")
    again = run(
        ranks, tmp_path / "again", f"train.dtype={after}", "train.steps=4",
        f"train.resume={checkpoint_path(tmp_path, 2)}",
    )  # fmt: skip
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in first[2:]], abs=1e-4)


@pytest.mark.long
def test_accumulation_changes_neither_loss_nor_weights(ranks: MakeRanks, tmp_path: Path) -> None:
    results = []
    for micro_batch in ("none", "1"):
        out = tmp_path / micro_batch
        options = ["train.dtype=fp64", "train.steps=2", f"train.micro_batch={micro_batch}"]
        metrics = run(ranks, out, *options, *on_grid(x=2, z=2))
        results.append((metrics, weights_of(checkpoint_path(out, 2))))
    (at_once, weights), (accumulated, other_weights) = results
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in accumulated] == pytest.approx([line[key] for line in at_once], abs=1e-12)
    for name, weight in weights.items():
        assert torch.linalg.norm(other_weights[name] - weight) <= 1e-10 * torch.linalg.norm(weight), name


@pytest.mark.long
def test_a_resumed_run_has_each_step_once(ranks: MakeRanks, tmp_path: Path) -> None:
    whole = run(ranks, tmp_path, "train.steps=5", "train.checkpoint_every=2")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # the line that a kill cut short
    resumed = run(ranks, tmp_path, "train.steps=5", f"train.resume={checkpoint_path(tmp_path, 4)}")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]


@pytest.mark.long
def test_a_run_that_starts_over_leaves_nothing_of_the_last_in_its_metrics(ranks: MakeRanks, tmp_path: Path) -> None:
    run(ranks, tmp_path, "train.steps=3")
    assert [line["step"] for line in run(ranks, tmp_path, "train.steps=2")] == [1, 2]
    assert find_checkpoint(tmp_path, "latest") == checkpoint_path(tmp_path, 2)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(
    ranks: MakeRanks, tmp_path: Path, whole: Path, rank: int
) -> None:
    options = [*on_grid(x=2, z=2), "train.steps=6"]
    config = runs.configure(tmp_path / "stopped", *options)
    ranks(4).run(runs.train_and_stop, config, step=3, rank=rank, timeout=60)
    assert find_checkpoint(config.out, "latest") == checkpoint_path(config.out, 4)  # the step after the request
    resumed = run(ranks, config.out, *options, "train.resume=latest")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in runs.metrics_of(whole)]


def test_no_rank_waits_for_others_to_look_for_a_request_to_stop(ranks: MakeRanks, tmp_path: Path) -> None:
    assert ranks(2).run(runs.look_at_stop_requests, tmp_path, timeout=30) == [[False, False, True]] * 2


@pytest.mark.exhaustive
def test_a_nonfinite_loss_ends_the_run_with_its_step_and_the_checkpoint_to_resume(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    options = [*on_grid(x=2), "train.checkpoint_every=1", "train.keep_checkpoints=9", "train.optimizer=sgd"]
    run(ranks, tmp_path, *options, "train.steps=2")
    # Step 3's loss is of step 2's weights; what its update makes of them has no loss.
    diverging = runs.configure(tmp_path, *options, "train.resume=latest", "train.lr=1e36", "train.warmup_steps=0")
    for _ in range(2):  # the second run begins with the weights that have no loss
        with pytest.raises(DivergenceError, match=r"in step 4; .* train\.resume=.*step-00000002 and a lower train\.lr"):
            ranks(2).run(runs.train_quietly, diverging)
        assert find_checkpoint(tmp_path, "latest") == checkpoint_path(tmp_path, 3)
    resumed = run(ranks, tmp_path, *options, f"train.resume={checkpoint_path(tmp_path, 2)}", "train.steps=4")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]


@pytest.mark.long
def test_weights_that_are_not_finite_are_never_saved(ranks: MakeRanks, tmp_path: Path) -> None:
    options = [*on_grid(x=2), "train.optimizer=sgd", "train.warmup_steps=0", "train.steps=2"]
    run(ranks, tmp_path, *options, "train.steps=1")
    fails = runs.configure(tmp_path, *options, "train.resume=latest", "train.lr=3e38", "train.weight_decay=1e3")
    with pytest.raises(DivergenceError, match=r"weight is not finite after step 2, .*step-00000001: continue"):
        ranks(2).run(runs.train_quietly, fails)
    assert find_checkpoint(tmp_path, "latest") == checkpoint_path(tmp_path, 1)


def test_a_run_that_diverges_before_any_checkpoint_reports_it(ranks: MakeRanks, tmp_path: Path) -> None:
    config = runs.configure(
        tmp_path, *on_grid(x=2), "train.lr=1e300", "train.warmup_steps=0", "train.clip=none", "train.dtype=fp64",
        "train.optimizer=sgd", "train.checkpoint_every=1",
    )  # fmt: skip
    with pytest.raises(DivergenceError, match=r"in step 2; .*; no checkpoint has weights whose loss was finite"):
        ranks(2).run(runs.train_quietly, config)
    assert [line["step"] for line in runs.metrics_of(tmp_path)] == [1]
    assert find_checkpoint(tmp_path, "latest") == checkpoint_path(tmp_path, 1)


@pytest.mark.long
def test_a_finished_run_that_is_resumed_changes_nothing(ranks: MakeRanks, tmp_path: Path) -> None:
    before = run(ranks, tmp_path, "train.steps=2")
    assert run(ranks, tmp_path, "train.steps=2", "train.resume=latest") == before


@pytest.mark.long
def test_a_process_without_a_group_leaves_none_behind(tmp_path: Path) -> None:
    for name in ("once", "again"):
        runs.train_quietly(runs.configure(tmp_path / name, "train.steps=1"))
        assert not torch.distributed.is_initialized()
    assert runs.metrics_of(tmp_path / "once")[0]["loss"] == runs.metrics_of(tmp_path / "again")[0]["loss"]


@pytest.mark.long
def test_checkpoints_are_written_as_often_as_asked_and_at_the_end(ranks: MakeRanks, tmp_path: Path) -> None:
    run(ranks, tmp_path / "often", "train.steps=5", "train.checkpoint_every=2", "train.keep_checkpoints=9")
    run(ranks, tmp_path / "end", "train.steps=2")
    steps = lambda out: sorted(int(path.name[5:]) for path in (out / "checkpoints").iterdir())  # noqa: E731
    assert steps(tmp_path / "often") == [2, 4, 5]
    assert steps(tmp_path / "end") == [2]


@pytest.mark.long
def test_a_checkpoint_records_what_wrote_it(ranks: MakeRanks, tmp_path: Path) -> None:
    run(ranks, tmp_path, "train.steps=1", *on_grid(z=2))
    metadata = read_metadata(checkpoint_path(tmp_path, 1))
    assert (metadata.step, metadata.optimizer) == (1, "adamw")
    assert (metadata.model["layers"], metadata.model["vocab"]) == (2, 256)
    assert metadata.run["grid"]["z"] == 2
    assert metadata.data["seq_len"] == 16


def test_the_summary_has_the_run_in_numbers(whole: Path) -> None:
    metrics, summary = runs.metrics_of(whole), runs.json.loads((whole / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["loss"] == metrics[-1]["loss"]
    assert summary["seconds"] == pytest.approx(sum(line["seconds"] for line in metrics))
    rate = 5 * 8 * 16 / sum(line["seconds"] for line in metrics[1:])
    assert summary["tokens_per_second"] == pytest.approx(rate)
    assert summary["parameters"] == sum(weight.numel() for weight in weights_of(checkpoint_path(whole, 6)).values())
    assert summary["ranks"] == prod(summary["grid"].values()) == 4
    assert summary["device"] == "cpu"
    assert summary["peak_memory_bytes"] > 50e6  # torch alone is that
    sent = summary["bytes_sent"]
    assert sent.keys() >= set(NAMES)
    assert sent["data"] == sent["y"] == 0
    assert sent["x"] > 0
    assert sent["z"] > 0


def test_each_line_of_metrics_adds_up(ranks: MakeRanks, tmp_path: Path) -> None:
    for number, line in enumerate(run(ranks, tmp_path), start=1):
        assert line["step"] == number
        assert line["tokens"] == number * 8 * 16
        assert line["tokens_per_second"] == pytest.approx(8 * 16 / line["seconds"])
        assert line["tokens_per_second_per_rank"] == pytest.approx(line["tokens_per_second"] / 1)
        assert "mfu" not in line  # of a CPU, whose peak rate is not known
        assert math.isfinite(line["grad_norm"])


@pytest.mark.parametrize("sizes", [{}, {"x": 2, "z": 2}])
def test_matrices_are_decayed_and_vectors_are_not(ranks: MakeRanks, sizes: dict[str, int]) -> None:
    for name, (before, after) in ranks(prod(sizes.values())).run(runs.decay_only, sizes)[0].items():
        factor = 1 - 0.5 * 0.1 if before.dim() >= 2 else 1.0
        assert torch.allclose(after, before * factor, rtol=1e-6, atol=0), name


@pytest.mark.exhaustive
def test_activation_checkpointing_changes_no_loss(ranks: MakeRanks, tmp_path: Path) -> None:
    options = [*on_grid(x=2), "model.dropout=0.1", "train.steps=3"]
    kept = run(ranks, tmp_path / "kept", *options)
    for mode in ("train.recompute=full", "train.recompute=communication"):
        recomputed = run(ranks, tmp_path / mode, *options, mode)
        assert [line["loss"] for line in recomputed] == [line["loss"] for line in kept]


@pytest.mark.long
def test_bf16_trains_on_fp32_weights(ranks: MakeRanks, tmp_path: Path) -> None:
    exact = run(ranks, tmp_path / "fp32", *on_grid(x=2), "train.steps=4")
    rounded = run(ranks, tmp_path / "bf16", *on_grid(x=2), "train.steps=4", "train.dtype=bf16")
    assert {entry.dtype for entry in read_metadata(checkpoint_path(tmp_path / "bf16", 4)).tensors.values()} == {
        "float32"
    }
    assert [line["loss"] for line in rounded] != [line["loss"] for line in exact]
    assert [line["loss"] for line in rounded] == pytest.approx([line["loss"] for line in exact], abs=0.05)


def test_tensorboard_that_is_not_installed_is_an_error_with_a_remedy(
    ranks: MakeRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'stretto\[tensorboard\]'"):
        runs.train_quietly(runs.configure(tmp_path, "train.tensorboard=true"))
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("overrides", [[], ["train.timeout=31.5"]], ids=str)
def test_a_run_has_the_time_limit_of_its_configuration(tmp_path: Path, overrides: list[str]) -> None:
    """Of the groups that the run makes itself; the last save takes what it takes."""
    seen: list[float] = []
    step = GPTTask.step

    def note(run: GPTTask, *arguments: Any) -> Any:
        seen.extend(group_timeout(run.grid.group(axis)) for axis in (*NAMES, "batch", "world"))
        return step(run, *arguments)

    config = runs.configure(tmp_path / "run", "train.steps=1", *overrides)
    with mock.patch.object(GPTTask, "step", note):
        runs.train_quietly(config)
    assert set(seen) == {31.5 if overrides else 600.0}
    assert not dist.is_initialized()


def train_late(config: TrainConfig, late: float) -> None:
    """Train in a process group of the run's own, while rank 1 saves and compiles for so many seconds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost"}
    environment["MASTER_PORT"] = (config.out.parent / "port").read_text()
    state, step = GPTTask.state, GPTTask.step

    def wait(work: Callable[..., Any], *arguments: Any) -> Any:
        if rank == 1:
            time.sleep(late)
        return work(*arguments)

    with (
        mock.patch.dict("os.environ", environment),
        mock.patch.object(GPTTask, "state", lambda run: wait(state, run)),
        mock.patch.object(GPTTask, "step", lambda run, *arguments: wait(step, run, *arguments)),
    ):
        train(config, display="none")


@pytest.mark.long
def test_a_rank_that_is_late_within_the_time_limit_breaks_nothing(ranks: MakeRanks, tmp_path: Path) -> None:
    (tmp_path / "port").write_text(str(find_free_port()))
    config = runs.configure(tmp_path / "run", "train.steps=2", *on_grid(z=2), "train.timeout=120")
    ranks(2).run(train_late, config, 0.5)
    assert len(runs.metrics_of(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.heads=3", "which 3 heads do not divide"),
        ("data.tokenizer=byets", "no such file"),
        ("train.resume=nowhere", "there is no checkpoint at nowhere"),
    ],
)
def test_a_program_that_calls_train_is_refused_before_anything_is_made(
    tmp_path: Path, override: str, words: str
) -> None:
    (tmp_path / "text.txt").write_text("a text to train on, long enough for a sequence or two" * 20)
    values = {
        "out": str(tmp_path / "out"),
        "model": {"layers": 1, "hidden": 16, "heads": 4},
        "data": {"path": str(tmp_path / "text.txt")},
        "train": {"steps": 2, "batch": 4, "seq_len": 8},
    }
    with pytest.raises(ValueError, match=words):
        train(make_config(values, [override]))
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
