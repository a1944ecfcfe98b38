# SPDX-License-Identifier: Apache-2.0
"""Indices of what is left, masks, and the kernels that compress and expand."""

import importlib.util
import random
from typing import Any
from unittest import mock

import pytest
import torch

from stretto.execution import StateOptions
from stretto.optim.sparse import EarlyBird, Masks, WeightMask, index, make_index, weights
from stretto.optim.sparse.masks import count_left, pack, select_above, select_largest, unpack
from stretto.optim.sparse.weights import SparseWeights

SIZES = (1, 7, 64, 1023, 1024, 1025, 5000)


def draw_masks(seed: int) -> list[torch.Tensor]:
    """Random ones of every size; and empty, full, one number, and the last block alone."""
    generator = torch.Generator().manual_seed(seed)
    masks = [torch.rand(size, generator=generator) < (0.1, 0.5)[number % 2] for number, size in enumerate(SIZES)]
    for size in (1500, 2048):
        masks += [torch.zeros(size, dtype=torch.bool), torch.ones(size, dtype=torch.bool)]
        for place in (0, size - 1):
            masks.append(torch.arange(size) == place)
        masks.append(torch.arange(size) >= 1024)
    return masks


def check_index(made: Any, mask: torch.Tensor, dtype: torch.dtype, parts: list[tuple[int, int]]) -> None:
    """All operations of an index beside plain indexing by the mask."""
    generator = torch.Generator().manual_seed(len(mask))
    dense = torch.randn(len(mask), generator=generator).to(dtype)
    left = dense[mask]
    assert (made.size, made.count) == (len(mask), len(left))
    assert torch.equal(made.compress(dense, torch.empty_like(left)), left)
    start = torch.randn(len(left), generator=generator).to(dtype)
    assert torch.equal(made.compress(dense, start.clone(), adds=True), start + left)
    expected = torch.where(mask, dense, 0)
    assert torch.equal(made.fill(left, torch.full_like(dense, 9)), expected)
    skip = torch.zeros(1, dtype=torch.int32)
    in_place = torch.zeros_like(dense)
    for first, last in reversed(parts):  # none may write another's numbers
        assert torch.equal(made.compress(dense, left.new_empty(last - first), first=first, last=last), left[first:last])
        sums = made.compress(dense, start[first:last].clone(), first=first, last=last, adds=True)
        assert torch.equal(sums, (start + left)[first:last])
        made.expand(left[first:last], in_place, first=first, last=last, skip=skip)
    assert torch.equal(in_place, expected)
    skip.fill_(1)
    assert torch.equal(made.expand(left + 1, in_place.clone(), skip=skip), expected)
    assert torch.equal(made.expand(left + 1, in_place.clone(), failed=skip), expected)


def cut(count: int, seed: int) -> list[tuple[int, int]]:
    places = sorted(random.Random(seed).choices(range(count + 1), k=3))
    return list(zip([0, *places], [*places, count], strict=True))


@pytest.mark.parametrize("kind", ["bitmap", "int32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressing_and_expanding_are_indexing_by_the_mask(kind: Any, dtype: torch.dtype) -> None:
    for number, mask in enumerate(draw_masks(seed=5)):
        made = make_index(pack(mask), len(mask), kind)
        check_index(made, mask, dtype, cut(made.count, number))


def check_kernels(dtype_name: str) -> None:
    """The interpreted kernels, in place of torch's operators."""
    dtype = getattr(torch, dtype_name)
    masks = [
        mask
        for mask in draw_masks(seed=6)
        if len(mask) in (7, 1025) or (len(mask) == 1500 and mask[-1] and not mask[0])
    ]
    with mock.patch.object(index, "runs_kernels", return_value=True):
        for number, mask in enumerate(masks):
            made = index.BitmapIndex(pack(mask), len(mask))
            check_index(made, mask, dtype, cut(made.count, number))
            wide = torch.full((len(mask),), 9, dtype=dtype)  # the kernel writes the zeros, too
            assert torch.equal(made.expand(torch.ones(made.count, dtype=dtype), wide), mask.to(dtype))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)])
def test_the_kernels_do_what_the_cpu_does(interpret: Any, dtype: str) -> None:
    interpret(1, check_kernels, dtype)


def build(masks: list[torch.Tensor], **options: Any) -> Any:
    """A store of parameters under masks (all true: not pruned) and their dense weights, all of which are 3."""
    from stretto.optim.state.store import StoredParameter
    from stretto.train.stored_optimizer import NoRanks, build_store, sgd_update

    indices = [index.FullIndex(len(m)) if m.all() else make_index(pack(m), len(m)) for m in masks]
    parameters = [StoredParameter(str(n), torch.Size((made.count,)), (), 1, 0.0) for n, made in enumerate(indices)]
    store = build_store(
        parameters, sgd_update(), torch.bfloat16, StateOptions(**{"location": "device"} | options),
        torch.device("cpu"), NoRanks(), indices=indices,
    )  # fmt: skip
    dense = [torch.zeros(len(mask), dtype=torch.bfloat16) for mask in masks]
    assert isinstance(store.weights, SparseWeights)
    for number, made in enumerate(indices):
        store.weights.attach(number, dense[number])
        store.set_weight(number, torch.full((made.count,), 3.0))
    store.prepare()
    return store, dense


def test_a_pruned_parameter_without_a_gradient_keeps_its_weights() -> None:
    """Its bucket is updated, in a buffer that holds other numbers where the parameter's own would be."""
    mask = torch.arange(20) % 2 == 0
    store, dense = build([mask, mask], bucket_size=128)
    store.add(0, torch.full((20,), 2.0))
    store.finish()
    store.step(0.5)
    assert torch.equal(dense[0], torch.where(mask, 2.0, 0.0).bfloat16())
    assert torch.equal(dense[1], torch.where(mask, 3.0, 0.0).bfloat16())


def run_steps(masks: list[torch.Tensor], absent: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Gradients and weights after two steps of two micro-batches; `absent` has a gradient in the second step alone, and
    parameter 1 has two parts."""
    generator = torch.Generator().manual_seed(len(masks))
    store, dense = build(masks, **options)
    found = []
    for step in range(2):
        for _ in range(2):
            for number in reversed(range(len(masks))):
                for _ in range(1 + (number == 1)):
                    if number != absent or step:
                        store.add(number, torch.randn(len(masks[number]), generator=generator).bfloat16())
            store.weights.flush()
        store.finish()
        found.append(store.gradients.clone())
        store.step(0.5)
        found += [each.clone() for each in dense]
    return found


def check_many() -> None:
    """Launches of many parameters, beside torch's operators: in whole buckets and in cut ones."""
    masks = [mask for mask in draw_masks(seed=8) if len(mask) in (7, 1025, 1500)]
    masks.insert(2, torch.zeros(1025, dtype=torch.bool))
    cases: list[tuple[int, dict[str, Any]]] = [
        (1, {"bucket_size": 512, "accumulates_fp32": True, "splits_weights": False}),
        (4, {"bucket_size": 1 << 12, "location": "host", "step_on": "device"}),  # reads weights, which are split
    ]
    with mock.patch.object(weights, "MAX_KEPT", 4000):
        for absent, options in cases:
            expected = run_steps(masks, absent, options)
            with mock.patch.object(index, "runs_kernels", return_value=True):
                found = run_steps(masks, absent, options)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_one_launch_for_many_parameters_does_what_one_for_each_does(interpret: Any) -> None:
    interpret(1, check_many)


def count_launches(parameters: int) -> list[str]:
    """The launches of a step of so many parameters, of two micro-batches."""
    from stretto.optim.sparse import kernels

    masks = [torch.arange(128) % 2 == 0] * parameters + [torch.ones(128) > 0]
    launched: list[str] = []
    with (
        mock.patch.object(index, "runs_kernels", return_value=True),
        mock.patch.object(kernels, "launch_cached", lambda kernel, *_, **__: launched.append(kernel.__name__)),
    ):
        store, _ = build(masks, bucket_size=1 << 14)
        launched.clear()
        for _ in range(2):
            for number in range(len(masks)):
                store.add(number, torch.zeros(128, dtype=torch.bfloat16))
            store.weights.flush()
        store.finish()
        store.step(0.5)
    return launched


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton for this platform")
def test_a_steps_launches_do_not_grow_with_its_parameters() -> None:
    found = [count_launches(parameters) for parameters in (1, 30)]
    assert found[0] == found[1] == ["_note_addresses", "_compress"] * 2 + ["_expand"] * 2


def test_a_bitmap_takes_an_eighth_of_a_byte_a_number() -> None:
    size = 1 << 20
    made = make_index(pack(torch.rand(size) < 0.1), size)
    assert made.num_bytes == size // 8 + 4 * size // 1024
    assert make_index(pack(torch.arange(size) % 10 == 0), size, "int32").num_bytes == 4 * -(-size // 10)


def test_positions_beyond_int32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2,147,483,649 numbers, but index='int32' takes at most 2\^31.*bitmap"):
        index.PositionIndex(torch.empty(0, dtype=torch.uint8), (1 << 31) + 1)
    with pytest.raises(ValueError, match="index is 'coo', but must be one of bitmap, int32"):
        make_index(torch.empty(0, dtype=torch.uint8), 0, "coo")  # type: ignore[arg-type]


def test_prefix_sums_are_int64_where_int32_might_overflow() -> None:
    with mock.patch.object(index, "MAX_POSITIONS", 4096):
        assert make_index(pack(torch.ones(8192)), 8192).prefix.dtype == torch.int64


def test_packing_is_undone_by_unpacking() -> None:
    for mask in draw_masks(seed=7):
        assert torch.equal(unpack(pack(mask), len(mask)), mask)
    assert pack(torch.tensor([1, 0, 0, 1, 0, 0, 0, 0, 1]) != 0).tolist() == [0b1001, 1]
    assert torch.equal(WeightMask.of(torch.tensor([[0, 3], [-1, 0]])).unpacked(), torch.tensor([[0, 1], [1, 0]]) != 0)


def test_the_largest_magnitudes_are_left_and_of_equal_ones_the_first() -> None:
    weight = torch.tensor([[1.0, -3.0, 0.0], [3.0, 2.0, -2.0]])
    assert select_largest(weight, 0).sum() == 0
    assert select_largest(weight, 1).nonzero().tolist() == [[0, 1]]
    assert select_largest(weight, 3).nonzero().tolist() == [[0, 1], [1, 0], [1, 1]]
    assert select_largest(weight, 6).all()
    assert select_above(weight, 2.0, ties=1).nonzero().tolist() == [[0, 1], [1, 0], [1, 1]]
    assert [count_left(10, sparsity) for sparsity in (0, 0.9, 0.95, 0.99)] == [10, 1, 0, 0]


@pytest.mark.parametrize("sparsity", [-0.1, 1, 1.5, float("nan"), True, "0.9", None])
def test_a_sparsity_outside_of_its_range_is_refused(sparsity: Any) -> None:
    with pytest.raises(ValueError, match=r"must be at least 0 and less than 1; 0.\d would do"):
        StateOptions("device", sparsity=sparsity)


def test_sparsity_needs_separate_state() -> None:
    with pytest.raises(ValueError, match="location is 'fp32'; 'device' or 'host' would do"):
        StateOptions(sparsity=0.5)


def test_early_bird_counts_the_numbers_that_masks_differ_in() -> None:
    def drawn(*left: int) -> Masks:
        return Masks({"w": WeightMask.of(torch.isin(torch.arange(10), torch.tensor(left)))}, 0.8)

    early_bird = EarlyBird(window=3)
    assert early_bird.distances(drawn(0, 1)) == []
    assert early_bird.distances(drawn(0, 2)) == [{"w": 2}]
    assert early_bird.distances(drawn(0, 2)) == [{"w": 2}, {"w": 0}]
    assert early_bird.distances(drawn(3, 4)) == [{"w": 4}, {"w": 4}]
    for options, message in (({"window": 1}, "at least 2 masks"), ({"tolerance": 1.0}, "less than 1; 0.1 would do")):
        with pytest.raises(ValueError, match=message):
            EarlyBird(**options)
