# SPDX-License-Identifier: Apache-2.0
"""KV heads that are fewer than x are copied to the ranks whose queries use them, and nothing else shows it."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from stretto.axes import GridSizes
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Role, count_collectives, gather, layout_of, parallelize, validate
from stretto.planner.architecture_loader import read_architecture
from stretto.planner.communication import linear_traffic
from stretto.planner.grids import why_impossible
from stretto.planner.memory import local_parameters
from stretto.train.checkpoint import checkpoint_path
from stretto.train.checkpoint.export import export_safetensors
from stretto.train.checkpoint.metadata import read_metadata
from stretto.train.replicas import place_of
from tests.conftest import Ranks
from tests.parallel import hugging_face
from tests.parallel.experts import training as pipelines
from tests.parallel.training import PRECISIONS, SEED, Case, Sizes, Trace, disagreements, train_plainly
from tests.train import runs

MakeRanks = Callable[[int], Ranks]
PRECISION = PRECISIONS["fp32-sgd"]  # 1e-5


def gpt(kv_heads: int, **options: Any) -> Case:
    shape = {"layers": 2, "hidden": 32, "heads": 8, "kv_heads": kv_heads, "vocab": 61, "max_seq_len": 16}
    return Case(GPT, (GPTConfig(**(shape | options)),))


def grouped(model_type: str, kv_heads: int, options: tuple[tuple[str, Any], ...] = ()) -> nn.Module:
    heads = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    return hugging_face.causal_lm(model_type, **(heads | dict(options)))


def theirs(model_type: str, kv_heads: int, **options: Any) -> Case:
    return Case(grouped, (model_type, kv_heads, tuple(options.items())), is_hugging_face=True)


LLAMA = {"positions": "rotary", "activation": "swiglu", "norm": "rmsnorm", "bias": False}
ON_FOUR: list[tuple[Sizes, Case]] = [
    ((1, 4, 1, 1), gpt(2)),  # of fused queries, keys and values, with biases
    ((1, 4, 1, 1), theirs("qwen3", 2)),  # norms of heads
    ((1, 2, 1, 2), theirs("qwen2", 1)),  # biases
]
MORE_ON_FOUR: list[tuple[Sizes, Case]] = [
    ((1, 4, 1, 1), replace(gpt(1, **LLAMA), shards_sequence=True)),
    ((1, 2, 1, 2), replace(gpt(1, **LLAMA), micro_batches=2, checkpoints_activations=True, reshard="after_forward")),
    ((1, 2, 2, 1), gpt(1)),
    ((1, 2, 2, 1), theirs("olmo2", 1)),  # norms of all heads
    ((1, 4, 1, 1), theirs("qwen3_moe", 2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)),
    ((2, 2, 1, 1), gpt(1, positions="rotary")),
    ((1, 4, 1, 1), theirs("llama", 1)),
]
ON_EIGHT: list[tuple[Sizes, Case]] = [
    ((1, 8, 1, 1), case) for kv_heads in (1, 2, 4) for case in (gpt(kv_heads), theirs("qwen3", kv_heads))
]
ON_EIGHT += [((1, 2, 2, 2), gpt(1, **LLAMA)), ((2, 2, 1, 2), theirs("qwen2", 1)), ((1, 4, 1, 2), theirs("qwen3", 2))]


def all_disagreements(trained: list[tuple[Sizes, Case, Trace]]) -> tuple[list[Any], int]:
    """Return what differs from the plain models, and how often it was said that KV heads are copied."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [disagreements(sizes, case, PRECISION, expected) for sizes, case, expected in trained]
    return [each for each in found if each], sum("KV heads: " in str(each.message) for each in said)


def check(ranks: MakeRanks, count: int, cases: list[tuple[Sizes, Case]]) -> None:
    print(f"seed {SEED}")
    trained = [(sizes, case, train_plainly(case, PRECISION)) for sizes, case in cases]
    found = ranks(count).run(all_disagreements, trained)
    assert found == [([], len(cases) if rank == 0 else 0) for rank in range(count)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "cases"),
    [(4, ON_FOUR), *(pytest.param(*rest, marks=pytest.mark.exhaustive) for rest in ((4, MORE_ON_FOUR), (8, ON_EIGHT)))],
    ids=["four", "more on four", "eight"],
)
def test_models_train_with_copied_kv_heads_as_on_one_rank(
    ranks: MakeRanks, count: int, cases: list[tuple[Sizes, Case]]
) -> None:
    check(ranks, count, cases)


@pytest.mark.exhaustive
def test_pipeline_stages_train_with_copied_kv_heads_as_one_rank(ranks: MakeRanks) -> None:
    print(f"seed {SEED}")
    case, run = gpt(1, **LLAMA), pipelines.Run({"pipe": 2, "x": 2})
    expected = train_plainly(case, pipelines.EXACT)
    assert ranks(4).run(pipelines.disagreements, run, case, expected) == [{}] * 4


def make_gpt() -> GPT:
    return GPT(replace(runs.GPT_CONFIG, kv_heads=2))


@pytest.mark.exhaustive
def test_checkpoints_and_exported_files_are_those_of_one_rank(ranks: MakeRanks, tmp_path: Path) -> None:
    """A copy is written once, and read by every grid; so are moments."""
    weights = ranks(4).run(runs.save_trained, make_gpt, {"x": 4}, tmp_path / "x4")[0]
    first = checkpoint_path(tmp_path / "x4", 2)
    for name, entry in read_metadata(first).tensors.items():
        assert sum(prod(chunk.sizes) for chunk in entry.chunks) == prod(entry.shape), name
    export_safetensors(first, tmp_path / "x4.safetensors")
    exported = load_file(tmp_path / "x4.safetensors")
    for number, grid in enumerate(({}, {"x": 2, "z": 2})):
        out = tmp_path / f"again-{number}"
        count = 1 if not grid else 4
        loaded = ranks(count).run(runs.load_and_save, make_gpt, grid, first, out)[0]
        assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
        export_safetensors(checkpoint_path(out, 2), out.with_suffix(".safetensors"))
        found = load_file(out.with_suffix(".safetensors"))
        assert found.keys() == exported.keys()
        assert all(torch.equal(found[name], exported[name]) for name in exported)


def what_ranks_hold() -> dict[str, Any]:
    """The parameters here, the copied ones, what is sent to sum their gradients, and which shard each rank holds."""
    grid = Grid(x=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = parallelize(make_gpt(), grid)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model(tokens, tokens).backward()
    model.zero_grad()
    with count_collectives(grid) as counts:
        model(tokens, tokens).backward()
    copied = [p.to_local().numel() for p in model.parameters() if layout_of(p).copies > 1]
    return {
        "parameters": sum(parameter.to_local().numel() for parameter in model.parameters()),
        "copied": sum(copied),
        "gradients": len(copied),
        "sent": sum(call.bytes_sent for call in counts.calls if call.axis == "x" and call.ranks == 2),
        "place": place_of(model.get_parameter("blocks.0.attention.qkv.weight")),
    }


def test_copies_are_known_to_the_planner_and_to_the_check_of_replicas(ranks: MakeRanks) -> None:
    model, grid = read_architecture(make_gpt().config, 16), GridSizes(x=4)
    found = ranks(4).run(what_ranks_hold)
    assert [each["place"] for each in found] == ["x=0", "x=0", "x=1", "x=1"]
    assert found[0]["parameters"] == local_parameters(model, grid)
    for each in found:
        assert (
            each["sent"] == (each["copied"] + each["gradients"]) * 4
        )  # a number a gradient says whether a rank has it
    qkv = model.linears[0]
    assert linear_traffic(qkv, grid, 1.0).copies == qkv.local_weights(grid) == 2 * qkv.weights / 4
    assert why_impossible(model, grid, 1) is None
    assert why_impossible(model, GridSizes(x=3), 1) == "x=3 does not divide 2 KV heads, nor is it a multiple of it"
    assert why_impossible(model, GridSizes(x=16), 1) == "x=16 does not divide 8 heads"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "x", "message"),
    [
        (12, 3, 2, r"3 KV heads cannot be split over x=2; .* that would do is 4, or choose x=1 or x=3"),
        (12, 6, 4, r"6 KV heads cannot be split over x=4; .* that would do is 8, or choose x=3 or x=6"),
        (4, 2, 8, r"4 ranks of x=8 hold each of its KV heads, but cannot divide 2 \(.*queries_per_group\) .* x=4"),
    ],
)
def test_numbers_of_kv_heads_that_do_not_fit_are_refused(heads: int, kv_heads: int, x: int, message: str) -> None:
    config = GPTConfig(layers=1, hidden=8 * heads, heads=heads, kv_heads=kv_heads, vocab=61, max_seq_len=16)
    with pytest.raises(ValueError, match=message):
        validate(GPT(config), {"x": x})
    with pytest.raises(ValueError, match="a role's shared is 5, but must be a whole number from 0 to 4"):
        Role("colwise", unit=4, shared=5)


class OwnAttention(nn.Module):
    """Attention that counts heads, KV heads and the queries of a KV head."""

    def __init__(self, heads: int = 8, kv_heads: int = 2, head_dim: int = 4) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.repeats, self.head_dim = heads, kv_heads, heads // kv_heads, head_dim
        self.q = nn.Linear(16, heads * head_dim)
        self.k, self.v = nn.Linear(16, kv_heads * head_dim), nn.Linear(16, kv_heads * head_dim)
        self.o = nn.Linear(heads * head_dim, 16)

    def forward(self, x: Tensor) -> Tensor:
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v = (
            linear(x).view(*x.shape[:2], count, self.head_dim).transpose(1, 2)
            for linear, count in zip((self.q, self.k, self.v), counts, strict=True)
        )
        k, v = (heads.repeat_interleave(self.repeats, 1) for heads in (k, v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


HEAD = {"role": "colwise", "unit": 4, "unit_name": "heads"}
KV_HEAD = HEAD | {"unit_name": "KV heads", "shared": 4, "shared_by": "repeats"}


def own_gradients(on_grid: bool) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    model: nn.Module = OwnAttention().double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    if on_grid:
        roles = {"q": HEAD, "k": KV_HEAD, "v": KV_HEAD, "o": "rowwise"}
        counts = {"num_heads": "x", "num_kv_heads": "x"}
        model = parallelize(model, Grid(x=4), roles=roles, local_attributes=counts)
    model(x).square().sum().backward()
    return {name: gather(parameter.grad) for name, parameter in model.named_parameters()}


def test_a_users_own_attention_has_copies_where_its_roles_say_that_they_are_shared(ranks: MakeRanks) -> None:
    expected = own_gradients(False)
    for found in ranks(4).run(own_gradients, True):
        torch.testing.assert_close(found, expected)
    unshared = HEAD | {"unit_name": "KV heads"}
    with pytest.raises(ValueError, match="k: 2 KV heads cannot be split over x=4"):
        validate(OwnAttention(), {"x": 4}, roles={"q": HEAD, "k": unshared, "v": unshared, "o": "rowwise"})
