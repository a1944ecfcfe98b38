# SPDX-License-Identifier: Apache-2.0
"""Losses of Hugging Face models: divided over the global batch as theirs are, or refused, never one rank's alone."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPConfig,
    CLIPModel,
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForTokenClassification,
    PatchTSTConfig,
    PatchTSTForClassification,
)

from stretto.parallel import Grid, gather, parallelize
from stretto.parallel.layers.loss import MeansOverBatch
from tests.parallel.hugging_face import VOCAB, Fp32IsFp64
from tests.parallel.training import IGNORED, distance, my_rows

SEED = 31
SIZES = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_labels": VOCAB,
    "classifier_dropout": 0.0,
    "pad_token_id": 0,
}


class LlamaWithItsOwnLoss(LlamaForCausalLM):
    """As models were before transformers kept their losses in one place."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        output = super().forward(input_ids=input_ids)
        if labels is not None:
            logits = output.logits[:, :-1].flatten(0, 1)
            output.loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED)
        return output


def token_means(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Return what a user may put in the place of a model's loss."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)


def squares(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return logits.square().mean()


def make(kind: str) -> nn.Module:
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match kind:
            case "masked":
                model: Any = EuroBertForMaskedLM(EuroBertConfig(**SIZES))
            case "token classification":
                model = LlamaForTokenClassification(LlamaConfig(**SIZES))
            case "own code":
                model = LlamaWithItsOwnLoss(LlamaConfig(**SIZES))
            case _:
                model = LlamaForCausalLM(LlamaConfig(**SIZES))
                model.loss_function = token_means if kind == "smoothed" else squares
    return model.double()


ROLES = {"token classification": {"score": "head", "dropout": "dropout"}}
SHARED = ["token classification", "own code", "smoothed", "squares"]
REFUSED = {"squares": "from this rank's rows alone"}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tokens, labels = torch.randint(3, VOCAB, (2, 4, 10), generator=generator)
    for row in range(4):
        labels[row, : 2 * row] = IGNORED
    return tokens, labels


def differences(sizes: dict[str, int], kind: str, **options: Any) -> dict[str, float]:
    """Return how far loss and gradients on a grid are from those of the plain model, which each rank computes."""
    grid, (tokens, labels), plain = Grid(**sizes), batch(), make(kind)
    rows = my_rows(grid, 4)
    with Fp32IsFp64():
        expected = plain(input_ids=tokens, labels=labels).loss
        expected.backward()
        model = parallelize(make(kind), grid, roles=None if options else ROLES.get(kind), **options)
        by_place = kind == "own code"
        loss = model(tokens[rows], *[labels[rows]] * by_place, **{} if by_place else {"labels": labels[rows]}).loss
        loss.backward()
    found = {"loss": distance(loss.detach(), expected.detach())}
    for (name, parameter), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        with torch.no_grad():
            parameter.to_local().copy_(parameter.grad.to_local())
        found[name] = distance(gather(parameter).detach(), whole.grad)
    return {name: far for name, far in found.items() if not far <= 1e-6}  # small gradients, of large terms


@pytest.mark.parametrize("sizes", [{"data": 2}, {"x": 2, "z": 2}], ids=str)
def test_labels_of_a_masked_language_model_are_not_shifted(ranks, sizes):
    count = 2 * sizes.get("z", 1)
    assert ranks(count).run(differences, sizes, "masked") == [{}] * count


@pytest.mark.parametrize(
    ("kind", "sizes"), [("token classification", {"x": 2, "z": 2}), ("own code", {"z": 2}), ("smoothed", {"data": 2})]
)
def test_means_of_cross_entropy_are_of_the_global_batch_whoever_computes_them(ranks, kind, sizes):
    count = 2 * sizes.get("x", 1)
    assert ranks(count).run(differences, sizes, kind) == [{}] * count


def loss_of_answers(sizes: dict[str, int] | None) -> tuple[float, float]:
    """Return the loss, and the norm of a gradient, of a model that answers questions, some beyond the end of a row."""
    torch.manual_seed(SEED)
    model: Any = LlamaForQuestionAnswering(LlamaConfig(**SIZES))
    tokens, positions, rows = batch()[0], torch.tensor([3, 10, 10, 10]), slice(4)
    if sizes is not None:
        rows = my_rows(grid := Grid(**sizes), 4)
        parallelize(model, grid)
    output = model(input_ids=tokens[rows], start_positions=positions[rows], end_positions=positions.flip(0)[rows])
    output.loss.backward()
    weight = model.transformer.layers[0].mlp.up_proj.weight.grad
    return output.loss.item(), (weight.norm() if sizes is None else gather(weight).norm()).item()


@pytest.mark.parametrize("axis", ["data", "z"])
def test_positions_of_answers_are_targets_like_labels(ranks, axis):
    expected = pytest.approx(loss_of_answers(None), rel=1e-5)
    assert ranks(2).run(loss_of_answers, {axis: 2}) == [expected] * 2


def loss_of_values(sizes: dict[str, int] | None) -> float:
    """Return the loss of a model that calls its targets values, of which one rank has two and the other one."""
    torch.manual_seed(SEED)
    config = PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2,
        num_hidden_layers=2, ffn_dim=32, num_targets=3, use_cls_token=True, norm_type="layernorm",
    )  # fmt: skip
    model: Any = PatchTSTForClassification(config)
    values, targets, rows = torch.randn(4, 16, 2), torch.tensor([0, 2, 1, IGNORED]), slice(4)
    if sizes is not None:
        rows = my_rows(grid := Grid(**sizes), 4)
        parallelize(model, grid)
    loss: Tensor = model(past_values=values[rows], target_values=targets[rows]).loss
    return loss.item()


def test_targets_that_are_called_so_are_targets_like_labels(ranks):
    assert ranks(2).run(loss_of_values, {"data": 2}) == [pytest.approx(loss_of_values(None), rel=1e-5)] * 2


@pytest.mark.parametrize("kind", SHARED)
def test_a_loss_that_stretto_does_not_know_is_the_models_own_where_ranks_share_the_batch(ranks, kind):
    assert ranks(2).run(differences, {"x": 2}, kind) == [{}] * 2


def refusal_of(sizes: dict[str, int], kind: str, **options: Any) -> str:
    grid, (tokens, labels) = Grid(**sizes), batch()
    model = parallelize(make(kind).float(), grid, roles=ROLES.get(kind))
    rows = my_rows(grid, 4)
    assert model(input_ids=tokens[rows]).logits.shape == (2, 10, VOCAB)
    with pytest.raises(ValueError) as caught:
        model(input_ids=tokens[rows], labels=labels[rows], **options)
    return str(caught.value)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("axis", ["data", "z"])
def test_a_loss_that_stretto_does_not_know_is_refused_where_ranks_have_parts_of_the_batch(ranks, kind, axis):
    for refusal in ranks(2).run(refusal_of, {axis: 2}, kind):
        assert REFUSED[kind] in refusal
        assert "mean_over_batch" in refusal


def test_a_loss_that_stretto_does_not_know_is_refused_in_a_tuple_too(ranks):
    for refusal in ranks(2).run(refusal_of, {"data": 2}, "squares", return_dict=False):
        assert "from this rank's rows alone" in refusal


def means() -> tuple[list[tuple[float, float]], str]:
    """Means of loss functions over all rows, beside those that ones over this rank's become; and an error."""
    grid, generator = Grid(z=2), torch.Generator().manual_seed(SEED)
    logits, labels = torch.randn(4, 6, generator=generator), torch.tensor([1, -100, 5, 0])
    numbers, sizes = torch.rand(4, 6, generator=generator), torch.tensor([2, 1, 1, 1])
    spelled, steps = torch.tensor([[1, 2], [3, 0], [4, 0], [5, 0]]), torch.tensor([6, 6, 6, 6])
    paths = torch.randn(6, 4, 7, generator=generator).log_softmax(-1)
    own, weight = my_rows(grid, 4), torch.arange(1.0, 7)
    uneven = slice(0, 3) if own == slice(0, 2) else slice(3, 4)  # as where a mask chooses elements
    cases: list[tuple[Any, slice]] = [
        (lambda rows: F.cross_entropy(logits[rows], labels[rows]), own),
        (lambda rows: F.nll_loss(F.log_softmax(logits[rows], -1), labels[rows]), own),  # ProphetNet's
        (lambda rows: F.cross_entropy(logits[rows], labels[rows], weight=weight), own),
        (lambda rows: F.cross_entropy(logits[rows], labels[rows], label_smoothing=0.1), own),
        (lambda rows: F.cross_entropy(logits[rows], labels[rows], weight, label_smoothing=0.1), uneven),
        (lambda rows: nn.CrossEntropyLoss()(logits[rows], numbers[rows]), uneven),
        (lambda rows: nn.BCEWithLogitsLoss()(logits[rows], numbers[rows]), uneven),  # ELECTRA's, of tokens of a mask
        (lambda rows: nn.MSELoss()(logits[rows], numbers[rows]), uneven),
        (lambda rows: F.smooth_l1_loss(logits[rows], numbers[rows, :1].expand(-1, 6)), uneven),
        (lambda rows: F.ctc_loss(paths[:, rows], spelled[rows], steps[rows], sizes[rows]), uneven),
        (lambda rows: F.ctc_loss(paths[:, rows], spelled[rows], steps[rows], sizes[rows], reduction="sum"), uneven),
    ]
    with MeansOverBatch(grid):
        found = [mean(rows).item() for mean, rows in cases]
        with pytest.raises(ValueError) as caught:
            F.cross_entropy(logits[own], labels[own], reduction="sum")
    return [(here, mean(slice(4)).item()) for here, (mean, _) in zip(found, cases, strict=True)], str(caught.value)


def test_the_mean_that_a_models_own_code_takes_is_one_over_the_batch_or_refused(ranks):
    for pairs, refusal in ranks(2).run(means):
        found, expected = zip(*pairs, strict=True)
        assert found == pytest.approx(expected, rel=1e-6)
        assert "mean_over_batch" in refusal


def warnings_by_blocks(sizes: dict[str, int]) -> dict[str, int]:
    """How often models by blocks warn of losses of own rows, in two calls."""
    grid, (tokens, labels), found = Grid(**sizes), batch(), {}
    rows, pictures = my_rows(grid, 4), torch.rand(4, 3, 8, 8, dtype=torch.float64)
    sides = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    towers = {
        "text_config": {**sides, "vocab_size": VOCAB},
        "vision_config": {**sides, "image_size": 8, "patch_size": 4},
    }
    clip = CLIPConfig(**towers, projection_dim=8)
    images = {"pixel_values": pictures[rows], "return_loss": True}
    for kind in (*SHARED[1:], "clip"):
        torch.manual_seed(SEED)
        model: Any = CLIPModel(clip).double() if kind == "clip" else make(kind)
        model = parallelize(model, grid, blocks=[])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(tokens[rows], **(images if kind == "clip" else {"labels": labels[rows]})).loss.backward()
        found[kind] = sum("from each rank's own rows" in str(each.message) for each in caught)
    return found


def test_losses_of_own_rows_warn_by_blocks(ranks):
    first, second = ranks(2).run(warnings_by_blocks, {"z": 2})
    assert first == {"own code": 0, "smoothed": 0, "squares": 1, "clip": 1}
    assert not any(second.values())
    assert ranks(2).run(differences, {"data": 2}, "smoothed", blocks=[]) == [{}] * 2


def replaced_afterwards() -> str:
    """Return what a loss function that is set on a parallelized model comes to:
    it would see the head's input as logits.
    """
    tokens, labels = batch()
    torch.manual_seed(SEED)
    model = parallelize(LlamaForCausalLM(LlamaConfig(**SIZES)), Grid(x=2))
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    with pytest.raises(ValueError) as caught:
        model(input_ids=tokens, labels=labels)
    return str(caught.value)


def test_a_loss_function_that_is_set_afterwards_does_not_take_the_heads_input_for_logits(ranks):
    for refusal in ranks(2).run(replaced_afterwards):
        assert "sharded_loss=False" in refusal
