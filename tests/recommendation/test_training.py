# SPDX-License-Identifier: Apache-2.0
"""Training of a DLRM: the losses, the weights and the AUC are those of plain PyTorch, on any number of ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional as F

from stretto.models import GPTConfig
from stretto.optim import RowWiseAdagrad
from stretto.recommendation import DLRM, plan_tables
from stretto.recommendation.data import ClickBatch
from stretto.recommendation.training.config import DLRMTrainConfig, sizes_of, table_options
from stretto.recommendation.training.evaluation import roc_auc
from stretto.recommendation.training.preflight import open_clicks
from stretto.recommendation.training.task import DLRMTask
from stretto.train.checkpoint import checkpoint_path, find_checkpoint
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.checkpoint.storage import read_tensor
from stretto.train.config import ConfigError, config_to_toml, job_from_json, load_config
from stretto.train.data import Sampler
from stretto.train.observe.metrics import CorruptionError, DivergenceError
from stretto.train.optimizer import learning_rate
from stretto.train.preflight import preflight
from tests.conftest import Ranks
from tests.pool import Pool
from tests.recommendation import click_runs
from tests.train.saving import check_checkpoint

MakeRanks = Callable[[int], Ranks]


def run(ranks: MakeRanks, out: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train on the configuration's ranks. Returns the lines of metrics.jsonl."""
    config = click_runs.configure(out, *overrides)
    ranks(config.ranks).run(click_runs.train_quietly, config, timeout=60)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: read_tensor(checkpoint, entry) for name, entry in read_metadata(checkpoint).tensors.items()}


def tensors_of(batch: ClickBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(batch.dense).double(),
        torch.from_numpy(batch.indices),
        torch.from_numpy(batch.offsets),
        torch.from_numpy(batch.labels),
    )


def train_plainly(config: DLRMTrainConfig, start: dict[str, torch.Tensor], first: int) -> tuple[list[float], DLRM]:
    """The losses of steps `first` on, of a loop over whole batches in plain PyTorch, and the model it ends with."""
    options, data = config.train, open_clicks(config)
    model = DLRM(config.model.to_dlrm()).double()
    model.load_state_dict({name.removeprefix("model."): value for name, value in start.items() if "model." in name})
    tables = RowWiseAdagrad(model.tables.parameters(), eps=options.table_eps)
    for name, table in model.tables.named_parameters():
        tables.sums(table).copy_(start[f"optimizer.tables.{name}.sum"])
    mlps = [*model.bottom.parameters(), *model.top.parameters()]
    losses = []
    for step in range(first, options.steps + 1):
        samples = Sampler(data.samples, options.batch, options.seed).indices(step - 1)
        dense, indices, offsets, labels = tensors_of(data.training.read(samples))
        loss = model(dense, indices, offsets, labels=labels)
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        share = learning_rate(step, options.model_copy(update={"lr": 1.0, "min_lr": 0.0}))
        with torch.no_grad():
            for parameter in mlps:
                parameter -= options.lr * share * parameter.grad
        tables.param_groups[0]["lr"] = options.table_lr * share
        tables.step()
    return losses, model


def brute_force_auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Pair by pair."""
    pairs = [(p, n) for p in scores[labels == 1].tolist() for n in scores[labels == 0].tolist()]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_losses_weights_and_auc_are_those_of_plain_pytorch(ranks: MakeRanks, tmp_path: Path, count: int) -> None:
    options = ["train.optimizer=sgd", "train.checkpoint_every=1", "train.keep_checkpoints=9", f"ranks={count}"]
    metrics = run(ranks, tmp_path / "run", *options)
    config = click_runs.configure(tmp_path / "run", *options)
    losses, model = train_plainly(config, state_of(checkpoint_path(config.out, 1)), 2)
    assert [line["loss"] for line in metrics[1:]] == pytest.approx(losses, abs=1e-10)
    trained = state_of(checkpoint_path(config.out, 6))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[f"model.{name}"], parameter.detach(), rtol=0, atol=1e-10)

    data = open_clicks(config)
    held_out = np.arange(data.evaluation_start, data.evaluation_start + 37)
    dense, indices, offsets, labels = tensors_of(data.evaluation.read(held_out))
    with torch.no_grad():
        scores = model(dense, indices, offsets)
    assert metrics[-1]["auc"] == pytest.approx(brute_force_auc(scores, labels), abs=1e-12)
    loss = F.binary_cross_entropy_with_logits(scores, labels.double())
    assert metrics[-1]["evaluation_loss"] == pytest.approx(loss.item(), abs=1e-10)
    assert "auc" not in metrics[0]


@pytest.mark.long
def test_the_first_loss_and_the_bits_of_one_number_of_ranks_are_always_the_same(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    once, again = (run(ranks, tmp_path / name, "ranks=2", "train.dtype=fp32") for name in ("once", "again"))
    alone = run(ranks, tmp_path / "alone", "train.dtype=fp32")
    assert [line["loss"] for line in once] == [line["loss"] for line in again]
    assert [line["loss"] for line in once] == pytest.approx([line["loss"] for line in alone], abs=1e-5)
    states = (state_of(checkpoint_path(tmp_path / name, 6)) for name in ("once", "again"))
    for one, other in zip(*(state.values() for state in states), strict=True):
        assert torch.equal(one, other)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 1)])
@pytest.mark.parametrize("table_optimizer", ["rowwise-adagrad", "sgd"])
def test_a_run_resumes_on_another_number_of_ranks_with_the_same_losses(
    ranks: MakeRanks, tmp_path: Path, before: int, after: int, table_optimizer: str
) -> None:
    options = ["train.checkpoint_every=3", f"train.table_optimizer={table_optimizer}", "train.evaluate_every=2"]
    whole = run(ranks, tmp_path / "whole", *options, f"ranks={before}")
    middle = checkpoint_path(tmp_path / "whole", 3)
    resumed = run(ranks, tmp_path / "resumed", *options, f"ranks={after}", f"train.resume={middle}")
    assert [line["step"] for line in resumed] == [4, 5, 6]
    for ours, theirs in zip(resumed, whole[3:], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-12)
        assert ours.get("auc") == theirs.get("auc")
        assert ("auc" in ours) == (ours["step"] % 2 == 0)
        assert ours["samples"] == theirs["samples"] == 16 * ours["step"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "steps"),
    [pytest.param(1, 2, marks=pytest.mark.exhaustive), (2, 2), pytest.param(4, 4, marks=pytest.mark.exhaustive)],
)
def test_the_operator_that_updates_tables_itself_gives_the_same_losses_and_checkpoints(
    ranks: MakeRanks, interpreted_pool: Pool, tmp_path: Path, count: int, steps: int
) -> None:
    options = [
        "train.dtype=fp32",
        f"train.steps={steps}",
        f"train.checkpoint_every={steps // 2}",
        "model.rows=[30, 3, 12]",
        "model.pooling=[2, 1, 5]",
    ]
    library = run(ranks, tmp_path / "library", *options)
    config = click_runs.configure(tmp_path / "kernel", *options, f"ranks={count}", "train.implementation=kernel")
    updates = interpreted_pool.run(count, click_runs.train_with_kernels, config, timeout=120)
    assert updates == [steps] * count
    kernel = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in kernel] == pytest.approx([line["loss"] for line in library], abs=1e-5)
    assert kernel[-1]["auc"] == pytest.approx(library[-1]["auc"], abs=1e-3)
    ours, theirs = (state_of(checkpoint_path(tmp_path / name, steps)) for name in ("kernel", "library"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5, msg=name)
    resumed = run(ranks, tmp_path / "resumed", *options, f"train.resume={checkpoint_path(config.out, steps // 2)}")
    assert [line["loss"] for line in resumed] == pytest.approx(
        [line["loss"] for line in library[steps // 2 :]], abs=1e-5
    )


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint_that_continues(ranks: MakeRanks, tmp_path: Path) -> None:
    whole = run(ranks, tmp_path / "whole", "ranks=2")
    config = click_runs.configure(tmp_path / "stopped", "ranks=2")
    ranks(2).run(click_runs.train_and_stop, config, step=3, rank=1)
    assert find_checkpoint(config.out, "latest") == checkpoint_path(config.out, 4)  # the step after the request
    resumed = run(ranks, config.out, "ranks=2", "train.resume=latest")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]


@pytest.mark.long
@pytest.mark.parametrize("table_optimizer", ["rowwise-adagrad", pytest.param("adam", marks=pytest.mark.exhaustive)])
def test_a_run_with_planned_tables_has_the_losses_of_one_rank_and_resumes_on_others(
    ranks: MakeRanks, tmp_path: Path, table_optimizer: str
) -> None:
    options = [
        "train.checkpoint_every=3", f"train.table_optimizer={table_optimizer}", "model.rows=[30, 3, 1, 12, 4000]",
        "model.pooling=[2, 1, 1, 5, 60]", "train.table_eps=1e-4",
    ]  # fmt: skip
    if table_optimizer == "rowwise-adagrad":
        options.append("train.table_clip=0.5")
    alone = run(ranks, tmp_path / "alone", *options)
    config = click_runs.configure(tmp_path / "cut", *options, "ranks=4")
    plan = plan_tables(sizes_of(config.model.to_dlrm()), 4, **table_options(config.train))
    assert {"row", "column"} & {*plan.placement.kinds}
    cut = run(ranks, tmp_path / "cut", *options, "ranks=4", "train.sharding=auto")
    assert [line["loss"] for line in cut] == pytest.approx([line["loss"] for line in alone], abs=1e-9)
    middle = checkpoint_path(tmp_path / "cut", 3)
    resumed = run(ranks, tmp_path / "resumed", *options, "ranks=2", f"train.resume={middle}")
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in alone[3:]], abs=1e-9)
    ours, theirs = (state_of(checkpoint_path(tmp_path / name, 6)) for name in ("cut", "alone"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.long
def test_more_ranks_than_tables_train_as_well(ranks: MakeRanks, tmp_path: Path) -> None:
    alone = run(ranks, tmp_path / "alone", "train.steps=3")
    many = run(ranks, tmp_path / "many", "train.steps=3", "ranks=8")
    assert [line["loss"] for line in many] == pytest.approx([line["loss"] for line in alone], abs=1e-12)


@pytest.mark.exhaustive
def test_a_small_model_learns_what_is_planted(ranks: MakeRanks, tmp_path: Path) -> None:
    metrics = run(
        ranks, tmp_path, "ranks=2", "train.dtype=fp32", "train.steps=60", "train.batch=256", "data.samples=20000",
        "data.evaluation_samples=2000", "data.jagged=false",
    )  # fmt: skip
    assert metrics[-1]["auc"] > 0.75
    assert metrics[-1]["evaluation_loss"] < 0.9 * metrics[0]["loss"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["auc"] == metrics[-1]["auc"]
    assert summary["parameters"] == 86 * 4 + (3 * 8 + 8) + (8 * 4 + 4) + (19 * 8 + 8) + (8 + 1)
    assert summary["bytes_sent"]["data"] > 0


def test_a_model_and_its_optimizers_are_checked_before_a_checkpoint_is_read(ranks: MakeRanks, tmp_path: Path) -> None:
    run(ranks, tmp_path / "run", "train.steps=1")
    checkpoint = f"train.resume={tmp_path / 'run'}"
    for override, words in {
        "model.top=[6, 1]": r"model.top is \[8, 1\] there and \[6, 1\] here",
        "model.max_rows=20": r"model.rows is \[30, 3, 1, 12, 40\] there and \[20, 3, 1, 12, 20\] here",
        "train.table_optimizer=sgd": "written with adamw, rowwise-adagrad.*train.table_optimizer='rowwise-adagrad'",
    }.items():
        with pytest.raises(ValueError, match=words):
            preflight(click_runs.configure(tmp_path / "other", checkpoint, override))
    preflight(click_runs.configure(tmp_path / "other", checkpoint, "model.pooling=[3]"))
    with pytest.raises(ValueError, match="is of another model"):
        check_checkpoint(checkpoint_path(tmp_path / "run", 1), GPTConfig(layers=1, hidden=4, heads=1))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.batch=15", "train.batch is 15, but ranks = 4 must divide it; the nearest batch that would do is 16"),
        ("model.bottom=[8, 5]", "model.bottom ends with 5, but must end with 4"),
        ("model.rows=[3, 0]", "model.rows is 0, but must be at least 1"),
        ("model.rows=none", "model.rows is missing: give model.rows"),
        ("model.name=smal", "did you mean 'small'?"),
        ("model.kind=dlmr", "model.kind is 'dlmr', but must be one of gpt, dlrm; did you mean 'dlrm'?"),
        ("model.layers=2", "model.layers is an unknown option"),
        ("train.seq_len=2", "train.seq_len is an unknown option"),
        ("grid.x=2", "grid is an unknown section"),
        ("data.format=criteo", "data.path is missing: name Criteo's files"),
        ("data.path=logs.txt", "data.path is 'logs.txt', but synthetic samples are not read from files"),
        (
            "train.table_optimizer=adan",
            "train.table_optimizer is 'adan', but must be one of rowwise-adagrad, sgd, full",
        ),
        ("train.table_lr=0", "train.table_lr is 0, but must be above 0"),
        ("train.min_lr=1", "train.min_lr is 1.0, but must be at most train.lr"),
    ],
)
def test_errors_have_key_value_rule_and_a_valid_value(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        click_runs.configure(Path("unused"), "ranks=4", override)
    assert words in str(refused.value)


def test_written_values_are_read_back_unchanged(tmp_path: Path) -> None:
    config = click_runs.configure(tmp_path, "train.evaluate_every=3")
    (tmp_path / "run.toml").write_text(config_to_toml(config))
    assert load_config(tmp_path / "run.toml") == config
    assert job_from_json(config.model_dump_json()) == config


def test_tables_that_no_machine_holds_and_a_kernel_that_is_not_there_are_refused(tmp_path: Path) -> None:
    shape = "model.rows=[30, 3, 1, 12, 40, 1000000000000]", "model.pooling=[1]"
    for optimizer, terabytes in {"sgd": 32, "rowwise-adagrad": 40, "full-adagrad": 64, "adam": 96}.items():
        needs = rf"tables of 4,000,000,000,344 numbers needs at least {terabytes},000 GB .*a model.max_rows of 1/"
        with pytest.raises(ValueError, match=needs):
            preflight(click_runs.configure(tmp_path, *shape, f"train.table_optimizer={optimizer}"))
    with pytest.raises(ValueError, match=r"implementation is 'kernel', but"):
        preflight(click_runs.configure(tmp_path, "train.implementation=kernel"))


def test_evaluation_data_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    for name, count in (("logs", 30), ("others", 7)):
        lines = ["\t".join(["1", *[str(number)] * 13, *["a"] * 26]) for number in range(count)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    options = [
        f"data={{format='criteo', path='{tmp_path / 'logs.txt'}', samples=1048576, jagged=false}}",
        f"model.rows={[5] * 26}", "model.pooling=[1]", "model.dense=13",
    ]  # fmt: skip

    def opened(*more: str) -> Any:
        return open_clicks(click_runs.configure(tmp_path / "out", *options, *more))

    held_out = opened("data.evaluation_samples=10")
    assert (held_out.samples, held_out.evaluation_start, held_out.evaluation_samples) == (20, 20, 10)
    apart = opened(f"data.evaluation_path={tmp_path / 'others.txt'}", "data.evaluation_samples=100")
    assert (apart.samples, apart.evaluation_start, apart.evaluation_samples) == (30, 0, 7)
    assert len(apart.evaluation) == 7
    with pytest.raises(ValueError, match=r"data.evaluation_samples is 30, but .* has 30 samples"):
        opened("data.evaluation_samples=30")
    with pytest.raises(ValueError, match=r"model.dense is 3, but Criteo's samples have 13 numbers"):
        opened("model.dense=3")


@pytest.mark.parametrize("seed", range(4))
def test_the_auc_is_that_of_all_pairs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (60,), generator=generator)
    labels[:2] = torch.tensor([0, 1])
    few = torch.randint(0, 5, (60,), generator=generator).float()  # many equal scores
    many = torch.randn(60, generator=generator)
    for scores in (few, many, torch.zeros(60)):
        assert roc_auc(scores, labels) == pytest.approx(brute_force_auc(scores, labels), abs=1e-15)


def test_the_auc_of_one_kind_of_label_or_of_no_number_is_undefined() -> None:
    assert roc_auc(torch.randn(3), torch.ones(3)) is None
    assert roc_auc(torch.randn(3), torch.zeros(3)) is None
    assert roc_auc(torch.tensor([0.0, torch.nan]), torch.tensor([0, 1])) is None
    for shape in ((3,), (2, 1)):
        with pytest.raises(ValueError, match=r"scores and labels must be \[samples\] both, not \[2\] and"):
            roc_auc(torch.randn(2), torch.ones(shape))


def train_with_flipped_bit(config: DLRMTrainConfig) -> str:
    """Train; after step 3 a bit of rank 1's top MLP flips. Returns the error."""
    step = DLRMTask.step

    def flip_after(task: DLRMTask, number: int, lr: float) -> Any:
        result = step(task, number, lr)
        if number == 3 and torch.distributed.get_rank() == 1:
            next(iter(task.model.top.parameters())).detach().view(torch.uint8).view(-1)[1] ^= 1
        return result

    with mock.patch.object(DLRMTask, "step", flip_after), pytest.raises(CorruptionError) as found:
        click_runs.train_quietly(config)
    return str(found.value)


@pytest.mark.long
def test_mlps_are_compared_over_all_ranks_and_tables_are_not(ranks: MakeRanks, tmp_path: Path) -> None:
    assert len(run(ranks, tmp_path / "sound", "ranks=3", "train.batch=18", "train.verify_steps=1")) == 6
    config = click_runs.configure(tmp_path / "run", "ranks=3", "train.batch=18", "train.verify_steps=2")
    for message in ranks(3).run(train_with_flipped_bit, config):
        assert message.startswith("rank 1 (host ")
        assert (
            "holds other weights than ranks 0 and 2: top.0.weight after step 4, which were equal at step 2" in message
        )


def test_the_batch_of_a_step_whose_loss_is_nan_is_saved(ranks: MakeRanks, tmp_path: Path) -> None:
    config = click_runs.configure(tmp_path, "ranks=2", "train.lr=1e300", "train.warmup_steps=0", "train.optimizer=sgd")
    with pytest.raises(DivergenceError, match=r"its batch is saved in .*nonfinite/step-0000000\d") as failed:
        ranks(2).run(click_runs.train_quietly, config)
    step = int(str(failed.value).partition("nonfinite/step-")[2][:8])
    data = open_clicks(config)
    samples = Sampler(data.samples, 16, 5).indices(step - 1)
    for rank, own in enumerate(np.split(samples, 2)):
        saved = load_file(tmp_path / "nonfinite" / f"step-{step:08d}" / f"rank-{rank}.safetensors")
        expected = data.training.read(own)
        assert np.array_equal(saved["samples"], own)
        for name in ("dense", "labels", "indices", "offsets"):
            assert np.array_equal(saved[name], getattr(expected, name)), name


@pytest.mark.long
def test_samples_that_one_rank_cannot_read_end_all_at_their_own_step(ranks: MakeRanks, tmp_path: Path) -> None:
    config = click_runs.configure(tmp_path, "ranks=2")
    other, own = ranks(2).run(click_runs.train_with_a_bad_disk, config, 3, 1)
    assert "rank 1 has rejected its own batch" in other
    assert "the disk is gone" in own
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.jagged=true", "data.jagged is true, so that steps differ in size; data.jagged=false"),
        ("train.sharding=auto", "train.sharding is 'auto', which may cut tables by rows; train.sharding='table'"),
        ("train.implementation=library", "PyTorch's functions wait for the GPU; train.implementation='kernel'"),
    ],
)
def test_a_step_that_no_graph_holds_is_refused(tmp_path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"train.cuda_graph is on, but {words}"):
        click_runs.configure(tmp_path, "train.cuda_graph=true", "data.jagged=false", override)
