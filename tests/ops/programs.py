"""What ranks run whose kernels are interpreted. Only they import this: see conftest."""

import pytest
import torch
import torch.distributed as dist

from stretto import ops, tiles
from stretto.ops import all_gather_matmul as gather_module

assert tiles.INTERPRETED.value, "tests.ops.programs is for processes that interpret their kernels"


def random_of(rank, *shape, dtype=torch.float32, seed=0):
    """The same numbers on whichever rank asks for them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def lie(weight, by_columns):
    """The same weight, or one that is the transpose of a contiguous tensor."""
    return weight.t().contiguous().t() if by_columns else weight


def error(result, expected):
    """The largest error, relative to the largest number."""
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


def gather_and_multiply(shape, dtype, by_columns, has_bias, piece_bytes=512):
    """(error of the product, whether the gathered x and a second call's product are right to the last bit)."""
    gather_module.PIECE_BYTES = piece_bytes
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    shards = [random_of(peer, rows, k, dtype=dtype) for peer in range(world)]
    weight = lie(random_of(10 + rank, n, k, dtype=dtype), by_columns)
    bias = random_of(20 + rank, n, dtype=dtype) if has_bias else None
    out, gathered = ops.all_gather_matmul_gathered(shards[rank], weight, bias=bias)
    again = ops.all_gather_matmul(shards[rank], weight, bias=bias)
    expected = torch.cat(shards).double() @ weight.double().T
    if has_bias:
        expected += bias.double()
    return error(out, expected), torch.equal(gathered, torch.cat(shards)), torch.equal(out, again)


def multiply_and_scatter(shape, dtype, by_columns, has_bias, reduce_dtype=None):
    """(error, whether a second call has the same bits)."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    inputs = [random_of(peer, rows * world, k, dtype=dtype) for peer in range(world)]
    weights = [random_of(10 + peer, n, k, dtype=dtype) for peer in range(world)]
    bias = random_of(20 + rank, n, dtype=dtype) if has_bias else None
    weight = lie(weights[rank], by_columns)
    out, again = (
        ops.matmul_reduce_scatter(inputs[rank], weight, bias=bias, reduce_dtype=reduce_dtype) for _ in range(2)
    )
    expected = sum(x.double() @ weight.double().T for x, weight in zip(inputs, weights, strict=True))
    expected = expected[rank * rows : (rank + 1) * rows]
    if has_bias:
        expected = expected + bias.double()
    return error(out, expected), torch.equal(out, again)
