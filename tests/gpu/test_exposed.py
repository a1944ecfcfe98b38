# SPDX-License-Identifier: Apache-2.0
"""Tests of what a step of a Llama exposes over z, from a trace, and of the memory of gathered weights and gradients."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from stretto.memory import allocated_bytes
from stretto.memory.copy_engine import have_copy_engines
from stretto.optim import AdamW
from stretto.parallel import Grid, clip_scale, gradient_norm, parallelize
from stretto.parallel.comm.counting import axes_of_groups
from stretto.report import read_timeline
from stretto.train.observe.timeline import STEP_MARK, merge, subtract, total
from tests.gpu.sharing import GpuRanks

pytestmark = [
    pytest.mark.alone,
    pytest.mark.ranks(2, own=(2, 4)),
    pytest.mark.own_gpus("it measures what hides under computation, and copy engines need NVLink"),
]
LAYERS, HIDDEN, INNER, VOCAB = 8, 4096, 14336, 32000
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB, "num_hidden_layers": LAYERS}
SEQUENCES, LENGTH, TRACED = 4, 4096, 3
LARGEST = INNER * HIDDEN  # numbers of the largest linear


def train(reshard: str, file: Path, sizes: dict[str, int], length: int) -> dict[str, Any]:
    """Train a few steps, and trace the last ones on rank 0. Returns the bytes of a step's peak, of symmetric memory,
    and of the layers' weights in the compute dtype; and whether copy engines send."""
    from transformers import LlamaConfig, LlamaForCausalLM

    gc.collect()
    grid = Grid(z=dist.get_world_size())
    is_cuda = grid.device.type == "cuda"
    before = allocated_bytes(grid.device)
    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=length, **sizes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = parallelize(model, grid, dtype=torch.bfloat16, reduce_dtype=torch.float32, reshard=reshard)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, length), device=grid.device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step(scale=clip_scale(gradient_norm(model.parameters(), grid), 1.0))
        optimizer.zero_grad()

    def wait() -> None:
        if is_cuda:
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    wait()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    step()
    shared = allocated_bytes(grid.device) - before
    peak = shared + (torch.cuda.max_memory_allocated() if is_cuda else 0)
    wait()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) if grid.coordinate("z") == 0 else record_function("not traced") as profiler:
        for number in range(TRACED):
            with record_function(STEP_MARK + str(number + 1)):
                step()
                if number == TRACED - 1:
                    wait()
    if isinstance(profiler, profile):
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
        trace["stretto"] = {"groups": axes_of_groups(grid), "rank": 0, "grid": dict(grid.sizes)}
        file.write_text(json.dumps(trace))
    layers = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name) * 2
    by_copies = have_copy_engines(grid.communicator("z"), grid.device)
    return {"peak": peak, "shared": shared, "layers": layers, "by_copies": by_copies}


@pytest.fixture(scope="module")
def runs(gpu_pool: GpuRanks, tmp_path_factory: pytest.TempPathFactory, world: int) -> dict[str, Any]:
    """By reshard policy: what `train` returns on rank 0, and its trace's file."""
    found = {}
    for reshard in ("after_forward", "after_backward"):
        file = tmp_path_factory.mktemp("trace") / f"{reshard}.json"
        found[reshard] = gpu_pool.run(world, train, reshard, file, SIZES, LENGTH, timeout=200)[0] | {"file": file}
        if not found[reshard]["by_copies"]:
            pytest.skip("NVLink does not connect these GPUs: copy engines do not send")
    return found


def test_less_than_2_percent_of_a_step_is_exposed_or_idle(runs: dict[str, Any]) -> None:
    """Beside the kernels that sum gradients, which the timeline counts as communication: they wait for other ranks."""
    timeline = read_timeline(runs["after_backward"]["file"])
    assert len(timeline.steps) == TRACED
    exposed = merge(part for axis in timeline.communication for part in timeline.exposed(axis))
    sums = merge((span.start, span.end) for span in timeline.spans if span.name == "sum_parts")
    assert sums
    assert total(sums) / TRACED / timeline.step_time < 0.025, timeline.summary()
    alone = total(subtract(exposed, sums)) / TRACED
    assert (alone + timeline.idle) / timeline.step_time < 0.02, timeline.summary()


def test_no_pass_over_gradients_averages_them(runs: dict[str, Any]) -> None:
    for run in runs.values():
        events = json.loads(run["file"].read_text())["traceEvents"]
        assert not [event for event in events if event["name"] == "aten::_foreach_mul_"]


def test_weights_that_are_freed_free_the_memory_of_all_layers_but_two(runs: dict[str, Any]) -> None:
    kept, freed = runs["after_backward"], runs["after_forward"]
    assert kept["peak"] - freed["peak"] > kept["layers"] * (LAYERS - 2) / LAYERS


def test_gradients_on_their_way_take_three_of_the_largest(runs: dict[str, Any], world: int) -> None:
    shared = runs["after_forward"]["shared"]
    assert 0 < shared < 3 * LARGEST * 4 * (world - 1) / world + 2**20
