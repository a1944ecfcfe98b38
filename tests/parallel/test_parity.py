"""A model trained on a grid is the model trained on one rank: every loss, gradient norm and weight."""

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, parallelize
from tests.parallel.training import (
    PRECISIONS,
    SEED,
    Case,
    Precision,
    Sizes,
    batches,
    build,
    disagreements,
    distance,
    factorizations,
    logits_of,
    my_rows,
    train_plainly,
)

ALL_GRIDS = [sizes for world_size in (1, 2, 4, 8) for sizes in factorizations(world_size)]


def gpt(**options: object) -> GPTConfig:
    """A small GPT whose vocabulary, 61, no axis divides."""
    return GPTConfig(**{"layers": 2, "hidden": 32, "heads": 8, "vocab": 61, "max_seq_len": 16, **options})


VARIANTS = {
    "gpt2-like": Case(GPT, (gpt(),)),
    "llama-like": Case(
        GPT,
        (gpt(positions="rotary", activation="swiglu", norm="rmsnorm", bias=False, tie_embeddings=False, ffn=48),),
        has_ignored_targets=True,
    ),
    "grouped-query": Case(
        GPT,
        (gpt(kv_heads=4, positions="rotary", norm="rmsnorm", activation="swiglu"),),
        keep_gathered=False,
    ),
    "micro-batched": Case(GPT, (gpt(tie_embeddings=False),), has_ignored_targets=True, micro_batches=2, batch=16),
    "checkpointed": Case(
        GPT,
        (gpt(activation="swiglu", ffn=64, norm="rmsnorm", kv_heads=4, bias=False),),
        has_ignored_targets=True,
        checkpoints_activations=True,
    ),
    "micro-batched, checkpointed, gathered twice": Case(
        GPT,
        (gpt(positions="rotary", norm="layernorm", bias=True),),
        has_ignored_targets=True,
        micro_batches=2,
        batch=16,
        checkpoints_activations=True,
        keep_gathered=False,
    ),
}


def fits(variant: str, sizes: Sizes) -> bool:
    (config,) = VARIANTS[variant].model_args
    return config.num_kv_heads % sizes[1] == 0


def spread_variants() -> list[tuple[Sizes, str, str]]:
    """Every grid under both precisions, with the variants dealt out in turn."""
    names = list(VARIANTS)
    runs = []
    for turn, precision in enumerate(PRECISIONS):
        for index, sizes in enumerate(ALL_GRIDS):
            ordered = [names[(index + 2 * turn + shift) % len(names)] for shift in range(len(names))]
            runs.append((sizes, precision, next(name for name in ordered if fits(name, sizes))))
    return runs


@pytest.mark.parametrize(("sizes", "precision", "variant"), spread_variants(), ids=str)
def test_five_steps_on_every_grid_equal_those_of_one_rank(ranks, sizes, precision, variant):
    print(f"seed {SEED}")
    case, chosen = VARIANTS[variant], PRECISIONS[precision]
    expected = train_plainly(case, chosen)
    assert ranks(prod(sizes)).run(disagreements, sizes, case, chosen, expected) == [{}] * prod(sizes)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_variant_agrees_on_a_grid_of_all_three_tensor_axes_with_torchs_own_optimizer(ranks, variant):
    print(f"seed {SEED}")
    case, precision = VARIANTS[variant], PRECISIONS["fp64-adamw"]
    expected = train_plainly(case, precision)
    found = ranks(8).run(disagreements, (1, 2, 2, 2), case, precision, expected, optimizes_shards=False)
    assert found == [{}] * 8


def logits_distance(sizes: Sizes, case: Case, precision: Precision, expected: torch.Tensor) -> float:
    """How far this rank's logits for its rows are from the reference's."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model = parallelize(build(case, precision), grid)
    rows = my_rows(grid, case.batch)
    tokens, _ = next(batches(case))
    with torch.no_grad():
        return distance(logits_of(case, model, tokens[rows]), expected[rows])


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (1, 2, 2, 2), (2, 1, 2, 2), (1, 8, 1, 1)], ids=str)
@pytest.mark.parametrize("variant", ["gpt2-like", "llama-like"])
def test_every_rank_gets_whole_logits_of_its_rows_when_there_are_no_targets(ranks, sizes, variant):
    print(f"seed {SEED}")
    case, precision = VARIANTS[variant], PRECISIONS["fp64-adamw"]
    tokens, _ = next(batches(case))
    with torch.no_grad():
        expected = build(case, precision)(tokens)
    assert max(ranks(prod(sizes)).run(logits_distance, sizes, case, precision, expected)) < 1e-12


def initial_weights_of_a_meta_model(sizes: Sizes, config: GPTConfig, seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = GPT(config)
    model = parallelize(model, Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True))), seed=seed)
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


def test_a_model_on_the_meta_device_starts_from_the_same_weights_on_every_grid(ranks):
    config = gpt(tie_embeddings=False)
    (expected,) = ranks(1).run(initial_weights_of_a_meta_model, (1, 1, 1, 1), config, SEED)
    (other,) = ranks(1).run(initial_weights_of_a_meta_model, (1, 1, 1, 1), config, SEED + 1)
    shapes = {name: parameter.shape for name, parameter in GPT(config).named_parameters()}
    assert {name: weight.shape for name, weight in expected.items()} == shapes
    assert not torch.equal(expected["embedding.weight"], other["embedding.weight"])
    for sizes in [(2, 2, 1, 1), (1, 2, 2, 2), (2, 1, 2, 2), (1, 1, 1, 8), (1, 8, 1, 1)]:
        for weights in ranks(prod(sizes)).run(initial_weights_of_a_meta_model, sizes, config, SEED):
            assert {name: torch.equal(weight, expected[name]) for name, weight in weights.items()} == dict.fromkeys(
                expected, True
            )


def test_a_model_on_the_meta_device_starts_with_its_own_initialization(ranks):
    config = gpt(hidden=64, layers=8, tie_embeddings=False)
    (weights,) = ranks(1).run(initial_weights_of_a_meta_model, (1, 1, 1, 1), config, SEED)
    plain = GPT(config)
    for name, parameter in plain.named_parameters():
        assert weights[name].mean().item() == pytest.approx(parameter.mean().item(), abs=2e-3)
        assert weights[name].std().item() == pytest.approx(parameter.std().item(), rel=0.1, abs=1e-6)


class OwnModel(nn.Module):
    """A language model that Stretto has never heard of."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(61, 32)
        self.widen = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))
        self.scale = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.predict = nn.Linear(32, 61, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.lookup(tokens)
        for widen, narrow, scale in zip(self.widen, self.narrow, self.scale, strict=True):
            x = x + narrow(torch.tanh(widen(scale(x))))
        return self.predict(x)


OWN_ROLES = {"lookup": "embedding", "widen.*": "normal", "narrow.*": "swapped", "scale.*": "norm", "predict": "head"}
OWN_CASE = replace(VARIANTS["gpt2-like"], make_model=OwnModel, model_args=())


def own_logits_distance(sizes: Sizes, precision: Precision, expected: torch.Tensor) -> float:
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model = parallelize(build(OWN_CASE, precision), grid, roles=OWN_ROLES)
    rows = my_rows(grid, OWN_CASE.batch)
    tokens, _ = next(batches(OWN_CASE))
    return distance(model(tokens[rows]).detach(), expected[rows])


@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (1, 2, 2, 2), (2, 1, 2, 2)], ids=str)
def test_a_model_of_ones_own_runs_by_the_roles_that_its_user_names(ranks, sizes):
    print(f"seed {SEED}")
    precision = PRECISIONS["fp64-adamw"]
    tokens, _ = next(batches(OWN_CASE))
    with torch.no_grad():
        expected = build(OWN_CASE, precision)(tokens)
    assert max(ranks(prod(sizes)).run(own_logits_distance, sizes, precision, expected)) < 1e-12
