"""What ranks run whose kernels are interpreted. Only they import this: see conftest."""

import torch
import torch.distributed as dist
from tests.tiles import all_gather_gemm as example

from stretto import tiles

assert tiles.INTERPRETED.value, "tests.tiles.programs is for processes that interpret their kernels"


def random_of(rank, *shape, dtype=torch.float32, seed=0):
    """The same numbers on whichever rank asks for them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


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
            worst = max(worst, ((out.double() - expected).abs().max() / expected.abs().max()).item())
    return worst
