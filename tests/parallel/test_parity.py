# SPDX-License-Identifier: Apache-2.0
"""A model trained on a grid is the model trained on one rank: every loss, gradient norm and weight."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, layout_of, mean_over_batch, no_sync, parallelize
from tests.differences import largest
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
        GPT, (gpt(kv_heads=4, positions="rotary", norm="rmsnorm", activation="swiglu"),), reshard="after_forward"
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
        reshard="after_forward",
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "precision", "variant"),
    [
        ((1, 2, 1, 2), "fp32-sgd", "micro-batched"),
        *(pytest.param(*run, marks=pytest.mark.exhaustive) for run in spread_variants()),
    ],
    ids=str,
)
def test_five_steps_on_every_grid_equal_those_of_one_rank(ranks, sizes, precision, variant):
    print(f"seed {SEED}")
    case, chosen = VARIANTS[variant], PRECISIONS[precision]
    expected = train_plainly(case, chosen)
    assert ranks(prod(sizes)).run(disagreements, sizes, case, chosen, expected) == [{}] * prod(sizes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", ["gpt2-like", "grouped-query", "micro-batched, checkpointed, gathered twice"])
def test_variants_agree_on_a_grid_of_all_three_tensor_axes_with_torchs_own_optimizer(ranks, variant):
    print(f"seed {SEED}")
    case, precision = VARIANTS[variant], PRECISIONS["fp64-adamw"]
    expected = train_plainly(case, precision)
    found = ranks(8).run(disagreements, (1, 2, 2, 2), case, precision, expected, optimizes_shards=False)
    assert found == [{}] * 8


def differences_where_ranks_have_so_many_rows(counts: list[int], config: GPTConfig) -> dict[str, float]:
    """Return how far the loss and each gradient are from those of one rank with all rows; counts:
    rows of each rank of z.
    """
    case, precision = Case(GPT, (config,), batch=sum(counts)), PRECISIONS["fp64-adamw"]
    tokens, targets = next(batches(case))
    plain = build(case, precision)
    loss = plain(tokens, targets)
    loss.backward()
    grid = Grid(z=len(counts))
    model, place = parallelize(build(case, precision), grid), grid.coordinate("batch")
    own = model(tokens.split(counts)[place], targets.split(counts)[place])
    own.backward()
    gradients = zip(model.named_parameters(), plain.parameters(), strict=True)
    return {"loss": distance(own.detach(), loss.detach())} | {
        name: distance(gather(parameter.grad), expected.grad) for (name, parameter), expected in gradients
    }


@pytest.mark.parametrize("variant", ["gpt2-like", "grouped-query"])
def test_a_rank_may_have_no_rows_of_the_batch(ranks, variant):
    print(f"seed {SEED}")
    (config,) = VARIANTS[variant].model_args
    for differences in ranks(2).run(differences_where_ranks_have_so_many_rows, [0, 3], config):
        assert largest(differences.values()) < 1e-12


def logits_distance(sizes: Sizes, case: Case, precision: Precision, expected: torch.Tensor) -> float:
    """Return how far this rank's logits for its rows are from the reference's."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model = parallelize(build(case, precision), grid)
    rows = my_rows(grid, case.batch)
    tokens, _ = next(batches(case))
    with torch.no_grad():
        return distance(logits_of(case, model, tokens[rows]), expected[rows])


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (1, 2, 2, 2), (2, 1, 2, 2), (1, 8, 1, 1)], ids=str)
@pytest.mark.parametrize("variant", ["gpt2-like", "llama-like"])
def test_every_rank_gets_whole_logits_of_its_rows_when_there_are_no_targets(ranks, sizes, variant):
    print(f"seed {SEED}")
    case, precision = VARIANTS[variant], PRECISIONS["fp64-adamw"]
    tokens, _ = next(batches(case))
    with torch.no_grad():
        expected = build(case, precision)(tokens)
    assert largest(ranks(prod(sizes)).run(logits_distance, sizes, case, precision, expected)) < 1e-12


def initial_weights_of_a_meta_model(sizes: Sizes, config: GPTConfig, seed: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = GPT(config)
    model = parallelize(model, Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True))), seed=seed)
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 2, 1, 1),
        (1, 2, 2, 2),
        pytest.param((2, 1, 2, 2), marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 1, 8), marks=pytest.mark.exhaustive),
        pytest.param((1, 8, 1, 1), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_model_on_the_meta_device_starts_from_the_same_weights_on_every_grid(ranks, sizes):
    config = gpt(tie_embeddings=False)
    (expected,) = ranks(1).run(initial_weights_of_a_meta_model, (1, 1, 1, 1), config, SEED)
    (other,) = ranks(1).run(initial_weights_of_a_meta_model, (1, 1, 1, 1), config, SEED + 1)
    shapes = {name: parameter.shape for name, parameter in GPT(config).named_parameters()}
    assert {name: weight.shape for name, weight in expected.items()} == shapes
    assert not torch.equal(expected["embedding.weight"], other["embedding.weight"])
    for weights in ranks(prod(sizes)).run(initial_weights_of_a_meta_model, sizes, config, SEED):
        assert {name: torch.equal(weight, expected[name]) for name, weight in weights.items()} == dict.fromkeys(
            expected, True
        )


def test_a_model_on_the_meta_device_starts_with_its_own_initialization(ranks):
    config = gpt(hidden=64, layers=8, tie_embeddings=False)
    (weights,) = ranks(1).run(initial_weights_of_a_meta_model, (1, 1, 1, 1), config, SEED)
    torch.manual_seed(SEED)  # or what other tests have drawn decides how far means are apart
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


OWN_ROLES = {"lookup": "embedding", "widen.*": "colwise", "narrow.*": "rowwise", "scale.*": "norm", "predict": "head"}
OWN_CASE = replace(VARIANTS["gpt2-like"], make_model=OwnModel, model_args=())


def own_logits_distance(sizes: Sizes, precision: Precision, expected: torch.Tensor) -> float:
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model = parallelize(build(OWN_CASE, precision), grid, roles=OWN_ROLES)
    rows = my_rows(grid, OWN_CASE.batch)
    tokens, _ = next(batches(OWN_CASE))
    return distance(model(tokens[rows]).detach(), expected[rows])


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 2, 1, 1),
        (1, 1, 2, 2),
        *(pytest.param(sizes, marks=pytest.mark.long) for sizes in ((1, 2, 2, 2), (2, 1, 2, 2))),
    ],
    ids=str,
)
def test_a_model_of_ones_own_runs_by_the_roles_that_its_user_names(ranks, sizes):
    print(f"seed {SEED}")
    precision = PRECISIONS["fp64-adamw"]
    tokens, _ = next(batches(OWN_CASE))
    with torch.no_grad():
        expected = build(OWN_CASE, precision)(tokens)
    assert largest(ranks(prod(sizes)).run(own_logits_distance, sizes, precision, expected)) < 1e-12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two blocks, or one block twice; `depth` says how many of them a forward pass goes through."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        first = Block()
        self.lookup = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([first, first if is_shared else Block()])
        self.predict = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.lookup(tokens)
        for block in self.blocks[:depth]:
            x = block(x)
        return self.predict(x)


STACK_ROLES = {
    "lookup": "embedding",
    "blocks.*.norm": "norm",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "predict": "head",
}
STACK_TEXT = torch.arange(8 * 6).view(8, 6) * 7 % 16
SITUATIONS = [
    "one block is there twice",
    "all was frozen until it was parallelized",
    "the model is converted before the step",
    "the model is converted while it holds gradients",
    "blocks are checkpointed by reentrant backward passes",
    "the last micro-batch leaves a block out",
    "gradients are zero, not None, before the first micro-batch",
    "blocks are checkpointed by reentrant backward passes, in micro-batches",
]


def stack_gradients(situation: str, grid: Grid | None, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of one step of a stack, after what the situation says: plain, or on a grid."""
    model = Stack(is_shared="twice" in situation).double()
    if grid is not None:
        model.requires_grad_("frozen" not in situation)
        model = parallelize(model, grid, roles=STACK_ROLES)
    model.requires_grad_(True)
    if "reentrant" in situation:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    if "converted" in situation:
        if "holds" in situation:
            stack_loss(model, parts[0], 2, grid).backward()
        model.float().double()
    model.zero_grad(set_to_none="not None" not in situation)
    if "not None" in situation:
        stack_loss(model, parts[0], 2, grid).backward()
        model.zero_grad(set_to_none=False)
    if "micro-batch" not in situation:
        parts = [torch.cat(parts)]
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        with no_sync(model) if grid is not None and not is_last else nullcontext():
            stack_loss(model, part, 1 if is_last and "leaves" in situation else 2, grid).backward()
    return {
        name: parameter.grad if grid is None else gather(parameter.grad, layout_of(parameter))
        for name, parameter in model.named_parameters()
    }


def stack_loss(model: nn.Module, tokens: torch.Tensor, depth: int, grid: Grid | None) -> torch.Tensor:
    total = F.cross_entropy(model(tokens, depth).flatten(0, 1), tokens.flatten(), reduction="sum")
    if grid is None:
        return total / STACK_TEXT.numel()
    return mean_over_batch(total, STACK_TEXT.numel() / grid.size("batch"), grid)


def stack_distances(sizes: Sizes) -> dict[str, float]:
    """The situations in which some gradient differs from that of plain training, and by how much."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    shards = STACK_TEXT.chunk(grid.size("batch"))
    distances = {}
    for situation in SITUATIONS:
        halves = [torch.cat(part) for part in zip(*(shard.chunk(2) for shard in shards), strict=True)]
        plain = stack_gradients(situation, None, halves)
        mine = stack_gradients(situation, grid, list(shards[grid.coordinate("batch")].chunk(2)))
        distances[situation] = largest(distance(mine[name], plain[name]) for name in plain)
    return {situation: far for situation, far in distances.items() if not far < 1e-12}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (1, 2, 2, 1), (1, 2, 1, 2)], ids=str)
def test_gradients_are_those_of_plain_training_whatever_is_done_with_the_model(ranks, sizes):
    print(f"seed {SEED}")
    assert ranks(4).run(stack_distances, sizes) == [{}] * 4


def hook_calls(sizes: Sizes) -> tuple[list[torch.Size], list[torch.Size]]:
    """Shapes that hooks on submodules saw in a pass, and in one after they were removed."""
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    model, seen = Stack(is_shared=False), []
    handles = [
        model.blocks[0].up.register_forward_hook(lambda _, args, output: seen.append(output.shape)),
        model.lookup.register_full_backward_hook(lambda _, inputs, outputs: seen.append(outputs[0].shape)),
    ]
    model = parallelize(model, grid, roles=STACK_ROLES)
    model(STACK_TEXT).sum().backward()
    first, seen = list(seen), seen
    seen.clear()
    for handle in handles:
        handle.remove()
    model(STACK_TEXT).sum().backward()
    return first, seen


def test_hooks_on_submodules_go_along_and_see_this_ranks_part(ranks):
    for first, after_removal in ranks(4).run(hook_calls, (1, 2, 2, 1)):
        assert first == [torch.Size([8, 6, 8]), torch.Size([8, 6, 4])]
        assert after_removal == []


def bare_vector_distance(sizes: Sizes) -> float:
    grid = Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))
    torch.manual_seed(SEED)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    x = torch.randn(8, dtype=torch.float64)
    expected = plain(x)
    return distance(parallelize(plain, grid, roles={"0": "colwise", "2": "rowwise"})(x), expected)


def test_a_linear_takes_a_vector_without_a_batch(ranks):
    assert largest(ranks(2).run(bare_vector_distance, (1, 2, 1, 1))) < 1e-14
