# SPDX-License-Identifier: Apache-2.0
"""Weights come from a training grid to another one in bits, all of them or what has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from tests.conftest import Ranks
from tests.inference.test_engine import make, prompts
from torch import nn

from stretto.inference import Engine, WeightChanges, apply_patches, copy_weights
from stretto.inference.weights import _decode_gaps, _encode_gaps
from stretto.parallel import Grid, gather, parallelize

MakeRanks = Callable[[int], Ranks]
STEPS = 6
GRIDS = [
    ("llama", {"x": 2, "z": 2}, {"x": 4}),
    ("gpt2", {"z": 4}, {"x": 2, "data": 2}),
    ("qwen3", {"data": 2, "y": 2}, {"x": 4}),  # whose KV head is copied
    ("qwen3_moe", {"data": 2, "z": 2, "expert": 2}, {"data": 2, "x": 2, "expert": 2}),
]


def differ(one: nn.Module, other: nn.Module, dtype: torch.dtype) -> list[str]:
    """Names of parameters that are not the same in bits, in a 16-bit dtype."""
    others = dict(other.named_parameters())
    return [
        name
        for name, parameter in one.named_parameters()
        if not torch.equal(
            gather(parameter).to(dtype).view(torch.int16), gather(others[name]).to(dtype).view(torch.int16)
        )
    ]


def exchange(patch: bytes) -> list[bytes]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, patch)
    return found


def follow(kind: str, training: dict[str, int], serving: dict[str, int]) -> tuple[list[Any], list[int]]:
    """Train a model on a grid, and have an engine on another follow it: (what differs, bytes of patches)."""
    torch.set_num_threads(1)
    model = parallelize(make(kind), Grid(**training), dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        target = parallelize(make(kind).to(torch.bfloat16), Grid(**serving))
    engine = Engine(target, 2, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    changes = WeightChanges(model)
    engine.load(model)
    found, sizes = [differ(model, target, torch.bfloat16)], []
    for step in range(STEPS):
        ids = torch.arange(32).view(2, 16) * (step + 3) % 61
        rows = ids[: 2 // model_rows(training)]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        patches = exchange(changes.make_patch())
        engine.apply_patches(patches)
        sizes.append(sum(map(len, patches)))
        found.append(differ(model, target, torch.bfloat16))
    plain = make(kind).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(gather(dict(model.named_parameters())[name]))
    fresh = Engine(parallelize(plain, Grid(**serving)), 2, 256)
    given = prompts(6, (5, 20))
    assert engine.generate(given, 8) == fresh.generate(given, 8)  # joined weights are the parameters
    return found, sizes


def model_rows(sizes: dict[str, int]) -> int:
    return 1 if sizes.get("data", 1) * sizes.get("z", 1) == 1 else 2


def follow_all(cases: list[Any]) -> list[Any]:
    return [follow(*case) for case in cases]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(GRIDS[:1], marks=pytest.mark.long),
        pytest.param(GRIDS[1:], marks=pytest.mark.exhaustive),
    ],
    ids=["llama", "others"],
)
def test_an_engine_on_another_grid_follows_training_in_bits(ranks: MakeRanks, cases: list[Any]) -> None:
    by_rank = ranks(4).run(follow_all, cases, timeout=300)
    for number, case in enumerate(cases):
        whole = 2 * sum(parameter.numel() for parameter in make(case[0]).parameters())
        for found, sizes in (of_rank[number] for of_rank in by_rank):
            assert found == [[]] * (STEPS + 1), case
            assert all(size < 1.6 * whole + 40_000 for size in sizes)  # names and boxes outweigh so small a model


def test_gaps_of_any_length_are_decoded_as_they_were() -> None:
    for places in ([], [0], [254], [255], [256], [0, 1, 255, 256, 511, 512, 100_000], list(range(0, 5000, 51))):
        encoded = _encode_gaps(torch.tensor(places, dtype=torch.int64))
        assert _decode_gaps(encoded).tolist() == places
        assert len(encoded) <= len(places) + (max(places, default=0) + 1) // 255


def test_a_patch_of_a_fiftieth_of_the_weights_takes_3_percent_of_all() -> None:
    model = nn.Linear(1000, 1000, bias=False).to(torch.bfloat16)
    changes = WeightChanges(model)
    with torch.no_grad():
        model.weight.view(-1)[::50] += 1
    assert len(changes.make_patch()) < 0.031 * 2 * 1000 * 1000
    assert len(changes.make_patch()) < 1000  # nothing has changed since


def patched() -> tuple[nn.Module, bytes, bytes]:
    """A model, and two patches that follow one another."""
    model = nn.Linear(8, 4, bias=False).to(torch.bfloat16)
    changes = WeightChanges(model)
    patches = []
    for _ in range(2):
        with torch.no_grad():
            model.weight += 1
        patches.append(changes.make_patch())
    return model, *patches


def damaged(patch: bytes, **changes: Any) -> bytes:
    tensors = load(patch)
    return save({name: changes.get(name.rpartition(":")[2], tensor).clone() for name, tensor in tensors.items()})


def test_patches_that_do_not_fit_are_refused_and_change_nothing() -> None:
    _, first, second = patched()
    other = nn.Linear(8, 4, bias=False).to(torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in other.named_parameters()}
    bad: list[tuple[list[bytes], dict[str, int], str]] = [
        ([first[:-3]], {}, "is damaged"),
        ([b"not a patch"], {}, "is damaged"),
        ([save({"weight": torch.ones(2)})], {}, "it names no step"),
        ([first, second], {}, r"patches of the steps \[1, 2\]"),
        ([], {}, "must be all ranks' of one step"),
        (first, {}, rf"patches are {len(first)} bytes, .*; \[patch\] is a list of one"),  # type: ignore[list-item]
        ([second], {"after": 0}, "the last one was of step 0: 1 is next"),
        ([save({"step": torch.tensor([1])})], {}, "have 0 of the 32 numbers of weight"),
        ([damaged(first, gaps=torch.full((40,), 3, dtype=torch.uint8))], {}, "does not fit"),
        ([damaged(first, box=torch.tensor([[0, 0], [9, 8]]))], {}, "does not fit"),
        ([damaged(first, box=torch.tensor([[-1, 0], [4, 8]]))], {}, "does not fit"),
        ([damaged(first, values=torch.ones(3))], {}, "does not fit"),
        ([damaged(first, values=torch.tensor(1.0, dtype=torch.bfloat16))], {}, "does not fit"),
        ([damaged(first, values=torch.ones(32, dtype=torch.int64))], {}, "does not fit"),
        (
            [damaged(first, gaps=torch.empty(0, dtype=torch.uint8), values=torch.empty(0, dtype=torch.float16))],
            {},
            "would round its",
        ),
        ([damaged(first, step=torch.tensor([1.5]))], {}, "it names no step"),
    ]
    for patches, options, message in bad:
        with pytest.raises(ValueError, match=message):
            apply_patches(other, patches, **options)
        assert all(torch.equal(before[name], parameter) for name, parameter in other.named_parameters())
    assert apply_patches(other, [first], after=0) == 1


def test_models_with_other_parameters_are_refused() -> None:
    target = parallelize(make("llama"), Grid())
    for other in (make("qwen3"), make("llama", num_hidden_layers=3), make("llama", intermediate_size=64)):
        with pytest.raises(ValueError, match="must have the same parameters"):
            copy_weights(other, target)
    for call in (lambda: copy_weights(None, target), lambda: WeightChanges(None)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="model is None, of type NoneType, but must be a Module"):
            call()
    with pytest.raises(ValueError, match=r"16-bit weights, not torch\.float32"):
        WeightChanges(target, torch.float32)


def with_buffers(kind: str) -> Any:
    model = make(kind)
    for layer in model.model.layers:
        layer.register_buffer("bias", torch.randn(5))
        layer.register_buffer("count", torch.tensor(3))
        layer.register_buffer("angles", torch.randn(2), persistent=False)
    return model


def buffers_of(model: nn.Module) -> dict[str, list[Any]]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers() if "layers" in name}


def follow_buffers() -> list[Any]:
    """Persistent buffers of a model on another grid: its own at first, then as copied, and as patched."""
    trained, served = (parallelize(with_buffers("llama"), Grid(**sizes)) for sizes in ({"z": 2}, {"x": 2}))
    with torch.no_grad():
        for buffer in served.buffers():
            buffer.add_(1)
    kept = buffers_of(served)
    copy_weights(trained, served)
    found, changes = [buffers_of(trained), kept, buffers_of(served)], WeightChanges(trained)
    served.to(torch.bfloat16)
    for layer in served.model.layers:
        layer.bias = layer.bias.float()
    copy_weights(trained, served)
    for layer in trained.model.layers:
        layer.bias[3] = 0.1
        layer.count += 1
    apply_patches(served, exchange(changes.make_patch()))
    return [*found, buffers_of(trained), buffers_of(served)]


def test_persistent_buffers_come_with_the_weights_in_their_own_dtype(ranks: MakeRanks) -> None:
    for first, kept, copied, changed, patched in ranks(2).run(follow_buffers):
        for name in first:
            if "angles" in name:
                assert copied[name] == kept[name] != first[name]
            else:
                assert copied[name] == first[name] != changed[name] == patched[name]
