# SPDX-License-Identifier: Apache-2.0
"""The documented example, all-gather + GEMM, on real processes."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.tiles import example
from tests.tiles.channels import random_of

from stretto import tiles

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 5e-3}

SHAPES = [(40, 48, 40), (16, 32, 32), (33, 40, 24)]  # rows of a rank, n, k


def multiply_gathered(shapes, dtype, calls):
    """All-gather + GEMM, call after call with one channel; the largest error of any call, relative."""
    rank, world = dist.get_rank(), dist.get_world_size()
    worst = 0.0
    with tiles.BlockChannel.allocate(channels=2 * world, data_bytes=1 << 18, backend="host") as channel:
        for call in range(calls):
            rows, n, k = shapes[call % len(shapes)]
            shards = [random_of(peer, rows, k, dtype=dtype, seed=call) for peer in range(world)]
            weight = random_of(world + rank, n, k, dtype=dtype, seed=call)
            gathered = channel.tensor((rows * world, k), dtype)
            out = torch.full((rows * world, n), float("nan"), dtype=dtype)
            example.launch(channel, shards[rank], gathered, weight, out)
            expected = torch.cat(shards).double() @ weight.double().T
            worst = largest(worst, ((out.double() - expected).abs().max() / expected.abs().max()).item())
    return worst


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_multiplies_what_it_gathers(interpret, ranks, dtype):
    errors = interpret(ranks, multiply_gathered, SHAPES, dtype, 3)
    assert largest(errors) < TOLERANCES[dtype], errors


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["all_gather_gemm", "all_to_all_gemm"])
def test_it_runs_as_a_user_runs_it(name, tmp_path):
    file = example.ROOT / "examples" / f"{name}.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", tmp_path, file]  # torchrun leaves its own behind
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    errors = re.findall(r"relative error (\d\.\de[+-]\d\d)", ran.stdout)
    assert len(errors) == 2, ran.stderr[-3000:]
    assert largest(map(float, errors)) < 1e-6


@pytest.mark.parametrize("name", ["all_gather_gemm", "all_to_all_gemm"])
def test_the_docs_link_to_it_and_it_is_under_60_lines(name):
    code = example.read_code(name)
    assert f"(../examples/{name}.py)" in (example.ROOT / "docs" / "tiles.md").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) < 60
