# SPDX-License-Identifier: Apache-2.0
"""Hugging Face GPT-2, Llama and Qwen2 on a grid train as they do on one rank, and give whole logits when asked."""

import warnings
from ast import literal_eval
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    ConvNextConfig,
    ConvNextModel,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)

from stretto.parallel import Grid, full_parameters, gather, layout_of, parallelize, validate
from stretto.parallel.state import require_state
from tests.differences import largest
from tests.parallel import hugging_face
from tests.parallel.training import (
    PRECISIONS,
    SEED,
    Case,
    Precision,
    Sizes,
    Trace,
    batches,
    build,
    disagreements,
    distance,
    my_rows,
    train_plainly,
)

CASES = {
    "gpt2": Case(hugging_face.gpt2, (True,), is_hugging_face=True),
    "gpt2, untied": Case(hugging_face.gpt2, (False,), is_hugging_face=True, has_ignored_targets=True),
    "llama, grouped-query": Case(hugging_face.llama, (False,), is_hugging_face=True, has_ignored_targets=True),
    "qwen2, biases": Case(hugging_face.qwen2, (False,), is_hugging_face=True),
    "qwen2, biases, tied": Case(hugging_face.qwen2, (True,), is_hugging_face=True, has_ignored_targets=True),
    "llama, checkpointed, gathered twice": Case(
        hugging_face.llama, (True,), is_hugging_face=True, checkpoints_activations=True, reshard="after_forward"
    ),
}
GRIDS = [(2, 2, 1, 1), (1, 2, 2, 2), (2, 1, 2, 2)]


def exactly(precision: Precision) -> AbstractContextManager[object]:
    return hugging_face.Fp32IsFp64() if precision.dtype == torch.float64 else nullcontext()


def disagreements_of(sizes: Sizes, case: Case, precision: Precision, expected: Trace) -> dict[str, float | str]:
    with exactly(precision):
        return disagreements(sizes, case, precision, expected)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        *product(("gpt2", "llama, grouped-query", "qwen2, biases"), PRECISIONS),
        *product(("gpt2, untied", "qwen2, biases, tied", "llama, checkpointed, gathered twice"), ("fp64-adamw",)),
    ],
)
@pytest.mark.parametrize("sizes", GRIDS, ids=str)
def test_five_steps_on_a_grid_equal_those_of_one_rank(ranks, model, sizes, precision):
    print(f"seed {SEED}")
    case, chosen = CASES[model], PRECISIONS[precision]
    with exactly(chosen):
        expected = train_plainly(case, chosen)
    assert ranks(prod(sizes)).run(disagreements_of, sizes, case, chosen, expected) == [{}] * prod(sizes)


def disagreements_by_blocks(sizes: Sizes, case: Case, precision: Precision, expected: Trace) -> dict[str, float | str]:
    """Those of a model that this machine's host launches, as GPUs' do: by blocks, and with roles={} not."""
    grid = Grid(**sizes)
    with hugging_face.launched_by_host():
        kept = {"roles": {}}, {"recompute": "full"}, {"invariant": True, "fused": False}
        models = [parallelize(build(case, precision), grid, **options) for options in ({}, *kept)]
        with patch("stretto.parallel.resolve.MIN_COPIED_BYTES", 48 * 32 * 8):  # of the largest weight
            models.append(parallelize(build(case, precision), grid))
        by_block = [{*require_state(model, "this test").block_shards} for model in models]
        assert by_block == [{*models[0].get_submodule("model.layers").children()}, *[set()] * 4]
        tokens = torch.zeros(1, 3, dtype=torch.int64)
        assert models[0](input_ids=tokens, labels=tokens).logits is None  # taken slice by slice, as with roles
        return disagreements_of(sizes, case, precision, expected)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen2, biases, tied", {"z": 2}),
        pytest.param("qwen2, biases, tied", {"data": 2, "z": 2}, marks=pytest.mark.long),
        pytest.param("llama, grouped-query", {"z": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_blocks_of_small_weights_whose_kernels_a_host_launches_are_gathered_whole_over_z_alone(ranks, name, sizes):
    print(f"seed {SEED}")
    case, precision = replace(CASES[name], micro_batches=2), PRECISIONS["fp64-adamw"]
    with exactly(precision):
        expected = train_plainly(case, precision)
    count = prod(sizes.values())
    assert ranks(count).run(disagreements_by_blocks, sizes, case, precision, expected) == [{}] * count


def gradients(model: nn.Module, ids: Tensor, *, autocasts: bool, inside: bool = False) -> dict[str, Tensor]:
    """Whole gradients of a step, under autocast to bf16 or not, with its backward pass `inside` of that or after it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        loss = model(input_ids=ids, labels=ids).loss
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    layouts = {name: layout_of(p) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {name: gather(grad, layouts.get(name)) for name, grad in found.items() if grad is not None}


def errors_under_autocast(make: Callable[[], nn.Module], sizes: Sizes, options: dict[str, Any]) -> list[float]:
    """Mean relative errors of fp32 parameters' gradients under autocast: on a grid, and in plain PyTorch."""
    ids, rows = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(SEED)), slice(None)
    exact = gradients(make(), ids, autocasts=False)
    plain = gradients(make(), ids, autocasts=True)
    grid = Grid(**sizes)
    if grid.size("z") > 1:
        rows = slice(2 * grid.coordinate("z"), 2 * grid.coordinate("z") + 2)
    model = parallelize(make(), grid, **options)
    found = gradients(model, ids[rows], autocasts=True, inside=grid.size("z") > 1)
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    assert found.keys() == exact.keys()
    each = [[distance(grads[name], exact[name]) for name in exact] for grads in (found, plain)]
    return [sum(errors) / len(errors) for errors in each]


def seeded(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(SEED)
    return make(*args)


@pytest.mark.parametrize(
    ("make", "args", "sizes", "options"),
    [
        (hugging_face.llama, (True,), {"x": 2}, {"shard_sequence": True}),
        (hugging_face.qwen2, (False,), {"z": 2}, {"reduce_dtype": torch.float32}),
        (hugging_face.causal_lm, ("qwen3_moe",), {"y": 2}, {}),
        (hugging_face.llama, (True,), {"context": 2}, {}),
        pytest.param(hugging_face.llama, (True,), {"z": 2}, {"blocks": ["model.layers.*"]}, marks=pytest.mark.long),
    ],
    ids=["x", "z", "experts", "context", "blocks"],
)
def test_gradients_under_autocast_of_fp32_weights_are_as_exact_as_in_plain_pytorch(ranks, make, args, sizes, options):
    found = ranks(2).run(errors_under_autocast, partial(seeded, make, *args), sizes, options)
    for on_grid, plain in found:
        assert 0.5 * plain < on_grid < 1.2 * plain  # far less would be products in fp32


def logits_and_loss(sizes: Sizes, case: Case, precision: Precision, expected: Tensor) -> tuple[float, bool, bool]:
    """Return how far this rank's logits are; whether asking for a loss leaves them unmade, and whether tuples work."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    with exactly(precision):
        model = parallelize(build(case, precision), grid)
        rows = my_rows(grid, case.batch)
        tokens, _ = next(batches(case))
        with torch.no_grad():
            logits = model(input_ids=tokens[rows]).logits
            as_tuple = model(input_ids=tokens[rows], return_dict=False)
            with_loss = model(input_ids=tokens[rows], labels=tokens[rows])
            with_loss_as_tuple = model(input_ids=tokens[rows], labels=tokens[rows], return_dict=False)
    shapes = [part.shape for part in with_loss.to_tuple() if isinstance(part, Tensor)]
    made = with_loss.logits is not None or "logits" in with_loss or len(shapes) > 1 or with_loss_as_tuple[1] is not None
    return distance(logits, expected[rows]), made, torch.equal(as_tuple[0], logits)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gpt2", (1, 2, 2, 2)),
        ("gpt2", (2, 2, 1, 1)),
        ("llama, grouped-query", (2, 1, 2, 2)),
        ("qwen2, biases, tied", (1, 2, 2, 2)),
    ],
    ids=str,
)
def test_whole_logits_are_returned_without_labels_and_never_computed_with_them(ranks, model, sizes):
    print(f"seed {SEED}")
    case, precision = CASES[model], PRECISIONS["fp64-adamw"]
    tokens, _ = next(batches(case))
    with torch.no_grad(), exactly(precision):
        expected = build(case, precision)(input_ids=tokens).logits
    for far, made, tuple_agrees in ranks(prod(sizes)).run(logits_and_loss, sizes, case, precision, expected):
        assert far < 1e-12
        assert not made
        assert tuple_agrees


def weights_from_meta(sizes: Sizes, model: str) -> dict[str, Tensor]:
    with torch.device("meta"):
        made = META_MODELS[model]()
    model = parallelize(made, Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True))))
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


def deep_gpt2() -> nn.Module:
    """Eight layers: what ends on the residual stream starts four times smaller than the rest."""
    options = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_layer=8, n_embd=32, n_head=8, n_positions=32, **options))


META_MODELS = {
    "gpt2": deep_gpt2,
    "llama": partial(hugging_face.llama, tied=False),
    "qwen2": partial(hugging_face.qwen2, tied=True),
    "gpt-oss": partial(hugging_face.causal_lm, "gpt_oss", num_attention_heads=256, head_dim=2, num_local_experts=256),
}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", list(META_MODELS))
def test_a_model_on_the_meta_device_is_initialized_as_by_hugging_face_and_equally_on_every_grid(ranks, model):
    (weights,) = ranks(1).run(weights_from_meta, (1, 1, 1, 1), model)
    plain = META_MODELS[model]()
    for name, parameter in plain.named_parameters():
        assert weights[name].std().item() == pytest.approx(parameter.std().item(), rel=0.25, abs=1e-6), name
    for others in ranks(4).run(weights_from_meta, (1, 2, 1, 2), model):
        assert [name for name, weight in weights.items() if not torch.equal(weight, others[name])] == []


def small_llama() -> nn.Module:
    torch.manual_seed(SEED)
    model = hugging_face.llama(False).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64), alpha=0.3)
    return model


PROMPTS = torch.arange(3, 3 + 4 * 5).view(4, 5)
GENERATION = {"max_new_tokens": 6, "do_sample": False}


def generated(sizes: Sizes, end: int) -> Tensor:
    """This rank's rows of the prompts, continued until `end`."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model = parallelize(small_llama(), grid)
    with torch.no_grad():
        return model.generate(PROMPTS[my_rows(grid, 4)], eos_token_id=end, **GENERATION)


def sampled() -> list[list[int]]:
    """Tokens sampled on x=2 by ranks that have drawn unequally many random numbers before."""
    model = parallelize(small_llama(), Grid(x=2))
    torch.manual_seed(0)
    if dist.get_rank() == 1:
        torch.rand(3)
    tokens: list[list[int]] = model.generate(PROMPTS, max_new_tokens=6, do_sample=True, eos_token_id=None).tolist()
    return tokens


def test_ranks_of_x_sample_the_tokens_that_the_first_of_them_would(ranks):
    model = small_llama()
    torch.manual_seed(0)
    tokens = model.generate(PROMPTS, max_new_tokens=6, do_sample=True, eos_token_id=None).tolist()
    assert ranks(2).run(sampled) == [tokens, tokens]


def saved(folder: str) -> str:
    """Return what `save_pretrained` says of a sharded model, and save it as that says."""
    model = parallelize(small_llama(), Grid(x=2))
    with pytest.raises(ValueError) as error:
        model.save_pretrained(folder)
    assert not Path(folder).exists()
    dist.barrier()
    with full_parameters(model):
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
    return str(error.value)


def test_a_sharded_model_is_not_saved_in_parts_and_the_error_names_the_alternative(ranks, tmp_path):
    for message in ranks(2).run(saved, str(tmp_path / "model")):
        assert "with stretto.full_parameters(model):" in message
    found = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, weight in small_llama().state_dict().items():
        assert torch.equal(found[name], weight)


def hidden_features(axis: str) -> tuple[Tensor, str]:
    """Return what a model without a head returns, and the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = parallelize(small_llama().model, Grid(**{axis: 2}))
    with torch.no_grad():
        return model(input_ids=PROMPTS).last_hidden_state, "".join(str(each.message) for each in caught)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_model_without_a_head_returns_whole_features(ranks, axis):
    with torch.no_grad():
        expected = small_llama().model(input_ids=PROMPTS).last_hidden_state
    found = ranks(2).run(hidden_features, axis)
    for features, _ in found:
        assert distance(features, expected) < 1e-6
    assert ("LlamaModel has no head" in found[0][1]) == (axis == "y")


def intermediate_results(model: nn.Module, ids: Tensor, embeddings: Tensor) -> list[Tensor]:
    """Hidden states and attention weights of both kinds of output, and logits and a gradient of given embeddings."""
    flags = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    output, as_tuple = model(ids, **flags), model(ids, **flags, return_dict=False)
    embeddings = embeddings.clone().requires_grad_()
    logits = model(inputs_embeds=embeddings, use_cache=False).logits
    (logits.square().mean() + output.hidden_states[1].square().mean() + output.attentions[0].square().mean()).backward()
    found = *output.hidden_states, *output.attentions, *as_tuple[1], *as_tuple[2], logits, embeddings.grad
    layouts = {p: layout_of(p) if isinstance(p, DTensor) else None for p in model.parameters() if p.dim() == 1}
    return [each.detach() for each in found] + [gather(p.grad, layout) for p, layout in layouts.items()]


def differences_of_intermediate_results(kind: str) -> list[float]:
    torch.manual_seed(5)
    model = {"llama": hugging_face.llama, "gpt2": hugging_face.gpt2}[kind](False).double()
    model.set_attn_implementation("eager")
    ids, embeddings = torch.randint(3, 61, (2, 7)), torch.randn(2, 7, 32, dtype=torch.float64)
    with hugging_face.Fp32IsFp64():
        expected = intermediate_results(model, ids, embeddings)
        model.zero_grad()
        found = intermediate_results(parallelize(model, Grid(x=2, y=2)), ids, embeddings)
    return [distance(one, other) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_hidden_states_attention_weights_and_given_embeddings_are_whole(ranks, kind):
    for differences in ranks(4).run(differences_of_intermediate_results, kind):
        assert largest(differences) < 1e-10


def resized() -> list[str]:
    """Return what `resize_token_embeddings` says of a model with roles, and of one that is sharded block by block."""
    messages = []
    for blocks in (None, ["model.layers.*"]):
        model = small_llama()
        numbers = [model.num_parameters(exclude_embeddings=without) for without in (False, True)]
        model = parallelize(model, Grid(x=2) if blocks is None else Grid(z=2), blocks=blocks)
        assert [model.num_parameters(exclude_embeddings=without) for without in (False, True)] == numbers
        embedding = model.get_input_embeddings()
        with pytest.raises(ValueError) as error:
            model.resize_token_embeddings(128)
        assert model.get_input_embeddings() is embedding
        assert model.resize_token_embeddings() is embedding
        messages.append(str(error.value))
    return messages


def test_a_sharded_vocabulary_is_not_resized_and_the_error_says_when_to(ranks):
    for messages in ranks(2).run(resized):
        assert ["resize_token_embeddings(128): the embedding" in message for message in messages] == [True, True]
        assert all("Resize it before parallelize" in message for message in messages)


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "sizes",
    [(2, 1, 1, 2), pytest.param((4, 1, 1, 1), marks=EXHAUSTIVE), pytest.param((1, 4, 1, 1), marks=EXHAUSTIVE)],
    ids=str,
)
def test_rows_that_end_at_different_steps_on_different_ranks_are_generated_as_on_one(ranks, sizes):
    print(f"seed {SEED}")
    plain = small_llama()
    end = int(plain.generate(PROMPTS, **GENERATION)[0, 5])  # what row 0 begins with
    by_rank = ranks(4).run(generated, sizes, end)
    if sizes[1] == 4:
        assert all(torch.equal(found, plain.generate(PROMPTS, eos_token_id=end, **GENERATION)) for found in by_rank)
        return
    expected = [plain.generate(row[None], eos_token_id=end, **GENERATION) for row in PROMPTS]
    assert len({row.shape for row in expected}) > 1, "all rows end at one step: choose other prompts"
    assert [found.tolist() for found in by_rank] == [row.tolist() for row in expected]


def glm() -> nn.Module:
    torch.manual_seed(SEED)
    return hugging_face.causal_lm("glm").double()


def glm_losses(sizes: Sizes) -> tuple[float, float]:
    """Of a plain model, and of one that was given the roles that the refusal without them suggests."""
    grid, model, tokens = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True))), glm(), torch.arange(16)[None]
    plain = model(input_ids=tokens, labels=tokens).loss.item()
    with pytest.raises(ValueError, match=r"On a grid of x=1, y=1") as caught:
        parallelize(model, grid, roles={})
    parallelize(model, grid, roles=literal_eval(str(caught.value).partition("roles=")[2]))
    return plain, model(input_ids=tokens, labels=tokens).loss.item()


def test_the_suggestion_in_the_error_for_fused_projections_works(ranks):
    for plain, loss in ranks(2).run(glm_losses, (1, 1, 1, 2)):
        assert loss == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    ("model_type", "option"),
    [
        ("starcoder2", "residual_dropout"),
        ("starcoder2", "embedding_dropout"),
        ("seed_oss", "residual_dropout"),
        ("gpt_neox", "attention_dropout"),
    ],
)
def test_dropout_that_is_not_a_module_is_refused_by_its_option(model_type, option):
    others = {"embedding_dropout": 0.0, "residual_dropout": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    with pytest.raises(ValueError, match=rf"{option} is 0\.1: .*Set "):
        validate(hugging_face.causal_lm(model_type, **others | {option: 0.1}), {"x": 2})


def test_attention_dropout_is_refused_by_whatever_name_a_configuration_has_for_it():
    model = BertModel(BertConfig(vocab_size=61, num_hidden_layers=1, hidden_size=32, num_attention_heads=4))
    with pytest.raises(ValueError, match=r"config\.attention_probs_dropout_prob is 0\.1: .*Set "):
        validate(model, {"x": 2})


def test_dropout_that_a_block_reads_from_its_config_is_refused_too():
    config = FalconConfig(vocab_size=61, num_hidden_layers=1, hidden_size=32, num_attention_heads=4, hidden_dropout=0.1)
    with pytest.raises(ValueError, match=r"config\.hidden_dropout is 0\.1, and FalconDecoderLayer draws"):
        validate(FalconForCausalLM(config), {"x": 2})


def test_a_model_without_token_embeddings_is_refused_by_its_submodules():
    model = ConvNextModel(ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"these submodules have no role: embeddings\.patch_embeddings \(Conv2d\)"):
        validate(model, {"x": 2}, roles={})


def test_a_model_whose_layers_have_different_heads_is_refused_by_the_linear_that_makes_them():
    pytest.importorskip("transformers.integrations.heterogeneity")
    model = hugging_face.causal_lm("gpt_neox", hidden_dropout=0.0, per_layer_config={1: {"num_key_value_heads": 4}})
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.query_key_value of GPTNeoXModel: .* all layers"):
        validate(model, {"x": 2}, roles={})


BLOCK = "transformer.h.*."
BLOOM_ROLES = {
    "transformer.word_embeddings": "embedding",
    "transformer.word_embeddings_layernorm": "norm",
    BLOCK + "self_attention.query_key_value": {"role": "colwise", "unit": 24, "unit_name": "attention heads"},
    BLOCK + "self_attention.dense": "rowwise",
    BLOCK + "mlp.dense_h_to_4h": "colwise",
    BLOCK + "mlp.dense_4h_to_h": "rowwise",
    BLOCK + "*layernorm": "norm",
    "transformer.ln_f": "norm",
}


def test_biases_by_head_number_are_refused_where_ranks_have_other_heads():
    """With every count of heads divided, shapes would agree, and each rank would take the first heads' slopes."""
    model = BloomForCausalLM(BloomConfig(vocab_size=61, n_layer=1, hidden_size=32, n_head=4))
    heads = {BLOCK + "self_attention.num_heads": "x", "transformer.num_heads": "x"}
    validate(model, {"y": 2, "z": 2}, roles=BLOOM_ROLES, local_attributes=heads)
    with pytest.raises(ValueError, match=r"BloomModel adds .* \(ALiBi: build_alibi_tensor\).*choose x=1"):
        validate(model, {"x": 2}, roles=BLOOM_ROLES, local_attributes=heads)
