# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's mixtures of experts train on grids, with no roles given, as the plain model does on one rank."""

import warnings
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.axes import NAMES
from stretto.parallel import Grid, Pipeline, gather, parallelize, validate
from stretto.train.checkpoint.metadata import saved_tensors
from tests.parallel import moe_families
from tests.parallel.moe_families import BY_BLOCKS, FAMILIES, VOCAB, build
from tests.parallel.training import IGNORED, my_rows

SEED = 67
BATCH, SEQ_LEN, STEPS = 4, 10, 5
TOLERANCE = 1e-5

GRIDS: dict[str, dict[str, Any]] = {
    "x2": {"x": 2},
    "x2-expert2": {"data": 2, "x": 2, "expert": 2},
    "z2": {"z": 2},
    "y2": {"y": 2},
    "x2-y2-expert2": {"x": 2, "y": 2, "z": 2, "expert": 2},
    "pipe2-expert2": {"pipe": 2, "data": 2, "expert": 2},
    "x2-fold": {"x": 2, "expert": 2, "expert_tensor": "fold"},
}
GRIDS_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "expert2": {"data": 2, "expert": 2},
    "z2-expert2": {"z": 2, "expert": 2},
    "expert4": {"data": 2, "z": 2, "expert": 4},
    "data2-z2-expert2": {"data": 2, "z": 2, "expert": 2},
}
ONE_GRID = "x2-expert2"


@dataclass(frozen=True)
class Trace:
    """Logits before training [batch, seq, vocab], the losses of the steps, and all tensors after them."""

    logits: Tensor | None
    losses: list[float]
    tensors: dict[str, Tensor]


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels; the labels of some tokens are ignored, of other numbers of them in each row."""
    tokens = torch.randint(3, VOCAB, (BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(SEED))
    labels = tokens.clone()
    for row in range(BATCH):
        labels[row, : 2 * row] = IGNORED
    return tokens, labels


def train(model: nn.Module, rows: slice = slice(None)) -> Trace:
    tokens, labels = (each[rows] for each in batch())
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trace(logits, losses, whole_tensors(model))


def train_by_pipeline(model: nn.Module, grid: Grid, rows: slice) -> Trace:
    """The same with the stages of a pipeline, which makes no logits; tensors are those of this rank's stages."""
    tokens, labels = (each[rows] for each in batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    with Pipeline(model, grid, micro_batch_size=1) as pipeline:
        for _ in range(STEPS):
            optimizer.zero_grad()
            losses.append(pipeline.step(input_ids=tokens, labels=labels, use_cache=False).item())
            optimizer.step()
    return Trace(None, losses, whole_tensors(model))


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: gather(tensor).detach() for name, tensor in saved_tensors(model).items()}


@cache
def trained_plainly(family: str) -> Trace:
    return train(build(family))


def trained_on_grid(family: str, sizes: dict[str, Any]) -> tuple[Trace, slice]:
    grid = Grid(**sizes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is sharded only over z")
        warnings.filterwarnings("error", message=".*of the parameters of .* are split neither over")
        model = parallelize(build(family), grid)
    rows = my_rows(grid, BATCH)
    return (train_by_pipeline(model, grid, rows) if grid.size("pipe") > 1 else train(model, rows)), rows


def check(ranks: Any, family: str, sizes: dict[str, Any]) -> None:
    print(f"seeds {moe_families.SEED} {SEED}")
    expected = trained_plainly(family)
    assert expected.losses[-1] < expected.losses[0]
    count = prod(sizes.get(axis, 1) for axis in NAMES)
    for found, rows in ranks(count).run(trained_on_grid, family, sizes):
        if "pipe" not in sizes:
            torch.testing.assert_close(found.logits, expected.logits[rows], rtol=TOLERANCE, atol=TOLERANCE)
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert found.tensors.keys() == expected.tensors.keys() or "pipe" in sizes
        for name, tensor in found.tensors.items():
            torch.testing.assert_close(
                tensor, expected.tensors[name], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_with_divided_experts_as_on_one_rank(ranks, family):
    check(ranks, family, GRIDS[ONE_GRID])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in GRIDS if name != ONE_GRID])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_on_other_grids_as_on_one_rank(ranks, family, name):
    check(ranks, family, GRIDS[name])


def balanced(family: str) -> nn.Module:
    """A model that adds its load-balancing loss, which weighs much, if transformers has one for the family."""
    return build(family, output_router_logits=True, router_aux_loss_coef=0.7)


@cache
def balanced_plainly(family: str) -> Trace:
    return train(balanced(family))


def balanced_on_grid(family: str, sizes: dict[str, Any]) -> tuple[Trace, int, int]:
    """The trace, and the rows of the router's logits that a caller gets, and of its own tokens."""
    grid = Grid(**sizes)
    model, rows = parallelize(balanced(family), grid), my_rows(grid, BATCH)
    trace = train(model, rows)
    tokens, labels = (each[rows] for each in batch())
    return trace, model(input_ids=tokens, labels=labels).router_logits[0].shape[0], tokens.numel()


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param("mixtral", "x2-expert2", marks=pytest.mark.long),
        pytest.param("qwen2_moe", "z2", marks=pytest.mark.exhaustive),
        pytest.param("olmoe", "x2", marks=pytest.mark.exhaustive),
    ],
)
def test_a_load_balancing_loss_is_that_of_the_global_batch(ranks, family, name):
    print(f"seeds {moe_families.SEED} {SEED}")
    expected, without = balanced_plainly(family), trained_plainly(family)
    assert expected.losses[0] > without.losses[0] + 0.5
    count = prod(GRIDS[name].get(axis, 1) for axis in NAMES)
    for found, logits, tokens in ranks(count).run(balanced_on_grid, family, GRIDS[name]):
        assert logits == tokens, "a caller gets the logits of its own tokens"
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        for key, tensor in expected.tensors.items():
            torch.testing.assert_close(found.tensors[key], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def trained_with_divided_experts(family: str, sizes: dict[str, Any]) -> tuple[Trace, int]:
    grid = Grid(**sizes)
    model = parallelize(balanced(family), grid)
    numbers = sum(
        module.gate_up_proj.to_local().numel() for module in model.modules() if hasattr(module, "gate_up_proj")
    )
    return train(model, my_rows(grid, BATCH)), numbers


def by_cost(family: str, name: str) -> Any:
    is_telling = family in ("llama4_text", "ernie4_5_moe") and name == "expert2"
    return pytest.param(family, name, marks=() if is_telling else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("family", "name"), [by_cost(family, name) for family in FAMILIES | BY_BLOCKS for name in GRIDS_OF_EXPERTS]
)
def test_experts_are_divided_where_roles_or_blocks_shard_the_rest(ranks, family, name):
    print(f"seeds {moe_families.SEED} {SEED}")
    expected, sizes = balanced_plainly(family), GRIDS_OF_EXPERTS[name]
    parts = sizes["expert"] * (2 if name == "data2-z2-expert2" else 1)
    whole = sum(tensor.numel() for key, tensor in expected.tensors.items() if key.endswith("experts.gate_up_proj"))
    for found, numbers in ranks(prod(sizes[axis] for axis in sizes if axis in NAMES)).run(
        trained_with_divided_experts, family, sizes
    ):
        assert numbers * parts == whole
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert found.tensors.keys() == expected.tensors.keys()
        for key, tensor in expected.tensors.items():
            torch.testing.assert_close(found.tensors[key], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def losses_of_calls(sizes: dict[str, Any], counts: list[int], blocks: list[str] | None) -> dict[str, tuple[Any, Any]]:
    """Loss and the first router's gradient where ranks have so many of the batch's rows: of all tokens, or a mask's."""
    grid, first = Grid(**sizes), sum(counts[: torch.distributed.get_rank()])
    rows = slice(first, first + counts[torch.distributed.get_rank()])
    return calls_of(parallelize(balanced("mixtral"), grid, blocks=blocks), rows)


def calls_of(model: nn.Module, rows: slice = slice(None)) -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    tokens, labels = batch()
    mask = torch.ones_like(tokens)
    for row in range(BATCH):
        mask[row, tokens.shape[1] - 2 * row :] = 0
    for name, masks in (("all", {}), ("by a mask", {"attention_mask": mask[rows]})):
        model.zero_grad()
        some = labels.masked_fill(mask == 0, -100) if masks else labels
        output = model(input_ids=tokens[rows], labels=some[rows], use_cache=False, **masks)
        output.loss.backward()
        gradient = model.get_parameter("model.layers.0.mlp.gate.weight").grad
        found[name] = output.loss.item(), gather(gradient)
        without = model(input_ids=tokens[rows], use_cache=False, **masks)  # labels, which makes no loss
        found[f"{name}, alone"] = without.aux_loss.item(), gradient[:0]
    return found


@pytest.mark.parametrize(
    ("sizes", "blocks"), [({"data": 2}, ["model.layers.*"]), ({"z": 2}, ["model.layers.*"]), ({"z": 2}, None)], ids=str
)
def test_a_load_balancing_loss_counts_the_tokens_of_all_ranks_and_masks(ranks, sizes, blocks):
    expected = calls_of(balanced("mixtral"))
    for found in ranks(2).run(losses_of_calls, sizes, [3, 1], blocks):
        for name, (loss, gradient) in expected.items():
            assert found[name][0] == pytest.approx(loss, rel=TOLERANCE), name
            if not name.endswith("alone"):
                torch.testing.assert_close(found[name][1], gradient, rtol=TOLERANCE, atol=TOLERANCE)


def said_of_own_loss() -> list[str]:
    """Return what is said of a model whose own code computes the loss, as no known function does."""
    model = balanced("qwen3_moe")
    kind = type(model)

    class OwnCode(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.loss = output.loss + 0 * output.aux_loss
            return output

    model.__class__ = OwnCode
    model, (tokens, labels) = parallelize(model, Grid(data=2), blocks=["model.layers.*"]), batch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            model(input_ids=tokens[:2], labels=labels[:2], use_cache=False)
    return [str(each.message) for each in said]


def test_a_load_balancing_loss_that_stays_each_ranks_own_is_said_once(ranks):
    first, second = ranks(2).run(said_of_own_loss)
    own = "that the code of OwnCode adds is the mean over the ranks of each one's loss"
    assert sum(own in one for one in first) == 1
    assert second == []


def masked(model: nn.Module, rows: slice = slice(None)) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a batch whose last rows are shorter, without columns that none of `rows` needs."""
    mask = torch.arange(SEQ_LEN) < torch.tensor([[8], [7], [4], [5]])  # context=2 cuts rows in four
    tokens, labels = batch()
    used = slice(0, int(mask[rows].sum(1).max()))
    tokens, labels, mask = (each[rows, used] for each in (tokens, labels.where(mask, IGNORED), mask.long()))
    loss = model(input_ids=tokens, labels=labels, attention_mask=mask).loss
    loss.backward()
    return loss.item(), {name: gather(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def masked_on_grid(sizes: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    grid = Grid(**sizes)
    return masked(parallelize(balanced("mixtral"), grid), my_rows(grid, BATCH))


@pytest.mark.parametrize("sizes", [{"z": 2}, {"context": 2}], ids=str)
def test_a_load_balancing_loss_leaves_masked_tokens_out_on_all_ranks(ranks, sizes):
    loss, gradients = masked(balanced("mixtral"))
    for found, own in ranks(2).run(masked_on_grid, sizes):
        assert found == pytest.approx(loss, rel=TOLERANCE)
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=TOLERANCE, atol=TOLERANCE)


def refused_steps() -> list[str]:
    """The errors for models that are split by roles and by blocks, whose stages have some of the routers."""
    grid, messages = Grid(pipe=2), []
    for options in ({}, {"blocks": ["model.layers.*"]}):
        model = parallelize(balanced("mixtral"), grid, **options)
        tokens, labels = batch()
        with Pipeline(model, grid, micro_batch_size=1) as pipeline, pytest.raises(Exception) as caught:
            pipeline.step(input_ids=tokens, labels=labels, use_cache=False)
        messages.append(str(caught.value))
    return messages


def test_a_load_balancing_loss_of_a_pipeline_is_refused(ranks):
    for messages in ranks(2).run(refused_steps):
        assert len(messages) == 2
        for each in messages:
            assert "output_router_logits is set, and pipe=2: the load-balancing loss takes the logits of all" in each


def test_noise_of_a_router_is_refused_where_ranks_share_tokens():
    validate(build("mixtral", router_jitter_noise=0.1), {"data": 2})
    with pytest.raises(
        ValueError, match=r"router_jitter_noise is 0\.1: ranks of x and y have the same tokens, .* Set it to"
    ):
        validate(build("mixtral", router_jitter_noise=0.1), {"x": 2})


def test_heads_and_experts_that_a_grid_does_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"q_b_proj: 4 attention heads cannot be split over x=8; the nearest"):
        validate(build("deepseek_v3"), {"x": 8})
    with pytest.raises(ValueError, match=r"experts: 12 experts cannot be split over expert=8; the nearest"):
        validate(build("qwen3_moe"), {"data": 8, "expert": 8})


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "queries that are not compressed, biases": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "angles in halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "window and biases": ("qwen3_moe", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4}),
    "clipped queries": ("olmoe", {"clip_qkv": 0.5, "num_key_value_heads": 4}),
    "one expert a token": ("mixtral", {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
}


def trained_variant(name: str, sizes: dict[str, Any]) -> tuple[Trace, slice]:
    family, options = VARIANTS[name]
    grid = Grid(**sizes)
    model, rows = parallelize(build(family, **options), grid), my_rows(grid, BATCH)
    return train(model, rows), rows


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_a_family_train_as_on_one_rank(ranks, name):
    family, options = VARIANTS[name]
    expected = train(build(family, **options))
    for found, rows in ranks(8).run(trained_variant, name, GRIDS["x2-y2-expert2"]):
        torch.testing.assert_close(found.logits, expected.logits[rows], rtol=TOLERANCE, atol=TOLERANCE)
        for key, tensor in expected.tensors.items():
            torch.testing.assert_close(found.tensors[key], tensor, rtol=TOLERANCE, atol=TOLERANCE)


ANOTHER_FAMILY = {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 16}
ANOTHER_FAMILY |= {"first_k_dense_replace": 1, "head_dim": 8, "num_nextn_predict_layers": 0, "n_group": 2}
ROUTER = {"model.layers.*.mlp.gate": "router"}


def another_family() -> nn.Module:
    """One that Stretto has no roles for: GLM-4's, of which transformers' plan says all but what the router is."""
    return build("glm4_moe", **ANOTHER_FAMILY)


def trained_with_a_role(sizes: dict[str, Any]) -> tuple[Trace, slice]:
    grid = Grid(**sizes)
    model, rows = parallelize(another_family(), grid, roles=ROUTER), my_rows(grid, BATCH)
    return train(model, rows), rows


def test_a_router_that_nothing_is_known_of_is_named_with_the_role_that_it_may_have():
    message = r"submodules have no role: model\.layers\.1\.mlp\.gate \(Glm4MoeTopkRouter\).*"
    message += r"; if it chooses experts, roles=\{'model\.layers\.\*\.mlp\.gate': 'router'\}"
    message += r"\. With x=1 and y=1, ranks of expert=2 would divide model\.layers\.1\.mlp\.experts and its like, and b"
    with pytest.raises(ValueError, match=message):
        validate(another_family(), {"x": 2, "data": 2, "expert": 2})
    validate(another_family(), {"data": 2, "expert": 2})  # block by block, as any model


@pytest.mark.exhaustive
def test_another_family_trains_with_divided_experts_once_its_router_is_named(ranks):
    expected = train(another_family())
    for found, rows in ranks(4).run(trained_with_a_role, GRIDS[ONE_GRID]):
        torch.testing.assert_close(found.logits, expected.logits[rows], rtol=TOLERANCE, atol=TOLERANCE)
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)


def test_experts_that_are_modules_each_are_not_divided():
    model = build("jetmoe", num_local_experts=4, kv_channels=8)
    with pytest.raises(ValueError, match="expert is 2, but no module of JetMoeForCausalLM holds all of its experts"):
        validate(model, {"data": 2, "expert": 2})
    with pytest.raises(ValueError, match=r"mlp\.experts: 4 experts cannot be split over expert=3; the nearest .* is 3"):
        validate(build("gpt_oss"), {"data": 3, "expert": 3})


class LimitedExperts(nn.Module):
    """Experts with transformers' interface whose activations have a limit."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts, self.act_fn = experts.num_experts, experts.act_fn
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,erh->ter", hidden, self.gate_up_proj).chunk(2, -1)
        made = torch.einsum("tef,ehf->teh", self.act_fn(gate).clamp(max=7) * up, self.down_proj)
        chosen = made.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, made.shape[-1]))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)


def test_experts_that_compute_something_else_are_refused():
    model: Any = build("mixtral")
    model.model.layers[1].mlp.experts = LimitedExperts(model.model.layers[1].mlp.experts)
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.experts \(LimitedExperts\) has the role 'experts', but does"
    ):
        validate(model, {"data": 2, "expert": 2})


def test_a_low_limit_of_activations_is_the_modules_own():
    validate(build("gpt_oss", swiglu_limit=0.5), {"data": 2, "expert": 2})


def trained_in_bf16(family: str) -> list[float]:
    grid = Grid(data=2, x=2, expert=2)
    model = parallelize(build(family), grid, dtype=torch.bfloat16)
    return train(model, my_rows(grid, BATCH)).losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_in_bf16_about_as_in_fp32(ranks, family):
    """Weights stay fp32; what a router makes in fp32 mixes with hidden features in bf16."""
    for losses in ranks(4).run(trained_in_bf16, family):
        assert losses == pytest.approx(trained_plainly(family).losses, rel=0.03)
