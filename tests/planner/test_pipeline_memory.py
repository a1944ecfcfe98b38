# SPDX-License-Identifier: Apache-2.0
"""Predicted memory of pipeline stages beside what real ranks hold."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from tests.peak_memory import PeakMemory

from stretto.cluster import GPU, Cluster, FlopRates, NodeLink
from stretto.execution import ExecutionOptions, StageOptions
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, parallelize
from stretto.parallel.pipeline.gloo_transport import GlooTransport
from stretto.planner import predict

SMALL = GPTConfig(layers=8, hidden=128, heads=4, vocab=512, max_seq_len=64)
MACHINE = Cluster(
    name="made up",
    nodes=1,
    gpus_per_node=8,
    gpu=GPU(name="made up", memory=80e9, memory_bandwidth=2e12, peak_flops=FlopRates(bf16=400e12, fp32=100e12)),
    in_node=NodeLink(bandwidth=50e9),
)
ELEMENTS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def peak_of_a_pipeline(
    sizes: dict[str, int],
    cuts: tuple[int, ...],
    micro_batch: int,
    dtype: torch.dtype,
    schedule: dict[str, Any],
    options: dict[str, Any],
) -> int:
    """Bytes at the peak of this rank's second step, weights and optimizer state included."""
    grid = Grid(**sizes)
    with torch.device("meta"):
        model: Any = GPT(SMALL)
    virtual = (len(cuts) + 1) // grid.size("pipe")
    placement: Any = "v" if schedule["schedule"] in ("zb-v", "dualpipe-v") else "loops"
    stages = StageOptions(virtual_stages=virtual, placement=placement, cuts=cuts)
    model = parallelize(model, grid, dtype=dtype, stages=stages, **options)
    parameters = list(model.parameters())
    shards = [torch.nn.Parameter(parameter.to_local().detach()) for parameter in parameters]
    optimizer = torch.optim.AdamW(shards, foreach=False)
    rows = torch.randint(SMALL.vocab, (16, 65), generator=torch.Generator().manual_seed(0))
    mine = rows.chunk(grid.size("batch"))[grid.coordinate("batch")]
    # Rings of slots in memory that CPU ranks share would count as this rank's.
    transport = GlooTransport(grid.group("pipe"), grid.device)
    with Pipeline(model, grid, micro_batch_size=micro_batch, transport=transport, **schedule) as pipeline:

        def step() -> None:
            pipeline.step(tokens=mine[:, :-1], targets=mine[:, 1:])
            for shard, parameter in zip(shards, parameters, strict=True):
                shard.grad, parameter.grad = parameter.grad.to_local(), None
            optimizer.step()
            optimizer.zero_grad()

        step()
        with PeakMemory() as seen:
            for tensor in (*shards, *(value for state in optimizer.state.values() for value in state.values())):
                seen.note(tensor)
            step()
    return seen.peak


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("grid", "micro_batch", "schedule", "options"),
    [
        ({"pipe": 4}, 2, {"schedule": "1f1b"}, {}),
        ({"pipe": 4}, 1, {"schedule": "gpipe"}, {}),
        ({"pipe": 4}, 1, {"schedule": "1f1b", "extra_warm_up": 3}, {"recompute": "full"}),
        ({"pipe": 2}, 2, {"schedule": "interleaved"}, {}),
        ({"pipe": 2}, 2, {"schedule": "zb-v"}, {}),
        ({"pipe": 2, "z": 2}, 2, {"schedule": "1f1b"}, {}),
        ({"pipe": 2, "z": 2}, 2, {"schedule": "1f1b"}, {"reshard": "after_forward"}),
        ({"pipe": 2, "x": 2}, 4, {"schedule": "message-driven", "limit": 3}, {}),
        ({"pipe": 4}, 2, {"schedule": "zb-h1"}, {"recompute": "every:2"}),
        ({"pipe": 4}, 2, {"schedule": "zb-h1"}, {}),
    ],
    ids=str,
)
def test_peak_memory_of_stages_is_within_5_percent_of_what_real_ranks_hold(ranks, grid, micro_batch, schedule, options):
    # With one rank of z, weights would be cast for each micro-batch.
    dtype: Any = "bf16" if "z" in grid else "fp32"
    asked = {**schedule, "options": ExecutionOptions(**options), "dtype": dtype}
    expected = predict(SMALL, MACHINE, grid=grid, batch=16, seq_len=64, micro_batch=micro_batch, **asked)
    sizes = {"pipe": 1, "data": 1, "x": 1, "y": 1, "z": 1} | grid
    cuts = expected.stages[1:-1]
    seen = ranks(prod(sizes.values())).run(
        peak_of_a_pipeline, sizes, cuts, micro_batch, ELEMENTS[dtype], schedule, options
    )
    assert expected.peak_memory == pytest.approx(max(seen), rel=0.05)


@pytest.mark.parametrize(("pipe", "rings"), [(2, 64), (4, 192), (8, 256)])
def test_messages_use_rings_if_nvlink_connects_all_ranks(pipe, rings):
    """Eight slots of 8 MiB for each other rank, and 256 MiB at most."""
    nvlink = replace(MACHINE, gpu=replace(MACHINE.gpu, name="NVIDIA"), in_node=NodeLink(bandwidth=450e9))
    asked = {"grid": {"pipe": pipe}, "batch": 16, "seq_len": 64, "micro_batch": 2}
    with_nvlink, without = (predict(SMALL, each, **asked).memory["messages"] for each in (nvlink, MACHINE))
    assert with_nvlink - without == rings << 20
