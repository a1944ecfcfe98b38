# SPDX-License-Identifier: Apache-2.0
"""float8 training on grids: against a reference from the definition, in bits over z, by the bytes that are sent."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.axes import BATCH
from stretto.execution import Fp8
from stretto.models import GPT, GPTConfig
from stretto.models.moe import Experts
from stretto.parallel import Grid, count_collectives, gather, parallelize
from stretto.parallel.comm.copy_engine_gather import CopyEngineAllGather
from stretto.parallel.comm.copy_engine_scatter import ScatterRing
from stretto.parallel.fp8.weights import WeightScaling
from stretto.parallel.layers.linear import ParallelLinear
from tests.conftest import Ranks
from tests.differences import largest
from tests.parallel.fp8.reference import Fp8Experts, Fp8Linear
from tests.parallel.hugging_face import causal_lm
from tests.parallel.lora import PeftModel

MakeRanks = Callable[[int], Ranks]
STEPS = 2


def build(**changes: Any) -> GPT:
    torch.manual_seed(1)
    shape = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 64, "max_seq_len": 32}
    kind = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "bias": False, "tie_embeddings": False}
    return GPT(GPTConfig(**(shape | kind | changes)))


def batch() -> tuple[Tensor, Tensor]:
    text = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(3))
    return text[:, :-1], text[:, 1:]


def reference(recipe: str, **changes: Any) -> nn.Module:
    model = build(**changes).bfloat16()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.startswith("blocks.1."):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Fp8Linear(module, recipe))
        elif isinstance(module, Experts) and name.startswith("blocks.1."):
            module.__class__, module.recipe = Fp8Experts, recipe
    return model


def train(model: nn.Module, rows: slice = slice(None), *, compiles: bool = False) -> dict[str, Any]:
    """Losses of some steps, and the weights after them."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    tokens, targets = (each[rows] for each in batch())
    run = torch.compile(model, backend="aot_eager") if compiles else model
    for _ in range(STEPS):
        logits = run(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: gather(each).float() for name, each in model.named_parameters()}}


@contextmanager
def pushing() -> Iterator[None]:
    """Models that are parallelized inside gather and scatter over z as copy engines do."""
    builder = importlib.import_module("stretto.parallel.builder")
    with (
        mock.patch.object(builder, "have_copy_engines", lambda group, device: group.size() > 1),
        mock.patch.object(builder, "CopyEngineAllGather", partial(CopyEngineAllGather, backend="host")),
        mock.patch.object(builder, "make_scatter_ring", partial(ScatterRing, backend="host")),
    ):
        yield


def train_on_grid(sizes: dict[str, int], options: dict[str, Any], *, alike: bool) -> dict[str, Any]:
    """The same on a grid. alike: each rank has the same rows, and not its part of the batch."""
    options, grid = dict(options), Grid(**sizes)
    given = {"dtype": torch.bfloat16} if options.pop("masters", True) else {}
    compiles = options.pop("compiles", False)
    model = build(**options.pop("model", {}))
    with pushing() if options.pop("pushed", False) else nullcontext():
        model = parallelize(model if given else model.bfloat16(), grid, sharded_loss=False, **given, **options)
    part = 4 // grid.size(BATCH)
    first = 0 if alike else grid.coordinate(BATCH) * part
    with (
        mock.patch.object(WeightScaling, "note", autospec=True, side_effect=WeightScaling.note) as note,
        # Over z, linears in bf16 add gradients of their input within products; on one rank autograd rounds each first.
        mock.patch.object(ParallelLinear, "_adds_gradients", return_value=False),
    ):
        found = train(model, slice(first, first + (1 if alike else part)), compiles=compiles)
    # cuBLASLt refuses scales elsewhere, and `align_scales` would copy them in every product.
    assert all(call.args[2].data_ptr() % 16 == 0 for call in note.call_args_list)
    with count_collectives(grid) as counts:
        model(batch()[0][:1])
    return found | {"sent": counts.bytes_by_kind()}


def train_all(cases: Sequence[tuple[dict[str, int], dict[str, Any]]], alike: bool) -> list[dict[str, Any]]:
    return [train_on_grid(sizes, options, alike=alike) for sizes, options in cases]


def distance(found: dict[str, Any], expected: dict[str, Any], **changes: Any) -> float:
    """The largest norm(difference) / norm(what training has changed) of all weights."""
    start = {name: value.bfloat16().float() for name, value in build(**changes).named_parameters()}
    seen, weights = found["weights"], expected["weights"]
    moved = {name: float((weights[name] - start[name]).norm()) for name in weights}
    return largest(float((seen[name] - weights[name]).norm()) / moved[name] for name in weights if moved[name] > 1e-3)


RECIPES = ("tensorwise", "rowwise")


@pytest.mark.long
def test_bits_do_not_depend_on_z_and_one_rank_trains_as_the_reference(ranks: MakeRanks) -> None:
    """Where all ranks have the same rows, sums over them are exact."""
    grids = [{"data": 4}, {"data": 2, "z": 2}, {"z": 4}]
    options = [{"fp8": recipe, "masters": False} for recipe in RECIPES]
    cases = [(sizes, each) for each in options for sizes in grids]
    (found, *_) = ranks(4).run(train_all, [*cases, ({"z": 4}, {})], True)
    *in_fp8, in_bf16 = found
    for number, each in enumerate(options):
        first, *others = in_fp8[3 * number : 3 * number + 3]
        for other in others:
            assert other["losses"] == first["losses"], each
            assert all(torch.equal(value, first["weights"][name]) for name, value in other["weights"].items()), each
    for number, recipe in enumerate(RECIPES):
        expected, seen = train(reference(recipe), slice(0, 1)), in_fp8[3 * number]
        assert seen["losses"] == pytest.approx(expected["losses"], rel=1e-3)
        assert distance(seen, expected) < 0.03
        assert distance(seen, in_bf16) > 0.03, "fp8 makes no difference"
    # Of the middle block's linears one byte a number, and of all else two.
    numbers = sum(value.numel() for name, value in build().named_parameters() if "blocks.1" in name and value.dim() > 1)
    whole = in_bf16["sent"]["z", "all_gather"]
    assert whole - in_fp8[-1]["sent"]["z", "all_gather"] == 3 / 4 * numbers
    assert in_fp8[-1]["sent"]["z", "all_reduce"] < 0.02 * whole


@pytest.mark.exhaustive
def test_weights_that_copy_engines_gather_have_the_same_bits(interpret: Callable[..., list[Any]]) -> None:
    options = [{"fp8": "rowwise", "pushed": pushed} for pushed in (False, True)]
    (found, *_) = interpret(2, train_all, [({"z": 2}, each) for each in options], True)
    for plain, pushed in zip(found[::2], found[1::2], strict=True):
        assert plain["losses"] == pushed["losses"]
        assert all(torch.equal(value, pushed["weights"][name]) for name, value in plain["weights"].items())
        assert plain["sent"]["z", "all_gather"] > 0
        assert ("z", "all_gather") not in pushed["sent"], pushed["sent"]  # nothing is left to the process group


CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"x": 2, "z": 2}, {"recompute": "communication", "shard_sequence": True}),
    ({"x": 4}, {}),  # several ranks hold a KV head
    ({"y": 2, "data": 2}, {}),
    ({"z": 2, "data": 2}, {"recompute": "full", "reshard": "after_forward"}),
    ({"x": 2, "z": 2}, {}),
    ({"x": 2, "z": 2}, {"shard_sequence": True}),
    ({"z": 2, "data": 2}, {"reshard": "after_forward"}),
    ({"z": 2, "data": 2}, {"recompute": "full"}),
    ({"x": 2, "z": 2}, {"compiles": True}),
    ({"x": 2, "z": 2}, {"compiles": True, "shard_sequence": True}),
    ({"z": 2, "data": 2}, {"overlap": False}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("recipe", "tried"),
    [
        pytest.param("tensorwise", CASES[:4], marks=pytest.mark.long),
        *(pytest.param(recipe, CASES, marks=pytest.mark.exhaustive) for recipe in RECIPES),
    ],
)
def test_every_grid_and_option_trains_nearly_alike(recipe: str, tried: list[Any], ranks: MakeRanks) -> None:
    cases = [(sizes, options | {"fp8": recipe}) for sizes, options in [({"data": 4}, {}), *tried]]
    of_ranks = ranks(4).run(train_all, cases, False)
    means = [torch.tensor([found[number]["losses"] for found in of_ranks]).mean(0) for number in range(len(cases))]
    wrong = {}
    for case, seen, losses in zip(cases, of_ranks[0], means, strict=True):
        far = distance(seen, of_ranks[0][0])
        if not far <= 0.1 or not torch.allclose(losses, means[0], rtol=2e-3):
            wrong[str(case)] = far, losses.tolist()
    assert not wrong, (wrong, means[0])


EXPERTS = {"num_experts": 4, "expert_ffn": 64, "balance": "none", "moe_layers": (1,)}


@pytest.mark.exhaustive
def test_experts_train_as_the_reference_and_in_bits_over_z(ranks: MakeRanks) -> None:
    grids = [{"data": 4}, {"z": 4}, {"x": 2, "z": 2, "expert": 2}]
    cases = [(sizes, {"fp8": recipe, "masters": False, "model": EXPERTS}) for recipe in RECIPES for sizes in grids]
    cases.append((grids[0], {"masters": False, "model": EXPERTS}))
    (found, *_) = ranks(4).run(train_all, cases, True)
    in_bf16 = found[-1]
    for number, recipe in enumerate(RECIPES):
        first, *others = found[number * len(grids) : (number + 1) * len(grids)]
        expected = train(reference(recipe, **EXPERTS), slice(0, 1))
        assert distance(first, expected, **EXPERTS) < 0.1 < distance(first, in_bf16, **EXPERTS)
        for sizes, other in zip(grids[1:], others, strict=True):
            assert other["losses"] == pytest.approx(first["losses"], rel=3e-4), sizes
            if set(sizes) <= {"data", "z"}:
                assert all(torch.equal(value, first["weights"][name]) for name, value in other["weights"].items())


@pytest.mark.parametrize(
    ("recipe", "masters"),
    [
        pytest.param("tensorwise", True, marks=pytest.mark.long),
        pytest.param("tensorwise", False, marks=pytest.mark.exhaustive),
        pytest.param("rowwise", True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiler_traces_the_products_of_one_rank(recipe: str, masters: bool, ranks: MakeRanks) -> None:
    options = {"fp8": recipe, "masters": masters}
    ((plain, traced),) = ranks(1).run(train_all, [({}, options), ({}, options | {"compiles": True})], False)
    assert traced["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert distance(traced, plain) < 0.05


def refusals() -> list[str]:
    """Messages of calls that are refused, and what is warned of, on one rank."""
    grid, bf16 = Grid(), torch.bfloat16
    plain = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    odd = build(hidden=40, ffn=40, heads=2, kv_heads=1)
    calls: list[Callable[[], Any]] = [
        lambda: parallelize(build(), grid, dtype=bf16, fp8="mxfp8"),
        lambda: parallelize(build(), grid, dtype=bf16, fp8="NVFP4"),
        lambda: parallelize(build(), grid, dtype=bf16, fp8="blockwise"),
        lambda: parallelize(build(), grid, dtype=bf16, fp8=8),
        lambda: parallelize(build(), grid, fp8=True),
        lambda: parallelize(plain, grid, dtype=bf16, fp8=True),
        lambda: parallelize(odd, grid, dtype=bf16, fp8=True),
        lambda: parallelize(build(layers=2), grid, dtype=bf16, fp8=True),
        lambda: parallelize(build(), grid, dtype=bf16, fp8=Fp8(leave_out=("head", "*.wrong"))),
        lambda: Fp8(leave_out=("first",)),
        lambda: Fp8(leave_out="head"),
    ]
    found = []
    for call in calls:
        with pytest.raises(ValueError, match=r"\w") as raised:
            call()
        found.append(str(raised.value))
    with pytest.warns(UserWarning, match="multiples of 16") as caught:
        model = parallelize(build(ffn=40), grid, dtype=bf16, fp8=Fp8(leave_out=("head", "*.out")))
    found += [str(caught[0].message), in_fp8(model)]
    with pytest.raises(ValueError, match="these submodules have no role"):
        parallelize(PeftModel(causal_lm("llama"), ("q_proj",)), grid, dtype=bf16, fp8=True)
    return found


def in_fp8(model: nn.Module) -> str:
    return " ".join(name for name, each in model.named_modules() if hasattr(getattr(each, "plan", None), "recipe"))


def test_impossible_requests_say_what_would_do(ranks: MakeRanks) -> None:
    (found,) = ranks(1).run(refusals)
    for message, words in zip(
        found,
        (
            "'mxfp8' has a scale for each 32 numbers, which tensor cores multiply from Blackwell on alone",
            "'NVFP4' has 4 bits",
            "'blockwise', but must be one of tensorwise, rowwise",
            "fp8 is 8, but must be a recipe's name",
            "not torch.float32: dtype=torch.bfloat16 would do",
            "takes linears and experts with roles, and Sequential is sharded by blocks",
            "leaves no layer of GPT in fp8",
            "leave_out=('first', 'last', 'head') leaves out",
            "'*.wrong', which matches no linear of the model; 'blocks.0.attention.qkv' would do",
            "('head', 'first') would do",
            "('first', 'last', 'head') would do",
            "9 of 12 layers compute in bf16, not in fp8, whose sizes on a rank must be multiples of 16: blocks.0.mlp",
            "blocks.0.attention.qkv blocks.1.attention.qkv blocks.2.attention.qkv",
        ),
        strict=True,
    ):
        assert words in message, message
