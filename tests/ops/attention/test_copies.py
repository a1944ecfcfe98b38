# SPDX-License-Identifier: Apache-2.0
"""The exchange by copy engines and the kernel that merges, interpreted; GPUs' kernels, which a plain one stands for."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from tests.differences import largest
from tests.ops.attention.test_context import EXACT, list_cases
from tests.ops.attention.whole import find_differences
from tests.tiles.machine_code import compile_to_ptx, find_spills

from stretto.ops.attention import kernels, merge, operators
from stretto.ops.attention.plan import Block, Range
from stretto.ops.operator import list_channels


def differ_by_copies(ranks, calls):
    """Calls that follow each other in one workspace: (implementation, number of the case)."""
    cases = list(list_cases(ranks))
    with mock.patch.object(operators, "can_copy", return_value=True):
        found = [
            (implementation, cases[number], differences)
            for implementation, number in calls
            if not largest(differences := find_differences(cases[number], implementation)) <= EXACT
        ]
    assert list_channels(dist.group.WORLD.group_name)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((("ring", 0), ("ring", 1)), marks=pytest.mark.exhaustive),
        (("all_gather", 8), ("ulysses", -2), ("ulysses", -1), ("ring", 12)),
    ],
)
def test_copy_engines_bring_the_same(interpret, calls):
    for rank, found in enumerate(interpret(4, differ_by_copies, 4, calls)):
        assert not found, (rank, found)


def merge_differences():
    """The kernel's results beside torch's, of two parts or one, with and without sinks, in other layouts."""
    found = []
    generator = torch.Generator().manual_seed(6)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    for dtype, size in ((torch.bfloat16, 64), (torch.float32, 24)):
        parts = [(draw(2, 70, 3, size).to(dtype).transpose(1, 2), draw(2, 3, 70)) for _ in range(2)]
        for other in (parts[1], None):
            for sinks in (None, draw(3)):
                results = [(draw(2, 3, 70, size).to(dtype), draw(2, 3, 90)[..., :70]) for _ in range(2)]
                merge.merge_on_gpu(parts[0], other, sinks, results[0])
                merge._merge(parts[0], other, sinks, results[1])
                found += [float((one - two).abs().max()) for one, two in zip(*results, strict=True)]
        for count in (2, 5):
            added = [draw(2, 70, 3, size).to(each).transpose(1, 2) for each in (dtype, torch.float32, dtype) * 2][
                :count
            ]
            added[-1] = added[-1][..., :1].expand(-1, -1, -1, size)
            sums = [draw(2, 70, 3, 2 * size).to(dtype).transpose(1, 2)[..., size:] for _ in range(2)]
            merge.add_on_gpu(added, sums[0])
            merge._add(added, sums[1])
            found.append(float((sums[0] - sums[1]).abs().max()))
    return found


def test_merging_and_adding_kernels_round_once(interpret):
    (found,) = interpret(1, merge_differences)
    assert len(found) == 20
    assert largest(found[:8]) < 2**-7
    assert largest(found[10:18]) < 1e-5
    assert found[8:10] == found[18:] == [0.0, 0.0]


def launch_merge():
    """(the merging kernel, arguments and options) of two parts."""
    parts = [
        merge.MergedRows(torch.zeros(256, dtype=torch.bfloat16), torch.zeros(256), 1 << 20, 128, 4096, 4096, 128, 1)
        for _ in range(3)
    ]
    arguments = (*parts[:2], torch.zeros(256), parts[2], 32, 8192, 128, True, True, 32, 128)
    return merge.merge_rows, arguments, {"num_warps": 4}


def launch_add():
    """(the adding kernel, arguments and options) of four parts."""
    parts = [merge.AddedRows(torch.zeros(256, dtype=torch.bfloat16), 1 << 20, 128, 4096) for _ in range(5)]
    return merge.add_rows, (tuple(parts[:4]), parts[4], 32, 8192, 128, tl.float32, 32, 128), {"num_warps": 4}


@pytest.mark.long
@pytest.mark.parametrize("launch", [launch_merge, launch_add])
def test_these_kernels_compile_to_wide_accesses_without_spills(tmp_path, launch):
    kernel, arguments, options = launch()
    lines = compile_to_ptx(kernel, arguments, **options)
    assert find_spills(lines, tmp_path) == 0
    assert any("ld.global.v4" in line for line in lines)


def _plain(q, k, v, causal, left, scale):
    return kernels._Plain.forward(q, k, v, [_block(q, k, causal, left)], scale)


def _block(q, k, causal, left):
    return Block(Range(0, q.shape[2]), Range(0, k.shape[2]), causal, left)


def _split(starts, *tensors):
    """Sequences [1, h, rows, d] of tensors [total, h, d]."""
    return zip(*(each.transpose(0, 1)[None].split(starts.diff().tolist(), 2) for each in tensors), strict=True)


def _cudnn(q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
    out, lse = _plain(q, k, v, causal, None, scale)
    return out, lse[..., None]


def _cudnn_backward(
    grad, q, k, v, out, lse, seed, offset, bias, starts, key_starts, longest, most, dropout, causal, *, scale
):
    return kernels._Plain.backward(grad, q, k, v, out, lse[..., 0], [_block(q, k, causal, None)], scale)


def _flash(q, k, v, starts, key_starts, longest, most, dropout, causal, debug, *, scale, window_size_left):
    if starts is None:
        out, lse = _plain(*(each.transpose(1, 2) for each in (q, k, v)), causal, window_size_left, scale)
        return out.transpose(1, 2), lse
    assert (longest, most) == (starts.diff().max(), key_starts.diff().max())
    queries, keys = _split(starts, q), _split(key_starts, k, v)
    parts = [_plain(*one, *two, causal, window_size_left, scale) for one, two in zip(queries, keys, strict=True)]
    out, lse = (torch.cat(each, 2)[0] for each in zip(*parts, strict=True))
    return out.transpose(0, 1), lse


def _flash_backward(
    grad,
    q,
    k,
    v,
    out,
    lse,
    starts,
    key_starts,
    longest,
    most,
    dropout,
    causal,
    state,
    unused,
    *,
    scale,
    window_size_left,
):
    if starts is None:
        wholes = [each.transpose(1, 2) for each in (grad, q, k, v, out)]
        block = _block(wholes[1], wholes[2], causal, window_size_left)
        found = kernels._Plain.backward(*wholes, lse, [block], scale)
        return tuple(each.transpose(1, 2) for each in found)
    queries = _split(starts, grad, q, out, lse.transpose(0, 1)[..., None])
    found = [
        kernels._Plain.backward(grads, q, k, v, out, lse[..., 0], [_block(q, k, causal, window_size_left)], scale)
        for (grads, q, out, lse), (k, v) in zip(queries, _split(key_starts, k, v), strict=True)
    ]
    return tuple(torch.cat(each, 2)[0].transpose(0, 1) for each in zip(*found, strict=True))


def _checked(name, compute):
    """A kernel that computes on CPUs what torch's would, whose arguments and results torch has checked."""

    def run(*arguments, **options):
        def describe(value):
            return value.to("meta") if isinstance(value, torch.Tensor) else value

        known = getattr(torch.ops.aten, name)(*map(describe, arguments), **options)
        found = compute(*arguments, **options)
        assert [each.shape for each in found] == [each.shape for each in known[: len(found)]]
        return *found, *known[len(found) :]

    return run


def differ_by_gpu_kernels(ranks):
    named = {
        "_scaled_dot_product_cudnn_attention": _cudnn,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
        "_flash_attention_forward": _flash,
        "_flash_attention_backward": _flash_backward,
    }
    calls = {name: mock.Mock(side_effect=_checked(name, compute)) for name, compute in named.items()}

    def takes_whole(q, k, v, block):
        return block.left is None and q.shape[-1] == v.shape[-1]

    with (
        mock.patch.object(kernels, "_aten", SimpleNamespace(**calls)),
        mock.patch.object(kernels._Cudnn, "takes", takes_whole),
        mock.patch.object(kernels._Flash, "takes", lambda q, k, v, block: q.shape[-1] == v.shape[-1]),
    ):
        found = [
            (case, differences)
            for case in list_cases(ranks)
            if not largest(differences := find_differences(case, "all_gather")) <= EXACT
        ]
    return found, [call.call_count for call in calls.values()]


@pytest.mark.long
def test_kernels_of_gpus_are_called_as_torch_defines_them(ranks):
    for rank, (found, counts) in enumerate(ranks(2).run(differ_by_gpu_kernels, 2)):
        assert not found, (rank, found)
        assert min(counts) >= 4
