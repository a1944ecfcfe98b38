# SPDX-License-Identifier: Apache-2.0
"""Operands that every rank can compute, and small configurations of each way to do a call."""

import importlib

import torch
import torch.distributed as dist

from stretto import ops

# As attributes of the package these are the functions.
gather_module = importlib.import_module("stretto.ops.all_gather_matmul")


def random_of(rank, *shape, dtype=torch.float32, seed=0):
    """The same numbers on whichever rank asks for them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def lie(weight, by_columns):
    """The same weight, or one that is the transpose of a contiguous tensor."""
    return weight.t().contiguous().t() if by_columns else weight


def relative_error(result, expected):
    """The largest error, relative to the largest number, if this is not 0."""
    return ((result.double() - expected).abs().max() / (expected.abs().max() or 1)).item()


BLOCKS = ops.Blocks(32, 32, 32, 2, 4, 2, 3)

PLANS = {
    "copies": ops.KernelConfig(blocks=BLOCKS, transfer="copies", piece_bytes=512),
    "pushes": ops.KernelConfig(blocks=BLOCKS, transfer="programs", movers=2, piece_bytes=512),
    "split": ops.KernelConfig(blocks=BLOCKS._replace(k=16, programs=5), transfer="copies", piece_bytes=512),
    "copies, unshifted": ops.KernelConfig(blocks=BLOCKS, transfer="copies", piece_bytes=512, is_shifted=False),
    "packets": ops.KernelConfig(blocks=BLOCKS, exchange="packets"),
    "one shot": ops.KernelConfig(blocks=BLOCKS, exchange="packets", shots=1),
    "two shots": ops.KernelConfig(blocks=BLOCKS, exchange="packets", shots=2),
    "odd tiles": ops.KernelConfig(blocks=BLOCKS._replace(n=48, k=16), exchange="packets"),
    "odd tiles, two shots": ops.KernelConfig(blocks=BLOCKS._replace(n=80), exchange="packets", shots=2),
    "odd tiles, pushes": ops.KernelConfig(blocks=BLOCKS._replace(n=48), transfer="programs", movers=2, piece_bytes=512),
    "copies, many programs": ops.KernelConfig(blocks=BLOCKS._replace(programs=7), transfer="copies", piece_bytes=512),
    "odd tiles, copies": ops.KernelConfig(blocks=BLOCKS._replace(n=48), piece_bytes=512),
    "shared steps": ops.KernelConfig(blocks=BLOCKS._replace(k=16, programs=5), exchange="packets"),
}
"""Small pieces and tiles, so that there are several, of each way to do a call."""


def find_plan(name):
    return PLANS.get(name, name)


def random_operands(m, n, k, dtype, has_bias):
    """All ranks' x and weight, and this one's bias."""
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [random_of(peer, m, k, dtype=dtype) for peer in range(world)]
    weights = [random_of(10 + peer, n, k, dtype=dtype) for peer in range(world)]
    return inputs, weights, random_of(20 + rank, n, dtype=dtype) if has_bias else None
