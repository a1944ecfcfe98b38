# SPDX-License-Identifier: Apache-2.0
"""The exchange by kernels in Triton's interpreter, in several processes: beside the library's, and what it refuses."""

import contextlib
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops.moe.oracle import draw, make_layer
from tests.ops.moe.test_exchange import Case, count_needed, exceed, part, require_exact, run_on_grid
from tests.ops.test_failures import shorten_limits
from tests.tiles.machine_code import RELEASE, compile_to_ptx, make_channel

from stretto import ops, tiles
from stretto.memory import PeerError
from stretto.ops import moe
from stretto.ops.joint.routed import GivenRows
from stretto.ops.moe import exchange_kernel, exchange_products, kernel_route, pairs, sorting
from stretto.ops.operator import find_workspace

SEED, HIDDEN = 320, 37


def run_layer(case, dtype, *, copies=True, **options):
    """Rows, output and gradients of experts that double their rows, if there are copies of them, and of products."""
    rank, group = dist.get_rank(), dist.group.WORLD
    layer = make_layer(SEED, sum(case.tokens), case.k, case.experts, chosen=case.chosen, hidden=HIDDEN)
    x, weights = (part(one, case.tokens, rank).clone() for one in (layer.x.to(dtype), layer.weights.float()))
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    grad = part(draw(SEED + 9, *layer.x.shape), case.tokens, rank).to(dtype)
    ids = part(layer.ids, case.tokens, rank)
    found = []
    if copies:
        sent = moe.dispatch(x, ids, case.experts, group, topk_weights=weights, **options)
        out = moe.combine(sent.rows * 2, sent.handle, weights, group)
        found = [sent.rows.detach(), sent.offsets, out.detach(), *torch.autograd.grad(out, leaves, grad)]
    up = draw(SEED + rank, case.experts // dist.get_world_size(), 8, HIDDEN).to(dtype).requires_grad_()
    inner, sent = moe.dispatch_grouped_matmul(x, ids, up, group, topk_weights=weights, **options)
    out = moe.grouped_matmul_combine(inner, up.mT, sent, weights, group)
    return [*found, out.detach(), *torch.autograd.grad(out, [*leaves, up], grad)]


def compare_with_library(case, dtype, options):
    """True for each result of a call by kernels, of two ranks one after fewer tokens, that has the library's bits."""
    if case.ranks == 2:
        run_layer(Case((1, 1), case.k, case.experts), dtype, implementation="kernel", **options)
    ours = run_layer(case, dtype, implementation="kernel", **options)
    library = run_layer(case, dtype, implementation="library", **options)
    return [torch.equal(*pair) for pair in zip(ours, library, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "dtype", "options"),
    [
        pytest.param(Case((2, 0, 3), 2, 6), torch.bfloat16, {"reduce": "rank"}, marks=pytest.mark.long),
        (Case((2, 5), 2, 4), torch.float32, {"reduce": "choice"}),
        pytest.param(Case((3, 4), 2, 4, range(2, 4)), torch.float32, {"reduce": "rank"}, marks=pytest.mark.exhaustive),
        pytest.param(Case((3, 3), 2, 4), torch.float32, {"max_rows": 16}, marks=pytest.mark.exhaustive),
        pytest.param(
            Case((3, 3), 2, 4), torch.float32, {"max_rows": 16, "reduce": "choice"}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_kernels_give_the_librarys_bits(interpret, case, dtype, options):
    for same in interpret(case.ranks, compare_with_library, case, dtype, options):
        assert all(same), same


def run_on_grid_by_kernels():
    """Differences from the oracle's of experts that two ranks share, for rows as they come and a fixed number."""
    ragged, even = Case((2, 4, 0, 3), 2, 4), Case((3, 3, 3, 3), 2, 4)
    cases = (ragged, None, "rank"), (even, 24, "choice")
    found = [difference for case in cases for difference in run_on_grid(*case, "kernel")]
    rank, everyone = dist.get_rank(), [[0, 1], [2, 3], [0, 2], [1, 3]]
    *pairs, first, second = (dist.new_group(ranks) for ranks in everyone)
    group, options = (first, second)[rank % 2], {"gather_group": pairs[rank // 2], "max_rows": 11}
    sent = moe.dispatch(torch.ones(3, 8), torch.zeros(3, 1).int(), 2, group, **options, implementation="kernel")
    assert sent.rows.isnan().all() == (rank < 2)
    with pytest.raises(ValueError, match="needs 12 rows, more than max_rows=11"):
        moe.check_rows(group)
    return found


@pytest.mark.long
def test_kernels_send_rows_to_all_ranks_that_share_an_expert(interpret):
    require_exact(interpret(4, run_on_grid_by_kernels))


@pytest.mark.long
def test_too_many_rows_give_nan_and_an_error_on_all_ranks(interpret):
    case = Case((3, 3), 2, 4, range(2))
    needed = count_needed(case)
    assert needed == [12, 0]
    for is_nan, messages in interpret(2, exceed, case, 11, "kernel"):
        assert is_nan[0]
        for message in messages:
            assert "rank 0 of the group (rank 0 of all) needs 12 rows, more than max_rows=11" in message
        assert len(messages) == 2


def compare_pairs(tokens, k, ranks, local, is_weighted):
    """The names of fields that kernels and torch's operators find differently."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.rand(tokens, ranks * local, generator=generator).topk(k).indices
    ids[1::7, 0] = ranks * local  # no expert
    weights = torch.rand(tokens, k, generator=generator) if is_weighted else None
    ours, right = (find(ids, weights, local, ranks) for find in (pairs._find_by_kernels, pairs._find_by_torch))
    count = int(right.is_pair.sum())

    def take(found):
        whole = {name: getattr(found, name) for name in ("is_pair", "counts")}
        return whole | {
            "tokens": found.tokens[:count], "words": found.words[:count], "numbers": found.numbers[right.is_pair],
        }  # fmt: skip

    return [name for name, one in take(ours).items() if not torch.equal(one, take(right)[name])]


def compare_all_pairs():
    shapes = [(300, 3, 4, 2, True), (5, 1, 3, 1, False), (130, 8, 2, 8, True), (0, 2, 2, 2, False)]
    return [compare_pairs(*shape) for shape in shapes]


def test_kernels_find_the_same_pairs_as_torch(interpret):
    assert interpret(1, compare_all_pairs) == [[[]] * 4]


def compare_sorts():
    """Whether kernels sort copies as torch's operators do: with ids of no expert, and twice in a token."""
    generator, same = torch.Generator().manual_seed(SEED), []
    for tokens, k, experts, rows, known in [
        (90, 3, 4, 200, 71),
        (5, 1, 1, 9, None),
        (300, 2, 70, 600, 300),
        (0, 2, 2, 3, 0),
    ]:
        words = torch.randint(-1, experts + 1, (tokens, 2 * k), generator=generator)
        for ids in (words[:, :k], words.int()[:, k:]):
            arguments = ids, experts, rows, None if known is None else torch.tensor(known)
            with mock.patch.object(sorting, "_BLOCKS", 2):  # that have several of _COPIES
                ours = sorting.sort_on_gpu(*arguments)
            right = sorting.sort_by_torch(*arguments)
            same += [
                one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(ours, right, strict=True)
            ]
    return same


def test_kernels_sort_copies_as_torch_does(interpret):
    assert interpret(1, compare_sorts) == [[True] * 40]


class _SideStream(contextlib.nullcontext):
    """A side stream that notes how often it is joined."""

    joined = 0

    def open(self):
        pass

    def join(self):
        self.joined += 1


def raise_before_the_product():
    """How often the exchange's side stream was joined: after an error of the product that begins on rows that arrive,
    after another operator's call on the same workspace, and after a second one."""
    group, side, joined = dist.new_group(), _SideStream(), []  # no kernel ends the other calls
    x, ids = draw(SEED + dist.get_rank(), 4, HIDDEN).bfloat16(), torch.tensor([[0], [1]] * 2)
    failing = mock.patch.object(exchange_products, "multiply_arriving", side_effect=RuntimeError("no product"))
    with mock.patch.object(tiles.BlockChannel, "side_stream", return_value=side):
        with failing, pytest.raises(RuntimeError, match="no product"):
            moe.dispatch_grouped_matmul(x, ids, x[:1, None], group, implementation="kernel")
        joined.append(side.joined)
        channel = find_workspace(group.group_name, x.device, x.nbytes, "barrier").channel
        for _ in range(2):
            mapping = tiles.shard_tiles(4, 2, 1, channels=2, fixed=True)
            channel.begin("another operator", mapping, mapping, "broadcast")
            joined.append(side.joined)
    return joined


def test_the_next_call_on_a_workspace_joins_an_exchange_that_an_error_has_interrupted(interpret):
    assert interpret(2, raise_before_the_product) == [[0, 1, 1]] * 2


def send_more_and_fewer():
    """For each call, whether its tokens were sent anew after the host had read the counts, and whether its results,
    gradients too, have the library's bits. A call after the first has room for as many places as the one before it."""
    found = []
    for tokens in ((2, 5), (2, 5), (9, 8), (1, 1)):
        case, sent = Case(tokens, 2, 4), []
        library = run_layer(case, torch.bfloat16, copies=False, implementation="library")

        def note(route, rows, *, waits=True, sent=sent, push=kernel_route.KernelRoute._push_pairs):
            sent.extend([True] * (not waits and rows.requires_grad))  # no gradient's rows
            return push(route, rows, waits=waits)

        drop = mock.patch.object(kernel_route.Arrivals, "drop", autospec=True, side_effect=kernel_route.Arrivals.drop)
        with mock.patch.object(kernel_route.KernelRoute, "_push_pairs", note), drop as dropped:
            ours = run_layer(case, torch.bfloat16, copies=False, implementation="kernel")
        found.append((bool(sent), dropped.call_count, [torch.equal(*pair) for pair in zip(ours, library, strict=True)]))
    return found


def test_tokens_travel_before_the_host_knows_how_many_and_again_if_they_are_more_than_before(interpret):
    for found in interpret(2, send_more_and_fewer):
        assert [was_sent_again for was_sent_again, *_ in found] == [True, False, True, False]
        assert [dropped for _, dropped, _ in found] == [0, 0, 1, 0]  # what began is joined before it is forgotten
        assert all(all(same) for *_, same in found)


def miss_a_call():
    """Rank 1 misses a call: rank 0's error of it, and of the next one."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    x, ids = torch.ones(2, 8), torch.tensor([[0, 1]] * 2)
    moe.dispatch(x, ids, 2, group, max_rows=8, implementation="kernel")
    shorten_limits(group, 3.0)
    messages = []
    if dist.get_rank() == 0:
        for _ in range(2):
            with pytest.raises(PeerError) as error:
                moe.dispatch(x, ids, 2, group, max_rows=8, implementation="kernel")
            messages.append(str(error.value))
    dist.barrier()
    with pytest.raises(PeerError) if messages else pytest.MonkeyPatch.context():
        dist.destroy_process_group(group)
        if messages:
            ops.check()
    return messages


@pytest.mark.long
def test_a_missed_call_is_an_error_that_names_the_rank(interpret):
    messages, nothing = interpret(2, miss_a_call)
    assert nothing == []
    for message in messages:
        assert "moe.dispatch's counts" in message
        assert "waited in vain for rank 1" in message


def refuse(options):
    with pytest.raises(ValueError) as error:
        moe.dispatch(torch.ones(2, 4), torch.tensor([[0, 1]] * 2), 4, dist.group.WORLD, **options)
    return str(error.value)


def test_where_no_kernel_can_run_it_says_so(ranks):
    for message in ranks(2).run(refuse, {"implementation": "kernel"}):
        assert "no kernel can run: on CPUs kernels are interpreted" in message
        assert 'implementation="library" will do' in message


def test_rows_are_stored_before_their_signal_in_wide_pieces():
    rows, longs, words = (torch.zeros(64, dtype=dtype) for dtype in (torch.bfloat16, torch.int64, torch.int32))
    mapping = tiles.shard_tiles(64, 4, 1, channels=32, fixed=True)
    pushed = GivenRows(rows, longs, 4096)
    arguments = make_channel("p2p"), mapping, pushed, rows, words, 8192, 8192, 1, True, 0, 32, 1024
    lines = compile_to_ptx(exchange_kernel.push_rows, arguments, num_warps=16)
    assert any(re.search(r"st\.global\.(.*\.)?v4\.b32", line) for line in lines)
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE + r"\.add", line)]
    assert releases
    for release in releases:
        before = [line for line in lines[:release] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync"), before[-3:]
