# SPDX-License-Identifier: Apache-2.0
"""An engine on GPUs: replayed graphs give the tokens of eager steps and of transformers, also after a load."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.inference import Engine, WeightChanges, apply_patches
from stretto.memory import shared_gpus
from stretto.parallel import Grid, parallelize
from tests.gpu.test_inference_operators import list_launches
from tests.inference.test_engine import continued, log_probabilities, make, prompts

pytestmark = pytest.mark.ranks(1, own=(1, 2), among=(1, 2))
LENGTHS = (1, 5, 40, 130)
NEW = 12


def decode(family: str, dtype: torch.dtype) -> list[Any]:
    """Tokens of eager steps, of graphs, of drawn ones twice, and after weights were loaded and patched in place."""
    grid = Grid(x=dist.get_world_size(), device="cuda")
    given = prompts(3, LENGTHS)
    model = parallelize(make(family).to(dtype), grid)
    found: list[Any] = [Engine(model, 4, 2048, chunk=64, capture=False).generate(given, NEW)]
    if family == "llama" and dtype == torch.float32 and dist.get_world_size() > 1:
        with Engine(model, 4, 2048, chunk=39, divide_from=16) as divided:  # whole chunks, too, which are captured
            assert [divided.generate(given, NEW) for _ in range(3)] == [found[0]] * 3
    with Engine(model, 4, 2048, chunk=64) as engine:
        found.append(engine.generate(given, NEW))
        # The host waits for events alone, those of the step before the one launched; but in fp32 for experts' offsets.
        if dist.get_world_size() == 1 and family != "qwen3_moe":
            torch.cuda.set_sync_debug_mode("error")
        try:
            found.append(engine.generate(given, NEW))  # by graphs of all sizes
        finally:
            torch.cuda.set_sync_debug_mode("default")
        is_staged = shared_gpus.is_enabled() and dist.get_world_size() > 1
        assert is_staged or engine._runner._graphs, "no step was captured"
        found += [engine.generate(given, NEW, temperature=1.0, top_k=20, top_p=0.9, seed=7) for _ in range(2)]
        alone = engine.submit(given[2], NEW, temperature=1.0, top_k=20, top_p=0.9, seed=9)
        while engine.step():
            pass
        found.append(alone.tokens)
        other = make(family).to(grid.device, dtype)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        engine.load(other)
        found.append(engine.generate(given, NEW))
        if dtype == torch.bfloat16:
            changes = WeightChanges(other)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.mul_(2.0)
            apply_patches(model, _of_all(changes.make_patch()))
            found.append(engine.generate(given, NEW))
    return found


def _of_all(patch: bytes) -> list[bytes]:
    """The patches of all ranks: of a model on no grid, rank 0's alone has anything."""
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, patch)
    return boxes


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("gpt2", "qwen3_moe"))]
)
def test_graphs_give_the_tokens_of_transformers(run_ranks: Callable[..., list[Any]], world: int, family: str) -> None:
    plain = make(family)
    expected = [continued(plain, prompt, NEW) for prompt in prompts(3, LENGTHS)]
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    after = [continued(plain, prompt, NEW) for prompt in prompts(3, LENGTHS)]
    for eager, first, replayed, drawn, again, alone, loaded in run_ranks(world, decode, family, torch.float32):
        assert eager == expected
        assert first == expected
        assert replayed == expected
        assert drawn == again
        assert alone == drawn[2]
        assert loaded == after


def test_a_patch_in_bf16_is_seen_by_graphs(run_ranks: Callable[..., list[Any]], world: int) -> None:
    for _, before, _, _, _, _, loaded, patched in run_ranks(world, decode, "llama", torch.bfloat16):
        assert patched == before != loaded


def decode_whole_chunks(family: str) -> tuple[list[list[int]], list[tuple[int, int, bool]], list[list[float]]]:
    """Texts of a prompt of one chunk, and of one of two chunks, thrice; the sizes that have graphs; and in bf16 the
    log-probabilities of both prompts' first tokens by chunks of 64, whose first one cuDNN attends, and of 128."""
    given = prompts(3, (64, 128))
    with Engine(parallelize(make(family), Grid(device="cuda")), 2, 2048, chunk=64) as engine:
        texts = [engine.generate([prompt], 4)[0] for _ in range(3) for prompt in given]
        sizes = list(engine._runner._graphs)
    logs = []
    for chunk in (64, 128):
        model = make(family, head_dim=64).bfloat16()
        with Engine(parallelize(model, Grid(device="cuda")), 2, 2048, chunk=chunk) as engine:
            requests = [engine.submit(prompt, 1, log_probabilities=True) for prompt in given for _ in range(5)]
            while engine.step():
                pass
            logs.append([request.log_probabilities[0] for request in requests])
    return texts, sizes, logs


@pytest.mark.ranks(1, own=(1,), among=(1,))
def test_a_whole_chunk_of_a_prompt_replays_a_graph(run_ranks: Callable[..., list[Any]], world: int) -> None:
    plain = make("llama")
    expected = [continued(plain, prompt, 4) for prompt in prompts(3, (64, 128))]
    ((texts, sizes, logs),) = run_ranks(world, decode_whole_chunks, "llama")
    assert texts == expected * 3
    assert {(64, 1, True), (64, 1, False)} < {*sizes}
    wide = make("llama", head_dim=64)
    first = [log_probabilities(wide, prompt, continued(wide, prompt, 1))[0].item() for prompt in prompts(3, (64, 128))]
    for found in logs:
        assert found == pytest.approx([each for each in first for _ in range(5)], abs=0.2)


def count_kernels(layers: int, *, invariant: bool) -> int:
    """Kernels and copies of a decoding step, by its graph; of sizes that cuBLAS does not split, nor leaves pad."""
    sizes = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 512} if invariant else {}
    model = make("llama", num_hidden_layers=layers, **sizes).bfloat16()
    model = parallelize(model, Grid(device="cuda"), invariant=invariant)
    with Engine(model, 2, 4096) as engine:
        request = engine.submit(list(range(40)), 20, stop=())
        while len(request.tokens) < 8:
            engine.step()
        assert engine._runner._graphs
        return len(list_launches(engine.step))


@pytest.mark.ranks(1, own=(1,), among=(1,))
@pytest.mark.parametrize("invariant", [False, True])
def test_a_layer_decodes_by_eight_kernels(run_ranks: Callable[..., list[Any]], world: int, invariant: bool) -> None:
    (few,), (many,) = (run_ranks(world, count_kernels, layers, invariant=invariant) for layers in (2, 6))
    assert (many - few) / 4 <= 8
