# SPDX-License-Identifier: Apache-2.0
"""On a GPU: kernels of pruned weights, pruned training beside dense training under the mask, and the memory of it."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from stretto.bench.harness import empty_memory
from stretto.execution import StateOptions
from stretto.models import GPT, GPTConfig
from stretto.optim.sparse import make_index
from stretto.optim.sparse.index import make_table
from stretto.optim.sparse.masks import pack
from stretto.parallel import CapturedStep, Grid, no_sync, parallelize
from stretto.train.pruning import prune
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update
from tests.differences import largest
from tests.gpu.sharing import SHARED

ONE_RANK = pytest.mark.ranks(1, own=(1,), among=(1,))
CONFIG = GPTConfig(layers=2, hidden=256, heads=8, vocab=512, max_seq_len=64)
SAMPLES = 16


def check_kernels() -> None:
    """Beside indexing by the mask: random and odd masks, whole and in parts, in both sizes of a number.

    Few kinds of sizes: Triton compiles kernels for each.
    """
    generator = torch.Generator("cuda").manual_seed(1)
    masks = [torch.rand(size, generator=generator, device="cuda") < 0.1 for size in (1025, 5_000_003)]
    masks.append(torch.rand(300_001, generator=generator, device="cuda") < 0.5)  # rows of every kind
    masks += [torch.zeros(5000, device="cuda") > 0, torch.ones(5000, device="cuda") > 0]
    masks.append(torch.rand(1 << 20, generator=generator, device="cuda") < 0.2)
    for number, mask in enumerate(masks):
        dtype = torch.float32 if number == len(masks) - 1 else torch.bfloat16
        dense = torch.randn(len(mask), generator=generator, device="cuda").to(dtype)
        left = dense[mask]
        for kind in ("bitmap", "int32"):
            index = make_index(pack(mask), len(mask), kind)  # type: ignore[arg-type]
            assert index.count == len(left)
            assert torch.equal(index.compress(dense, torch.empty_like(left)), left)
            assert torch.equal(index.compress(dense, left.clone(), adds=True), left + left)
            expected = torch.where(mask, dense, 0)
            assert torch.equal(index.fill(left, torch.full_like(dense, 7)), expected)
            in_place, third = torch.zeros_like(dense), index.count // 3
            for first, last in ((0, third), (third, 2 * third + 1), (2 * third + 1, index.count)):
                last = min(last, index.count)
                first = min(first, last)
                part = index.compress(dense, left.new_empty(last - first), first=first, last=last)
                index.expand(part, in_place, first=first, last=last)
            assert torch.equal(in_place, expected)
            skip = torch.ones(1, dtype=torch.int32, device="cuda")
            assert torch.equal(index.expand(left + 1, in_place.clone(), skip=skip), expected)
    check_many(masks[:4] * 12)


def check_many(masks: list[torch.Tensor]) -> None:
    """Many tensors in one launch, in whole and in parts, with one that is absent; and the number of launches."""
    dense = [torch.randn(len(mask), device="cuda").bfloat16() for mask in masks]
    left = torch.cat([each[mask] for each, mask in zip(dense, masks, strict=True)])
    indices = [make_index(pack(mask), len(mask)) for mask in masks]
    firsts = [0, *accumulate(index.count for index in indices)]
    written = [torch.zeros_like(each) for each in dense]
    table = make_table(indices, firsts[:-1], written)
    assert table is not None
    found = torch.zeros_like(left)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        table.compress(dict(enumerate(dense)), found, adds=False)
        torch.cuda.synchronize()
    launches = {event.key: event.count for event in profiler.key_averages() if event.key in ("_compress", "_expand")}
    assert launches == {"_compress": 2}  # 48 tensors, whose addresses come 32 at a time
    assert torch.equal(found, left)
    table.compress({1: dense[1], 5: dense[5]}, found, adds=True)
    for number in range(len(masks)):
        part = slice(firsts[number], firsts[number + 1])
        assert torch.equal(found[part], left[part] * (2 if number in (1, 5) else 1))
    third = table.stop // 3
    table.leave_out({2})
    for first, last in ((0, third), (third, 2 * third), (2 * third, table.stop)):
        table.expand(left[first:last], first, last)
    for number, (each, mask) in enumerate(zip(dense, masks, strict=True)):
        assert torch.equal(written[number], torch.where(mask, each, 0) * (number != 2)), number
    again = torch.zeros_like(left)
    table.read(again, 0, table.stop)
    assert torch.equal(
        torch.cat((again[: firsts[2]], again[firsts[3] :])), torch.cat((left[: firsts[2]], left[firsts[3] :]))
    )


@ONE_RANK
def test_the_kernels_are_indexing_by_the_mask(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(world, check_kernels)


def check_many_numbers() -> None:
    """More than 2^31 numbers, of which some are left at both ends: places need 64 bits."""
    size = (1 << 31) + 5000
    mask = torch.zeros(size, dtype=torch.bool, device="cuda")
    mask[::1000] = True
    mask[-3:] = True
    bits = pack(mask)
    index = make_index(bits, size)
    dense = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    dense[::1000] = 3
    dense[-3:] = 5
    left = index.compress(dense, dense.new_empty(index.count))
    assert left[-3:].tolist() == [5, 5, 5]
    assert float(left.float().mean()) == pytest.approx(3, rel=1e-3)
    assert torch.equal(index.fill(left, torch.ones_like(dense)), dense)
    with pytest.raises(ValueError, match="index='bitmap' would do"):
        make_index(bits, size, "int32")


@pytest.mark.exhaustive
@ONE_RANK
def test_places_beyond_32_bits(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(world, check_many_numbers)


def train(sizes: dict[str, int], options: StateOptions, *, is_pruned: bool, is_captured: bool = False) -> Any:
    """Losses, fp32 weights and first moments of three steps; gradients of the dense run are masked."""
    grid = Grid(**sizes)
    torch.manual_seed(0)
    model = parallelize(GPT(CONFIG), grid, dtype=torch.bfloat16)
    masks = prune(model, 0.9)
    assert masks is not None
    make = adamw_update(betas=(0.9, 0.95), eps=1e-8)
    optimizer = StoredOptimizer(
        model, grid, make, name="adamw", weight_decay=0.1, options=options, masks=masks if is_pruned else None
    )
    part, parts = grid.coordinate("batch"), grid.size("batch")
    generator = torch.Generator().manual_seed(3)

    def step(tokens: torch.Tensor, lr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), device="cuda")
        for number, micro_batch in enumerate(tokens.chunk(2)):
            with nullcontext() if number == 1 else no_sync(model):
                loss = model(micro_batch, micro_batch, SAMPLES * CONFIG.max_seq_len)
                loss.backward()
            total += loss.detach()
        if not is_pruned:
            mask_gradients()
        return total, optimizer.step(lr)

    def mask_gradients() -> None:
        store = optimizer.store
        for reduction in store._step.started.values():
            reduction.wait()
        for number, name in enumerate(optimizer.parameters):
            if name in masks.masks:
                place = store.layout.places[number]
                store.gradients[place.start : place.stop] *= masks.masks[name].unpacked().flatten()

    run = CapturedStep(step) if is_captured else step
    losses = []
    for _ in range(3 + 2 * is_captured):
        tokens = torch.randint(CONFIG.vocab, (SAMPLES, CONFIG.max_seq_len), generator=generator).cuda()
        with sdpa_kernel(SDPBackend.MATH):  # others' gradients have other bits in each run
            loss, _ = run(tokens.chunk(parts)[part], torch.tensor(1e-3, device="cuda"))
        losses.append(float(loss))
    found = {name: optimizer.weight(name).detach().cpu().clone() for name in optimizer.parameters}
    found |= {f"{name}.m": optimizer.read_later(name, "exp_avg")().cpu().clone() for name in optimizer.parameters}
    if isinstance(run, CapturedStep):
        run.close()
    return losses, found


def compare(sizes: dict[str, int]) -> dict[str, float]:
    losses, expected = train(sizes, StateOptions("device"), is_pruned=False)
    found = {}
    variants = {
        "bitmap": StateOptions("device"),
        "int32": StateOptions("device", index="int32"),
        "host": StateOptions("host", bucket_size=1 << 14, buffer_sets=2),
        "whole on host": StateOptions("host", bucket_size=1 << 14, splits_weights=False),
    }
    for name, options in variants.items():
        others, weights = train(sizes, options, is_pruned=True)
        assert others == pytest.approx(losses, rel=1e-3)
        found[name] = largest(float((weights[key] - expected[key]).abs().max()) for key in expected)
    return found


@pytest.mark.ranks(1, 4, own=(1, 2, 4), among=(1, *SHARED))
def test_pruned_training_is_dense_training_under_the_mask(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    """In bits where at most two ranks are summed."""
    sizes = {"data": 2, "z": 2} if world == 4 else {"data": world}
    for found in run_ranks(world, compare, sizes):
        assert largest(found.values()) <= (0.0 if world <= 2 else 3e-3), found


def compare_over_z(world: int) -> dict[str, float]:
    return compare({"z": world})


@pytest.mark.ranks(2, own=(2,), among=SHARED)
def test_what_is_left_goes_over_z(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(world, compare_over_z, world):
        assert largest(found.values()) <= (0.0 if world == 2 else 3e-3), found


def check_captured() -> None:
    expected, _ = train({}, StateOptions("device"), is_pruned=True)
    captured, _ = train({}, StateOptions("device"), is_pruned=True, is_captured=True)
    assert captured[:3] == pytest.approx(expected, rel=1e-6)
    assert captured[-1] < captured[0]


@ONE_RANK
def test_a_graph_replays_pruned_steps(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(world, check_captured)


def measure_state() -> dict[str, tuple[float, float]]:
    """Bytes of all state of a parameter, and what the formulas say; of a GPT of 0.2 billion parameters."""
    grid, found = Grid(), {}
    config = GPTConfig(layers=4, hidden=2048, heads=16, vocab=512, max_seq_len=64, bias=False)
    tokens = torch.randint(512, (1, 64), device="cuda")
    product = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (product @ product).sum().backward()  # cuBLAS keeps 32 MiB for each thread that multiplies: no state
    del product
    for sparsity, index in ((0.0, "bitmap"), (0.5, "bitmap"), (0.9, "bitmap"), (0.9, "int32")):
        empty_memory()
        before = torch.cuda.memory_allocated()
        with torch.device("meta"):
            model = GPT(config)
        parallelize(model, grid, dtype=torch.bfloat16)
        options = StateOptions("device", bucket_size=1 << 20, index=index)  # type: ignore[arg-type]
        make = adamw_update(betas=(0.9, 0.95), eps=1e-8)
        masks = prune(model, sparsity) if sparsity else None
        optimizer = StoredOptimizer(model, grid, make, name="adamw", options=options, masks=masks)
        del masks
        model(tokens, tokens, 64).backward()
        optimizer.step(1e-3)
        torch.cuda.synchronize()
        phi = sum(parameter.numel() for parameter in model.parameters())
        pruned = 0 if optimizer.masks is None else sum(each.shape.numel() for each in optimizer.masks.masks.values())
        left = 1 - sparsity
        of_index = 0.129 if index == "bitmap" else 4 * left
        expected = (16 * (phi - pruned) + (14 * left + 2 + of_index) * pruned) / phi
        found[f"{sparsity}, {index}"] = (torch.cuda.memory_allocated() - before) / phi, expected
        del model, optimizer
    return found


@pytest.mark.alone
@ONE_RANK
def test_state_takes_what_the_formula_says(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    """14 f phi + 2 phi + 0.13 phi: 3.53 bytes a pruned parameter at 90%."""
    for of_rank in run_ranks(world, measure_state):
        print(of_rank)
        for case, (found, expected) in of_rank.items():
            assert found == pytest.approx(expected, rel=0.02), case


def check_replicas() -> str:
    """Ranks of data with masks of their own are told, before anything is allocated."""
    model = parallelize(GPT(CONFIG), Grid(data=dist.get_world_size()), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    name = "blocks.0.mlp.up.weight"
    mask = torch.rand(model.get_parameter(name).shape, generator=generator) < 0.5
    masks = prune(model, None, {name: mask})
    try:
        StoredOptimizer(model, Grid(data=dist.get_world_size()), adamw_update(betas=(0.9, 0.95), eps=1e-8),
                        name="adamw", masks=masks)  # fmt: skip
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.ranks(2, own=(2,), among=(2,))
def test_masks_that_differ_between_replicas_are_refused(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    for message in run_ranks(world, check_replicas):
        assert "masks of blocks.0.mlp.up.weight differ between ranks" in message
