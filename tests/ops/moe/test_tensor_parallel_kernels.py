# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel experts by kernels in Triton's interpreter, in several processes: beside the library's."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops.confirmed import timed_by
from tests.ops.moe.test_tensor_parallel import Case
from tests.tiles.machine_code import RELEASE, compile_to_ptx, find_spills, make_channel

from stretto import ops, tiles
from stretto.ops import KernelConfig, moe, tuning
from stretto.ops.moe import tensor_parallel_kernels as kernels
from stretto.ops.moe.grouped.config import find_config
from stretto.ops.moe.grouped.tile_order import TileOrder
from stretto.tiles.compile_only import count_shared_bytes

SEED = 660


def draw_whole(generator, *shape):
    """Small whole numbers, of which bf16 holds products and sums exactly."""
    return torch.randint(-2, 3, shape, generator=generator).bfloat16()


def run_halves(case, hidden, inner, entry, implementation):
    """Rows and offsets, the output, and gradients of all leaves, of the two halves without an activation."""
    generator = torch.Generator().manual_seed(SEED + entry)
    rank, (t, k) = dist.get_rank(), (case.tokens, case.k)
    everyones = draw_whole(generator, case.ranks * t, hidden)
    chosen = torch.tensor(list(case.chosen or range(case.experts)))
    scores = torch.rand(case.ranks * t, len(chosen), generator=generator)
    ids = chosen[scores.topk(k).indices]
    weights = draw_whole(generator, case.ranks * t, k).float()
    mine = slice(rank * t, (rank + 1) * t)
    generator.manual_seed(SEED + entry + 100 * rank)
    up, down = (draw_whole(generator, case.experts, *shape) for shape in ((inner, hidden), (hidden, inner)))
    leaves = [everyones[mine], weights[mine], up, down]
    x, factors, up, down = leaves = [one.clone().requires_grad_() for one in leaves]
    found = moe.all_gather_moe(x, up, ids[mine], implementation=implementation)
    hidden_rows = found.rows / 8  # so that sums stay exact
    out = moe.moe_reduce_scatter(hidden_rows, down, found.handle, factors, implementation=implementation)
    grads = torch.autograd.grad(out, leaves, draw_whole(generator, *out.shape))
    return [found.rows.detach(), found.offsets, out.detach(), *grads]


def compare_with_library(case, hidden, inner, entries):
    """True for each result of calls by kernels that has the library's bits."""
    return [
        torch.equal(one, other)
        for entry in range(entries)
        for one, other in zip(
            *(run_halves(case, hidden, inner, entry, how) for how in ("kernel", "library")), strict=True
        )
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "entries"),
    [
        (Case(2, 21, 2, 3), 3),  # units of sums and parts of tokens that are not whole, and both slots in turn
        *(
            pytest.param(case, 1, marks=pytest.mark.exhaustive)
            for case in (Case(3, 17, 1, 4, range(2, 3)), Case(2, 1, 2, 4), Case(4, 5, 3, 6, range(3)))
        ),
    ],
    ids=str,
)
def test_kernels_give_the_librarys_bits(interpret, case, entries):
    for same in interpret(case.ranks, compare_with_library, case, 40, 16, entries):
        assert all(same), same


def call_half(operator, m):
    """What a half of tensor-parallel experts runs as."""
    before = ops.counts()
    tuning.RotatingOperands.make(operator, m, 16, 24, None, torch.bfloat16, torch.device("cpu"), 3, 2).call()
    return [how for (name, how), count in ops.counts().items() if count != before.get((name, how), 0)]


def tune_half(operator, folder):
    """Measured configurations; and what runs before, at as many tokens, and at many more, where the kernel was fast."""
    with timed_by(None, folder, can_time=False):
        before = call_half(operator, 4)
        with mock.patch.object(tuning, "slowest_times", lambda times, *_: range(len(times), 0, -1)):
            measured = ops.tune(operator, 4, 16, 24, device="cpu", experts=3, top_k=2)
        return [config.encode() for config in measured], before, call_half(operator, 6), call_half(operator, 8)


@pytest.mark.long
@pytest.mark.parametrize(
    "operator", ["all_gather_moe", pytest.param("moe_reduce_scatter", marks=pytest.mark.exhaustive)]
)
def test_what_was_measured_to_be_faster_runs_at_about_as_many_tokens(interpret, tmp_path, operator):
    for measured, before, near, far in interpret(2, tune_half, operator, str(tmp_path)):
        assert measured == ["library", KernelConfig().encode()]
        assert (before, near, far) == (["library"], ["kernel"], ["library"])


def refuse(dtype):
    x, ids = torch.ones(2, 8, dtype=dtype), torch.tensor([[0, 1]] * 2)
    with pytest.raises(ValueError) as error:
        moe.all_gather_moe(x, torch.ones(2, 8, 8, dtype=dtype), ids, implementation="kernel")
    return str(error.value)


def test_where_no_kernel_can_run_it_says_so(ranks):
    for message in ranks(2).run(refuse, torch.bfloat16):
        assert "no kernel can run: on CPUs kernels are interpreted" in message
        assert 'implementation="library" will do' in message


def launch_sending(transposed=False):
    """The launch of `multiply_and_send` for H100: kernel, arguments and options."""
    launches = []
    block_channel = mock.Mock(rank=2, world_size=4)
    block_channel.launch = lambda kernel, _, programs, arguments, **options: launches.append(
        (kernel, arguments, options)
    )
    block_channel.begin.return_value = make_channel("p2p")
    block_channel.tensor = lambda shape, dtype, offset: torch.empty(shape, dtype=dtype)
    tables = torch.zeros(6, 64, dtype=torch.int32).unbind(0)
    order = TileOrder(tiles.look_up_tiles(*tables[:5]), tables[5], *torch.zeros(2, 4, dtype=torch.int32), 128)
    rows, weight = torch.empty(512, 768, dtype=torch.bfloat16), torch.empty(4, 1024, 768, dtype=torch.bfloat16)
    weight = weight.mT.contiguous().mT if transposed else weight
    routed = kernels.Routed(
        torch.zeros(512, dtype=torch.int32), torch.zeros(256, 2, dtype=torch.int64), torch.zeros(5, dtype=torch.int32)
    )
    config = find_config("product", 128, 132)
    with (
        mock.patch.object(kernels, "find_landing", return_value=(block_channel, 0, 0, None)),
        mock.patch.object(kernels.Routed, "order", return_value=order),
    ):
        kernels.multiply_leaving(config, rows, weight, torch.zeros(256, 2), routed, "group")
    return launches[-1]


@pytest.mark.long
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_that_sends_sums_signals_after_its_stores_and_spills_nothing(transposed, tmp_path):
    kernel, arguments, options = launch_sending(transposed)
    lines = compile_to_ptx(kernel, arguments, **options)
    assert any("wgmma.mma_async" in line for line in lines)
    counts = [
        number for number, line in enumerate(lines) if re.search(r"(atom|red)\S*release\S*gpu|gpu\S*release", line)
    ]
    signals = [number for number, line in enumerate(lines) if re.search(RELEASE, line)]
    assert counts
    assert signals
    for number in (*counts, *signals):
        stores = [at for at in range(number) if re.search(r"st\.global", lines[at])]
        barriers = [at for at in range(number) if lines[at].startswith("bar.sync")]
        assert max(stores) < max(barriers)
    assert find_spills(lines, tmp_path) == 0
    assert count_shared_bytes(kernel, arguments, options, "sm_90") <= 227 << 10
