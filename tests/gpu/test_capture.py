# SPDX-License-Identifier: Apache-2.0
"""Captured steps whose collectives are NCCL's, in memory that NCCL cannot register."""

import gc
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory import cuda
from stretto.memory.cuda import CudaMemory, allocated_bytes
from stretto.models import GPT, GPTConfig
from stretto.optim import AdamW
from stretto.parallel import CapturedStep, Grid, clip_scale, gradient_norm, parallelize
from stretto.parallel.capture import REGISTERS
from stretto.parallel.state import require_state

pytestmark = pytest.mark.ranks(2, own=(2, 4))


def exchange(taken: Tensor, given: Tensor) -> tuple[Tensor, ...]:
    dist.all_to_all_single(taken, given)
    return (taken,)


def capture_where_segments_grow() -> None:
    world = dist.get_world_size()
    device = Grid(data=world, device="cuda").device
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    before = os.environ.pop(REGISTERS, None)
    try:
        given = torch.ones(32 << 20, dtype=torch.bfloat16, device=device)
        taken = torch.empty_like(given)
        step = CapturedStep(partial(exchange, taken, given))
        for _ in range(3):
            step()
        with pytest.raises(RuntimeError, match="set NCCL_GRAPH_REGISTER=0 before the job starts"):
            step()
        step.close()
        del step, given, taken
    finally:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        if before is not None:
            os.environ[REGISTERS] = before


@pytest.mark.own_gpus("NCCL registers memory for its peers")
def test_a_graph_whose_replays_would_hang_is_not_captured(run_ranks: Callable[..., list[Any]], world: int) -> None:
    run_ranks(world, capture_where_segments_grow)


def train_captured(*, axis: str, writes_copies: bool, shards_sequence: bool) -> list[float]:
    """Losses of steps as a graph's replays, between which the weights are changed by hand, and of a last plain pass."""
    world = dist.get_world_size()
    grid = Grid(**{axis: world}, device="cuda")
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, hidden=256, heads=4, vocab=512, max_seq_len=64))
    model = parallelize(model, grid, dtype=torch.bfloat16, shard_sequence=shards_sequence)
    optimizer = AdamW(model.parameters(), lr=1e-2, writes_copies=writes_copies)
    tokens = torch.arange(128, device=grid.device).view(2, 64) % 509

    def train() -> tuple[Tensor, ...]:
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.detach(),)

    step, losses = CapturedStep(train), []
    for number in range(9):
        losses.append(step()[0])
        if number == 6:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    with torch.no_grad():
        losses.append(model(tokens, tokens))
    copies = [weight.low_precision_weight for weight in model.parameters() if weight.low_precision_weight is not None]
    assert len(copies) > 0
    if axis == "x":  # over z copies are where weights are sent from
        assert all((copy._kept is not None) == writes_copies for copy in copies)
    results = [float(loss) for loss in losses]
    step.close()
    return results


def compare_copies() -> None:
    for axis, shards_sequence in (("x", False), ("x", True), ("z", False)):
        plain, written = (
            train_captured(axis=axis, writes_copies=writes, shards_sequence=shards_sequence) for writes in (False, True)
        )
        assert written == plain


def compare_blocks() -> None:
    """Losses of steps of a model that is sharded by blocks: captured, and not."""
    from tests.parallel import hugging_face

    grid = Grid(z=dist.get_world_size(), device="cuda")
    tokens = torch.arange(128, device=grid.device).view(2, 64) * 7 % 61

    def run(captures: bool) -> list[float]:
        torch.manual_seed(0)
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        model = hugging_face.causal_lm("gpt2", max_position_embeddings=64, **dropouts).train()
        model = parallelize(model, grid, dtype=torch.bfloat16)
        assert require_state(model, "this test").block_shards  # gathered whole
        optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2, device=grid.device))

        def train(tokens: Tensor) -> tuple[Tensor, ...]:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step(scale=clip_scale(gradient_norm(model.parameters(), grid), 1.0))
            optimizer.zero_grad()
            return (loss.detach(),)

        step = CapturedStep(train) if captures else train
        found = [float(step(tokens)[0]) for _ in range(8)]
        if isinstance(step, CapturedStep):
            step.close()
        return found

    plain, captured = run(False), run(True)
    assert captured == plain
    assert plain[-1] < plain[0]


@pytest.mark.own_gpus("the graph holds NCCL's collectives")
def test_a_captured_step_of_blocks_is_a_plain_one(run_ranks: Callable[..., list[Any]], world: int) -> None:
    run_ranks(world, compare_blocks)


def free_while_capturing() -> None:
    """Symmetric memory in a cycle, as workspaces of groups that are gone are, which a capture's garbage is."""
    world = dist.get_world_size()
    device = Grid(data=world, device="cuda").device
    x = torch.ones(4, device=device)
    held = allocated_bytes(device)
    memory: Any = CudaMemory.allocate(1 << 20, 1, None, 60.0)
    memory.itself = memory
    memory.buffer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x + 1
        del memory
        gc.collect()
    graph.replay()
    assert y.eq(2).all()
    assert len(cuda._postponed) == 1
    CudaMemory.allocate(1 << 20, 1, None, 60.0).close()
    assert not cuda._postponed
    assert allocated_bytes(device) == held


def test_memory_that_dies_while_a_graph_is_captured_is_freed_after_it(
    run_ranks: Callable[..., list[Any]], world: int
) -> None:
    run_ranks(world, free_while_capturing)


@pytest.mark.own_gpus("the graph holds NCCL's collectives")
def test_weights_that_the_optimizer_casts_are_those_that_a_forward_pass_would(
    run_ranks: Callable[..., list[Any]], world: int
) -> None:
    run_ranks(world, compare_copies)


def replay_after_workspaces_were_freed() -> None:
    """Steps of products that need cuBLAS's workspaces, forward and backward, as Inductor's own graphs leave them."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    layer = torch.nn.Linear(16384, 64, device=device, dtype=torch.bfloat16)  # few columns and a long sum: split over it
    given = torch.randn(8, 16384, device=device, dtype=torch.bfloat16)

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        layer.zero_grad()
        y = layer(x)
        y.float().square().sum().backward()
        assert layer.weight.grad is not None
        return y.detach(), layer.weight.grad

    step = CapturedStep(compute)
    results = [[one.clone() for one in step(given)] for _ in range(5)]
    torch._C._cuda_clearCublasWorkspaces()
    others = [torch.zeros(1 << 20, dtype=torch.int32, device=device) for _ in range(64)]  # take what was freed
    torch.cuda.synchronize()
    results.append([one.clone() for one in step(given)])
    torch.cuda.synchronize()
    assert not any(one.any().item() for one in others)
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))
    del others
    torch.cuda.empty_cache()
    step(given)
    torch.cuda.synchronize()
    step.close()


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_replays_use_workspaces_of_their_own(run_ranks: Callable[..., list[Any]], world: int) -> None:
    run_ranks(world, replay_after_workspaces_were_freed)
