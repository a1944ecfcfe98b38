# SPDX-License-Identifier: Apache-2.0
"""Training of mixtures of experts: losses of the routers, biases, what the log says, checkpoints and evaluation."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from tests.train import runs
from tests.train.test_trainer import assert_same_state, weights_of
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.models import GPT
from stretto.models.moe import Router, routers
from stretto.train.checkpoint import checkpoint_path
from stretto.train.config import ConfigError, TrainConfig
from stretto.train.data import Sampler, open_dataset
from stretto.train.optimizer import learning_rate
from stretto.train.preflight import preflight

MakeRanks = Callable[[int], Ranks]
# SGD, since Adam would hide gradients that are too large by a factor.
SMALL = ("model.num_experts=4", "model.moe_layers=every:2", "train.dtype=fp64", "train.optimizer=sgd", "train.lr=0.1")
BIAS = ("model.balance=bias", "model.bias_rate=0.01", "model.z_loss=0.05", "model.router_scores=sigmoid")
SWITCH = ("model.balance=switch", "model.balance_loss=0.5", "model.activation=swiglu", "model.shared_ffn=16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


def run(ranks: MakeRanks, out: Path, *options: str) -> list[dict[str, Any]]:
    config = runs.configure(out, *SMALL, *options)
    preflight(config)
    ranks(config.ranks).run(runs.train_quietly, config, timeout=120)
    return runs.metrics_of(out)


def train_plainly(
    config: TrainConfig, weights: dict[str, Tensor], sharers: int
) -> tuple[list[dict[str, Any]], nn.Module]:
    """The lines that a run should log after its first step, which has left these weights.

    In one process, with all losses written out. sharers: how many ranks share a batch; a micro-batch has rows of each.
    """
    options, shape = config.train, config.model
    dataset = open_dataset(config.data.path, seq_len=options.seq_len)
    sampler = Sampler(len(dataset), options.batch, options.seed)
    model = GPT(shape.to_gpt(data_vocab=256, seq_len=options.seq_len)).double()
    model.load_state_dict(weights | {"head.weight": weights["embedding.weight"]})
    of_model = [router for _, router in routers(model)]
    seen: dict[Router, list[Tensor]] = {router: [] for router in of_model}
    for router in of_model:
        router.register_forward_hook(lambda router, _, output: seen[router].extend((output[0], output[2])))
        router.options = type(router.options)(scores=router.options.scores)  # no losses of its own
    lines = []
    for step in range(2, options.steps + 1):
        rows = torch.stack([torch.from_numpy(dataset[index]) for index in sampler.indices(step - 1)])
        model.zero_grad()
        counts = torch.zeros(len(of_model), 4)
        total = balance = z = 0.0
        parts = rows.unflatten(0, (sharers, -1, options.micro_batch or options.batch)).transpose(0, 1).flatten(1, 2)
        for part in parts:
            loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / len(parts)
            total += loss.item()
            for number, router in enumerate(of_model):
                logits, ids = seen[router]
                seen[router].clear()
                one_hot = F.one_hot(ids, 4).sum(1).double()
                counts[number] += one_hot.sum(0)
                if shape.balance == "switch":
                    term = 0.5 * 4 * (one_hot.mean(0) / 2 @ logits.softmax(-1).mean(0)) / len(parts)
                    balance, loss = balance + term.item(), loss + term
                if shape.z_loss:
                    term = shape.z_loss * logits.logsumexp(-1).square().mean() / len(parts)
                    z, loss = z + term.item(), loss + term
            loss.backward()
        if shape.balance == "bias":
            for number, router in enumerate(of_model):
                assert router.expert_bias is not None
                router.expert_bias += 0.01 * (counts[number].mean() - counts[number]).sign()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip or math.inf)
        lr = learning_rate(step, options)
        with torch.no_grad():
            for parameter in model.parameters():
                decay = options.weight_decay if parameter.dim() >= 2 else 0.0
                assert parameter.grad is not None
                parameter.sub_(lr * (parameter.grad + decay * parameter))
        biases = [router.expert_bias for router in of_model if router.expert_bias is not None]
        lines.append(
            {
                "loss": total,
                "grad_norm": norm.item(),
                "expert_load": (counts.amax(1) / counts.mean(1)).tolist(),
                "dropped_tokens": [0] * len(of_model),
                "bias_range": [(bias.max() - bias.min()).item() for bias in biases] or [0.0] * len(of_model),
                "balance_loss": balance,
                "z_loss": z,
            }
        )
    return lines, model


GRIDS = {
    "one rank": [],
    "data and expert": ["grid.data=2", "grid.expert=2"],
    "x and expert": ["grid.data=2", "grid.x=2", "grid.expert=2"],
    "x folded": ["grid.data=2", "grid.x=2", "grid.expert=4", "grid.expert_tensor=fold"],
    "pipeline": ["grid.pipe=2", "grid.data=2", "grid.expert=2", "model.layers=4"],
    "z": ["grid.z=2", "grid.expert=2", "train.recompute=full"],
    "sequence": ["grid.x=2", "train.shard_sequence=true"],
}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("balance", [BIAS, SWITCH], ids=["bias", "switch"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_run_is_plain_training_with_the_losses_written_out(
    ranks: MakeRanks, tmp_path: Path, grid: str, balance: tuple[str, ...]
) -> None:
    options = [*balance, *GRIDS[grid], "train.micro_batch=2", "train.steps=4"]
    lines = run(ranks, tmp_path / "run", *options, "train.checkpoint_every=1", "train.keep_checkpoints=9")
    config = runs.configure(tmp_path / "run", *SMALL, *options)
    sharers = config.grid.batch_parts
    wanted, model = train_plainly(config, weights_of(checkpoint_path(config.out, 1)), sharers)
    for line, plain in zip(lines[1:], wanted, strict=True):
        for key, value in plain.items():
            assert line[key] == pytest.approx(value, rel=1e-9, abs=1e-12), (key, line["step"])
    weights = weights_of(checkpoint_path(config.out, 4))
    for name, value in model.state_dict().items():
        if name != "head.weight":
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12, check_dtype=False)


@pytest.mark.long
def test_biases_are_those_of_all_micro_batches_of_a_step(ranks: MakeRanks, tmp_path: Path) -> None:
    whole = run(ranks, tmp_path / "whole", *BIAS, "train.steps=3")
    cut = run(ranks, tmp_path / "cut", *BIAS, "train.steps=3", "train.micro_batch=1")
    biases = [
        {name: bias for name, bias in weights_of(checkpoint_path(out, 3)).items() if name.endswith("expert_bias")}
        for out in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert list(biases[0]) == ["blocks.1.mlp.router.expert_bias"]
    torch.testing.assert_close(*biases, rtol=0, atol=0)
    assert any(bias.abs().max() > 0.015 for bias in biases[0].values())
    for ours, theirs in zip(whole, cut, strict=True):
        for key in ("loss", "grad_norm", "z_loss", "bias_range", "expert_load"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-10), key


CAPACITY = ("model.capacity_factor=0.75", "model.balance=none", "train.steps=3")


@pytest.mark.long
def test_tokens_beyond_the_capacity_are_dropped_in_the_order_of_ranks(ranks: MakeRanks, tmp_path: Path) -> None:
    one = run(ranks, tmp_path / "one", *CAPACITY)
    four = run(ranks, tmp_path / "four", *CAPACITY, "grid.data=2", "grid.x=2", "grid.expert=2")
    for ours, theirs in zip(four, one, strict=True):
        assert ours["dropped_tokens"] == theirs["dropped_tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
    # Without any drop an expert has at most 0.75 of its even share where each has: a fourth is dropped at least.
    assert all(line["dropped_tokens"][0] >= 0.25 * 8 * 16 * 2 for line in one)


@pytest.mark.long
def test_evaluation_drops_no_token_and_changes_nothing(ranks: MakeRanks, tmp_path: Path) -> None:
    options = (*CAPACITY[:1], *BIAS, "train.steps=3")
    plain = run(ranks, tmp_path / "plain", *options, "data.evaluation_sequences=9")
    often = run(ranks, tmp_path / "often", *options, "data.evaluation_sequences=9", "train.evaluate_every=1")
    assert [line["evaluation_loss"] for line in often][-1:] == [plain[-1]["evaluation_loss"]]
    for ours, theirs in zip(often, plain, strict=True):
        assert {key: ours[key] for key in theirs if "second" not in key} == {
            key: value for key, value in theirs.items() if "second" not in key
        }
    dropless = run(ranks, tmp_path / "dropless", *options, "data.evaluation_sequences=9", "train.lr=1e-300")
    dropping = run(
        ranks,
        tmp_path / "tight",
        *options,
        "data.evaluation_sequences=9",
        "train.lr=1e-300",
        "model.capacity_factor=0.1",
    )
    assert dropping[-1]["evaluation_loss"] == pytest.approx(dropless[-1]["evaluation_loss"], rel=1e-12)
    assert dropping[-1]["loss"] != dropless[-1]["loss"]


@pytest.mark.long
@pytest.mark.parametrize("state", ["fp32", pytest.param("device", marks=pytest.mark.exhaustive)])
def test_a_resumed_run_has_the_biases_it_had(ranks: MakeRanks, tmp_path: Path, state: str) -> None:
    options = [*BIAS, "grid.data=2", "grid.expert=2", "train.checkpoint_every=2", "train.steps=4"]
    if state == "device":
        options += ["train.dtype=bf16", "train.optimizer=adamw", "train.lr=1e-3", "train.optimizer_state=device"]
    run(ranks, tmp_path / "whole", *options)
    # Its last step is of another schedule, as if it had been stopped: what counts is in the checkpoint of step 2.
    resumed = [*options, f"train.resume={checkpoint_path(tmp_path / 'whole', 2)}"]
    run(ranks, tmp_path / "resumed", *resumed)
    assert_same_state(checkpoint_path(tmp_path / "whole", 4), checkpoint_path(tmp_path / "resumed", 4))
    bias = weights_of(checkpoint_path(tmp_path / "resumed", 4))["blocks.1.mlp.router.expert_bias"]
    assert bias.abs().max() > 0.015


@pytest.mark.long
def test_a_checkpoint_resumes_with_other_coefficients_and_not_with_another_router(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    run(ranks, tmp_path / "first", *SWITCH, "train.steps=1")
    resume = f"train.resume={checkpoint_path(tmp_path / 'first', 1)}"
    again = (
        *SWITCH,
        resume,
        "train.steps=2",
        "model.balance_loss=0.1",
        "model.z_loss=0.1",
        "model.capacity_factor=2.0",
    )
    assert [line["step"] for line in run(ranks, tmp_path / "again", *again)] == [2]
    with pytest.raises(ValueError, match=r"model\.experts_per_token is 2 there and 1 here"):
        run(ranks, tmp_path / "other", *SWITCH, resume, "train.steps=2", "model.experts_per_token=1")


@pytest.mark.exhaustive
def test_the_loss_scale_multiplies_the_routers_losses_too(ranks: MakeRanks, tmp_path: Path) -> None:
    options = ["train.dtype=fp16", "train.optimizer_state=device", "train.optimizer=adamw", "train.steps=1"]
    options += [*SWITCH, "model.balance_loss=5.0", "train.micro_batch=4", "train.clip=none"]
    norms = [
        run(ranks, tmp_path / scale, *options, f"train.loss_scale={scale}")[0]["grad_norm"]
        for scale in ("8.0", "512.0")
    ]
    plain = run(ranks, tmp_path / "plain", *options, "model.balance_loss=0.0", "train.loss_scale=64.0")
    assert norms == pytest.approx([norms[0]] * 2, rel=0.01)
    assert norms[0] > 1.1 * plain[0]["grad_norm"]  # so that a loss of another scale would be seen


def test_the_options_of_experts_are_checked_before_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.experts_per_token is 5, but model\.num_experts is only 4"):
        preflight(runs.configure(tmp_path / "run", *SMALL, "model.experts_per_token=5"))
    with pytest.raises(ValueError, match=r"model\.z_loss is 0\.1, but belongs to a mixture of experts"):
        preflight(runs.configure(tmp_path / "run", "model.z_loss=0.1"))
    with pytest.raises(ConfigError, match=r"model\.balance is 'sequence', a loss over each .*='switch' would do"):
        runs.configure(tmp_path / "run", *SMALL, "grid.x=2", "train.shard_sequence=true", "model.balance=sequence")
    blocks = runs.configure(tmp_path / "run", *SMALL, "model.moe_layers=[0, 1]")
    assert blocks.model.to_gpt(data_vocab=256, seq_len=16).moe_blocks == (0, 1)


def test_a_router_may_have_no_balance_at_all(tmp_path: Path) -> None:
    config = runs.configure(tmp_path / "run", *SMALL, "model.balance=none")
    assert config.model.to_gpt(data_vocab=256, seq_len=16).balance == "none"
    assert runs.configure(tmp_path / "run", *SMALL).model.to_gpt(data_vocab=256, seq_len=16).balance == "switch"
