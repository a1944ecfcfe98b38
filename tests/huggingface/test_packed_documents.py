# SPDX-License-Identifier: Apache-2.0
"""Packed documents and padded rows of transformers' models whose sequences are whole: as documents one at a time, in
memory linear in the sequence."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from stretto.huggingface.attention import packed_documents
from stretto.huggingface.attention.packed_documents import install_packed, refusal_of_packed
from stretto.parallel import Grid, Pipeline, gather, layout_of, parallelize
from tests.differences import largest
from tests.parallel import moe_families
from tests.parallel.context.test_training import DOCUMENTS, Largest, loss_of_separate_documents, packed, sliding
from tests.parallel.hugging_face import VOCAB, Fp32IsFp64, causal_lm
from tests.parallel.training import IGNORED, SEED, distance, my_rows

STARTS = torch.tensor([0, *torch.cat([torch.tensor(row) for row in DOCUMENTS]).cumsum(0)], dtype=torch.int32)
MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": partial(causal_lm, "llama"),
    "gemma3": sliding("gemma3_text"),  # windows
    "deepseek_v3": partial(moe_families.build, "deepseek_v3"),  # values of another size than keys
    "gpt_oss": partial(moe_families.build, "gpt_oss"),  # sinks and windows, by "eager"
}


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(SEED)
    model = MODELS[name]().to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@contextmanager
def count_calls() -> Iterator[list[Tensor]]:
    """The documents of each call of packed attention."""
    calls, own = list[Tensor](), packed_documents.packed_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, documents: Tensor, **options: Any) -> Tensor:
        calls.append(documents)
        return own(query, key, value, documents, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_documents, "packed_attention", attend)
        yield calls


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_are_documents_one_at_a_time(name):
    print(f"seed {SEED}")
    is_exact = name not in ("deepseek_v3", "gpt_oss")  # of experts there is no fp64
    model, batch = make(name, torch.float64 if is_exact else torch.float32), packed() | {"use_cache": False}
    if name == "gpt_oss":  # whose code looks for documents in no positions
        batch["cu_seq_lens_q"] = STARTS
    own, layers = model.config._attn_implementation, model.config.num_hidden_layers
    widen, bound = (Fp32IsFp64, 1e-10) if is_exact else (nullcontext, 5e-6)
    with widen():
        alone = loss_of_separate_documents(model, batch["input_ids"])
        expected = gradients_of(model, alone)
        install_packed(model)
        loss = model(**batch).loss
        found = gradients_of(model, loss)
    assert abs(loss.item() - alone.item()) < bound
    assert {key: far for key in expected if not (far := distance(found[key], expected[key])) < bound} == {}
    expected = gradients_of(model, model(**batch).loss)
    for is_reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
        with count_calls() as calls:
            loss = model(**batch).loss
            assert model.config._attn_implementation == own
            found = gradients_of(model, loss)
        assert [each.tolist() for each in calls] == [STARTS.tolist()] * 2 * layers
        assert model.config._attn_implementation == own
        assert {key: far for key in expected if not (far := distance(found[key], expected[key])) < 1e-12} == {}


@pytest.mark.long
def test_compiled_layers_are_one_graph_each():
    model, batch = make("llama"), packed() | {"use_cache": False}
    expected = model(**batch).loss.item()
    install_packed(model)
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    loss = model(**batch).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_padding_is_as_plain_transformers_has_it_and_so_is_what_cannot_be_packed():
    model, plain = make("llama").eval(), make("llama").eval()
    install_packed(model)
    tokens = packed()["input_ids"]
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[0, 11:] = mask[1, :3] = mask[2, 0] = mask[2, 12:] = 0
    hole = mask.clone()
    hole[3, 7] = 0
    whole = torch.ones(4, 1, 16, 16, dtype=torch.bool).tril()
    cases: list[tuple[dict[str, Any], int]] = [
        ({"attention_mask": mask}, 2),
        ({"attention_mask": mask, "position_ids": mask.cumsum(1) - 1}, 2),
        ({"attention_mask": torch.ones_like(mask)}, 0),
        ({"attention_mask": hole}, 0),
        ({"attention_mask": whole}, 0),
        ({"position_ids": packed()["position_ids"], "use_cache": True}, 0),  # which plain transformers ignores
        ({"position_ids": packed()["position_ids"], "use_cache": False}, 2),
        ({"position_ids": torch.arange(3, 19)[None]}, 0),
    ]
    for given, count in cases:
        with count_calls() as calls, torch.no_grad():
            found = model(tokens, **given).logits
            expected = plain(tokens, **given).logits
        assert len(calls) == count
        seen = mask.bool() if given.get("attention_mask") is mask else slice(None)
        assert (found - expected)[seen].abs().max() < 1e-6
        assert model.config._attn_implementation == "sdpa"
    with count_calls() as calls:
        ids = model.generate(tokens[:2], attention_mask=mask[:2].flip(1), max_new_tokens=3, do_sample=False)
        assert not calls
    assert torch.equal(ids, plain.generate(tokens[:2], attention_mask=mask[:2].flip(1), max_new_tokens=3))
    with pytest.raises(ValueError, match="must be the first tokens of all documents of 4 rows"):
        model(tokens, cu_seq_lens_q=STARTS[:-1])
    model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(InterruptedError):
        model(tokens, position_ids=packed()["position_ids"], use_cache=False)
    assert model.config._attn_implementation == "sdpa"


def interrupt(*_: Any) -> None:
    raise InterruptedError


def test_attention_at_the_end_of_what_is_computed_again_leaves_the_configuration_as_it_was():
    model = parallelize(moe_families.build("nemotron_h"), Grid(), recompute="full")  # attention has a layer alone
    own, tokens = model.config._attn_implementation, torch.arange(3, 19).view(2, 8)
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    with count_calls() as calls:
        model(input_ids=tokens, labels=tokens.where(mask == 1, -100), attention_mask=mask).loss.backward()
    assert len(calls) == 2, "in the forward pass, and again"
    assert model.config._attn_implementation == own


def test_nothing_is_made_of_all_pairs_of_tokens():
    tokens, length = torch.zeros(1, 1024, dtype=torch.int64), 1024
    rows: tuple[dict[str, Tensor], ...] = (
        {"position_ids": torch.arange(128).repeat(8)[None]},
        {"attention_mask": (torch.arange(length) < 512)[None].long()},
    )
    labels = torch.where(torch.arange(length) < 512, tokens, IGNORED)
    model = MODELS["llama"]().train()
    install_packed(model)
    for given in rows:
        with Largest() as made:
            model(tokens, labels=labels, use_cache=False, **given).loss.backward()
        assert made.count < length * length / 4


def with_own_mask(kind: str, **options: Any) -> nn.Module:
    """A tiny model of a class of transformers."""
    made: Any = getattr(transformers, kind)
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "num_labels": VOCAB}
    torch.manual_seed(SEED)
    return made(made.config_class(**sizes, **heads, **options)).eval()


READ: dict[str, tuple[Callable[[], nn.Module], str]] = {  # with what tells how, beside padding after the rows
    "labels of padding": (partial(causal_lm, "llama"), "labels"),
    "labels before padding": (partial(causal_lm, "llama"), "valid labels"),
    "answers": (partial(with_own_mask, "LlamaForQuestionAnswering"), "start_positions"),
    "last token": (partial(with_own_mask, "LlamaForSequenceClassification"), ""),
    "encoder": (partial(with_own_mask, "LayoutLMForTokenClassification", hidden_dropout_prob=0.0), ""),
    "encoder, splinter": (partial(with_own_mask, "SplinterModel", hidden_dropout_prob=0.0), ""),
    "mask of values": (partial(with_own_mask, "DogeForCausalLM", keep_window_size=2), ""),
    "prefix": (partial(with_own_mask, "HrmTextForCausalLM", prefix_lm=True, head_dim=8), "token_type_ids"),
}


@pytest.mark.parametrize("name", READ)
def test_outputs_of_padding_that_are_read_and_masks_that_are_not_causal_are_as_in_plain_transformers(name):
    make_model, argument = READ[name]
    model, tokens = make_model(), packed()["input_ids"]
    mask = (torch.arange(16) < torch.tensor([16, 11, 6, 9])[:, None]).long()
    values: dict[str, Tensor] = {
        "labels": tokens,
        "valid labels": torch.where(mask > 0, tokens, IGNORED),
        "start_positions": torch.tensor([3, 10, 5, 0]),
        "token_type_ids": (torch.arange(16) < 4).long().expand(4, 16),
    }
    given: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    if argument:
        given[argument.removeprefix("valid ")] = values[argument]
    if argument == "start_positions":
        given["end_positions"] = values[argument]

    def outcome() -> Tensor:
        output = model(**given)
        if "loss" in output:
            return output.loss
        return output[0] if output[0].dim() == 2 else output[0][mask > 0]

    with torch.no_grad():
        expected = outcome()
        install_packed(model)
        with count_calls() as calls:
            found = outcome()
    assert distance(found, expected) < 1e-5
    assert bool(calls) == (argument == "valid labels")


REFUSED = {
    "stablelm": ("stablelm", {}, "hands attention no further arguments"),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8}, "caps its attention's logits"),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, "does not go through transformers' attention interface"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_its_own_attention_needs_a_mask_for_stays_as_it_was(name):
    family, options, words = REFUSED[name]
    model = causal_lm(family, **options)
    batch = packed() | {"use_cache": False}
    if family == "bloom":
        del batch["position_ids"]
    expected = model(**batch).loss.item()
    assert words in str(refusal_of_packed(model))
    install_packed(model)
    assert model(**batch).loss.item() == expected


GRIDS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"x": 2, "z": 2}, {"shard_sequence": True}),
    ({"x": 4}, {"recompute": "communication"}),
    ({"data": 2, "z": 2}, {"recompute": "full"}),
    ({"z": 4}, {"blocks": ["model.layers.*"]}),
    ({"pipe": 2, "z": 2}, {"recompute": "full"}),
]


def distances_on(grids: list[tuple[dict[str, int], dict[str, Any]]]) -> list[tuple[float, float, int]]:
    """How far loss and gradients are from those of separate documents, and how many calls of packed attention."""
    batch, found = packed() | {"use_cache": False}, []
    whole = make("llama")
    with Fp32IsFp64():
        loss = loss_of_separate_documents(whole, batch["input_ids"])
        expected = gradients_of(whole, loss)
    for sizes, options in grids:
        grid = Grid(**sizes)
        model, rows = parallelize(make("llama"), grid, **options), my_rows(grid, 4)
        given = {name: each[rows] if isinstance(each, Tensor) else each for name, each in batch.items()}
        with count_calls() as calls, Fp32IsFp64():
            if sizes.get("pipe"):
                with Pipeline(model, grid, schedule="1f1b", micro_batch_size=1) as pipeline:
                    own = pipeline.step(**given)
            else:
                own = model(**given).loss
                own.backward()
        mine = [(name, each) for name, each in model.named_parameters() if each.grad is not None]
        far = largest(distance(gather(each.grad, layout_of(each)), expected[name]) for name, each in mine)
        found.append((abs(own.item() - loss.item()), far, len(calls)))
    return found


@pytest.mark.long
def test_packed_documents_on_grids(ranks):
    print(f"seed {SEED}")
    of_ranks = ranks(4).run(distances_on, GRIDS)
    for setting, found in zip(GRIDS, zip(*of_ranks, strict=True), strict=True):
        assert any(calls for _, _, calls in found), setting  # a rank may have a row of one document
        assert largest(largest(loss, far) for loss, far, _ in found) < 1e-10, setting
