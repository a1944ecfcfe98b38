# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine between real processes, against a loop over tokens in fp64."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.moe.oracle import differentiate_dense, draw, list_rows, make_layer

from stretto.ops import moe

SEED = 20
EXACT = 1e-12


@dataclass(frozen=True)
class Case:
    """tokens: of each rank. chosen: the experts that tokens choose among (None: all)."""

    tokens: tuple[int, ...]
    k: int
    experts: int
    chosen: range | None = None

    @property
    def ranks(self) -> int:
        return len(self.tokens)


CASES = {
    "as many tokens each": Case((4, 4), 2, 4),
    "different numbers": Case((5, 2, 4), 3, 6),
    "a rank without tokens": Case((4, 0, 3, 1), 2, 8),
    "no tokens at all": Case((0, 0), 2, 4),
    "all to one expert": Case((3, 4), 1, 4, range(2, 3)),
    "all to the experts of one rank": Case((3, 4, 2), 2, 6, range(4, 6)),
    "experts without tokens": Case((3, 2), 2, 8, range(1, 7, 2)),
    "one expert a rank": Case((3, 1, 2, 5), 4, 4),
}
EXTRA = [
    Case(tokens, k, len(tokens) * local)
    for tokens in ((6, 1), (1, 6), (3, 0, 5), (2, 7, 1, 4), (0, 0, 0, 9))
    for k in (1, 2, 3, 4)
    for local in (1, 2, 3)
    if k <= len(tokens) * local
]


def part(tensor, sizes, index):
    """The part of a tensor's first dim that is this rank's."""
    return tensor.split(list(sizes))[index]


def find_differences(case, max_rows=None, **options):
    """Largest differences of this rank's output, gradients and identity experts' output from the oracle's."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    layer = make_layer(SEED, sum(case.tokens), case.k, case.experts, chosen=case.chosen)
    grad = draw(SEED + 9, *layer.x.shape)
    expected = differentiate_dense(layer, grad)
    experts = [case.experts // world] * world
    sizes = (case.tokens, case.tokens, experts, experts)
    leaves = [part(one, size, rank).clone().requires_grad_() for one, size in zip(layer.leaves, sizes, strict=True)]
    x, weights, gate_up, down = leaves
    ids = part(layer.ids, case.tokens, rank)
    sent = moe.dispatch(x, ids, case.experts, group, topk_weights=weights, max_rows=max_rows, **options)
    same = moe.combine(sent.rows, sent.handle, weights.clone(), group)
    hidden, sent = moe.dispatch_grouped_matmul(
        x, ids, gate_up, group, topk_weights=weights, max_rows=max_rows, **options
    )
    out = moe.grouped_matmul_combine(moe.gated_activation(hidden), down, sent, weights, group)
    grads = torch.autograd.grad(out, leaves, part(grad, case.tokens, rank))
    got, sizes = [out, *grads], (case.tokens, *sizes)
    wanted = [part(one, size, rank) for one, size in zip(expected, sizes, strict=True)]
    own = part(grad, case.tokens, rank)
    got += [same, *torch.autograd.grad(same, (x, weights), own)]
    total = weights.sum(1, keepdim=True)
    wanted += [x * total, own * total, (own * x).sum(1, keepdim=True).expand_as(weights)]
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
    return [(one - other).abs().max().item() for one, other in zip(got, wanted, strict=True) if one.numel()]


def require_exact(results):
    assert all(difference < EXACT for differences in results for difference in differences), results


def find_differences_of_both(case, max_rows=None):
    """Those of sums by ranks, and of sums of choices."""
    return [*find_differences(case, max_rows), *find_differences(case, max_rows, reduce="choice")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(ranks, case):
    require_exact(ranks(case.ranks).run(find_differences_of_both, case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EXTRA, ids=str)
def test_output_and_gradients_are_those_of_a_loop_over_tokens_for_many_shapes(ranks, case):
    require_exact(ranks(case.ranks).run(find_differences_of_both, case))
    if len(set(case.tokens)) == 1:
        require_exact(ranks(case.ranks).run(find_differences, case, sum(case.tokens) * case.k))


@pytest.mark.parametrize("case", [Case((4, 4), 2, 4), Case((3, 3, 3), 3, 6), Case((0, 0), 1, 2)], ids=str)
@pytest.mark.parametrize("spare", [0, 5])
def test_a_fixed_number_of_rows_gives_the_same_output_and_gradients(ranks, case, spare):
    needed = max(count_needed(case))
    require_exact(ranks(case.ranks).run(find_differences_of_both, case, max(needed + spare, 1)))


def count_needed(case):
    """The rows that each rank's experts get."""
    layer = make_layer(SEED, sum(case.tokens), case.k, case.experts, chosen=case.chosen)
    local = case.experts // case.ranks
    return [int(((layer.ids // local) == rank).sum()) for rank in range(case.ranks)]


def dispatch_numbers(case, max_rows=None):
    """(rows as (rank, token), offsets, number of rows) that this rank gets."""
    rank, group = dist.get_rank(), dist.group.WORLD
    ids = make_layer(SEED, sum(case.tokens), case.k, case.experts, chosen=case.chosen).ids
    tokens = case.tokens[rank]
    x = torch.stack((torch.full((tokens,), float(rank)), torch.arange(float(tokens)))).t()
    sent = moe.dispatch(x, part(ids, case.tokens, rank), case.experts, group, max_rows=max_rows)
    assert sent.offsets.dtype == torch.int32
    return sent.rows.tolist(), sent.offsets.tolist()


@pytest.mark.parametrize("case", [CASES["different numbers"], CASES["a rank without tokens"]], ids=str)
def test_rows_are_by_expert_then_source_rank_then_token(ranks, case):
    ids = make_layer(SEED, sum(case.tokens), case.k, case.experts).ids
    ids = [one.tolist() for one in ids.split(list(case.tokens))]
    local = case.experts // case.ranks
    for rank, (rows, offsets) in enumerate(ranks(case.ranks).run(dispatch_numbers, case)):
        expected = list_rows(ids, range(rank * local, (rank + 1) * local))
        assert ([tuple(row) for row in rows], offsets) == expected


def test_a_fixed_number_of_rows_has_the_same_rows_and_then_zeros(ranks):
    case = Case((4, 4, 4), 2, 6)
    most = max(count_needed(case)) + 3
    exact = ranks(3).run(dispatch_numbers, case)
    for (rows, offsets), (padded, same) in zip(exact, ranks(3).run(dispatch_numbers, case, most), strict=True):
        assert same == offsets
        assert padded == rows + [[0.0, 0.0]] * (most - len(rows))


def exceed(case, max_rows, implementation="library"):
    """(whether the output and gradients are NaN where a rank got too many rows, messages of later errors)."""
    rank, group = dist.get_rank(), dist.group.WORLD
    layer = make_layer(SEED, sum(case.tokens), case.k, case.experts, chosen=case.chosen)
    x, ids = part(layer.x, case.tokens, rank).clone().requires_grad_(), part(layer.ids, case.tokens, rank)
    weights = part(layer.weights, case.tokens, rank)

    def run(limit, reduce="rank"):
        options = {"max_rows": limit, "implementation": implementation, "reduce": reduce}
        sent = moe.dispatch(x, ids, case.experts, group, **options)
        out = moe.combine(sent.rows * 2, sent.handle, weights, group)
        return out, torch.autograd.grad(out.sum(), x)[0]

    is_nan = [bool(one.isnan().all()) for one in run(max_rows)]
    messages = []
    for look in (lambda: run(None), lambda: run(None), lambda: moe.check_rows(group)):
        try:
            look()
        except ValueError as error:
            messages.append(str(error))
    for limit in (max_rows, 2 * sum(case.tokens)):  # the latter suffices
        run(limit)
        try:
            moe.check_rows(group)
        except ValueError as error:
            messages.append(str(error))
    assert [bool(one.isnan().all()) for one in run(max_rows, "choice")] == is_nan
    with pytest.raises(ValueError, match="more than max_rows"):
        moe.check_rows(group)
    return is_nan, messages


def test_too_many_rows_give_nan_and_an_error_on_all_ranks_that_names_the_rank_and_the_rows(ranks):
    case = Case((3, 3, 3), 2, 6, range(2, 5))
    needed = count_needed(case)
    assert needed[1] > needed[2] > 0 == needed[0]
    for is_nan, messages in ranks(3).run(exceed, case, needed[1] - 1):
        assert is_nan[0]
        assert len(messages) == 2  # once for each call that needed more
        for message in messages:
            assert f"rank 1 of the group (rank 1 of all) needs {needed[1]} rows" in message
            assert f"more than max_rows={needed[1] - 1}" in message


GRID = 2
"""Ranks of each of the two groups."""


def run_on_grid(case, max_rows=None, reduce="rank", implementation="library"):
    """As `find_differences`, on 2 x 2 ranks: pairs of neighbours have halves of the same experts, and other tokens."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half, expert_rank = rank % GRID, rank // GRID
    gather_group, group = pairs[expert_rank], columns[half]
    layer = make_layer(SEED, sum(case.tokens), case.k, case.experts, chosen=case.chosen)
    grad = draw(SEED + 9, *layer.x.shape)
    out, grad_x, grad_weights, grad_up, grad_down = differentiate_dense(layer, grad)
    x, weights = (part(one, case.tokens, rank).clone().requires_grad_() for one in (layer.x, layer.weights))
    local = case.experts // GRID
    held = slice(expert_rank * local, (expert_rank + 1) * local)
    inner = layer.down.shape[2]
    columns_of_half = torch.arange(inner).tensor_split(GRID)[half]
    both = torch.cat((columns_of_half, columns_of_half + inner))
    gate_up = layer.gate_up[held][:, both].clone().requires_grad_()
    down = layer.down[held][:, :, columns_of_half].clone().requires_grad_()
    ids = part(layer.ids, case.tokens, rank)
    options = {"gather_group": gather_group, "max_rows": max_rows, "reduce": reduce, "implementation": implementation}
    sent = moe.dispatch(x, ids, case.experts, group, **options)
    rows = moe.experts_mlp(sent.rows, sent.offsets, gate_up, down)
    result = moe.combine(rows, sent.handle, weights, group)
    grads = torch.autograd.grad(result, (x, weights, gate_up, down), part(grad, case.tokens, rank))
    wanted = (
        part(out, case.tokens, rank),
        part(grad_x, case.tokens, rank),
        part(grad_weights, case.tokens, rank),
        grad_up[held][:, both],
        grad_down[held][:, :, columns_of_half],
    )
    return [(a - b).abs().max().item() for a, b in zip((result, *grads), wanted, strict=True) if a.numel()]


@pytest.mark.parametrize(
    ("case", "max_rows", "reduce"),
    [
        (Case((2, 4, 3, 1), 2, 4), None, "rank"),
        (Case((2, 4, 3, 1), 2, 4), None, "choice"),
        (Case((2, 0, 0, 5), 3, 6), None, "rank"),
        (Case((0, 0, 0, 0), 1, 2), None, "choice"),
        (Case((3, 3, 3, 3), 2, 4), 24, "rank"),
        (Case((3, 3, 3, 3), 2, 4), 24, "choice"),
    ],
    ids=str,
)
def test_experts_that_two_ranks_share_get_both_ranks_tokens(ranks, case, max_rows, reduce):
    require_exact(ranks(4).run(run_on_grid, case, max_rows, reduce))


def gather_numbers(ids):
    """Rows of a gather group of two, beside each group of two: [(rank, token)], offsets."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = torch.tensor(ids[rank])
    x = torch.stack((torch.full((len(mine),), float(rank)), torch.arange(float(len(mine))))).t()
    sent = moe.dispatch(x, mine, 4, columns[rank % 2], gather_group=pairs[rank // 2])
    return [tuple(row) for row in sent.rows.tolist()], sent.offsets.tolist()


def test_gathered_rows_are_by_expert_then_rank_of_the_gather_group_then_source_rank(ranks):
    ids = [[[0, 3], [1, 2]], [[3, 1]], [[0, 1], [2, 0], [3, 2]], [[1, 0]]]
    order = [0, 2, 1, 3]  # of the ranks: first those that send to the first rank of the gather group
    for rank, (rows, offsets) in enumerate(ranks(4).run(gather_numbers, ids)):
        first = rank // 2 * 2
        expected, ends = list_rows([ids[one] for one in order], range(first, first + 2))
        assert (rows, offsets) == ([(order[one], token) for one, token in expected], ends)


def gather_alone(max_rows):
    """Without a group, tokens are gathered over gather_group alone: the sum over it, of identity experts."""
    rank, world = dist.get_rank(), dist.group.WORLD
    x = draw(SEED + rank, 2 if max_rows else 2 + rank, 3)
    ids = torch.arange(len(x))[:, None] % 2
    sent = moe.dispatch(x, ids, 2, None, gather_group=world, max_rows=max_rows)
    total = moe.combine(sent.rows * (rank + 1), sent.handle, torch.ones(len(x), 1).double(), None)
    return len(sent.rows), (total - x * 3).abs().max().item()


@pytest.mark.parametrize("max_rows", [None, 4])
def test_a_gather_group_needs_no_other_group(ranks, max_rows):
    for rows, difference in ranks(2).run(gather_alone, max_rows):
        assert rows == (max_rows or 5)
        assert difference < EXACT


def compute_twice_and_alone(dtype, reduce, **options):
    """(whether repeated calls have the same bits, whether they are those of one rank with all tokens and experts).

    Rows are multiples of 64 bytes: MKL's products have other bits at other alignments on some CPUs.
    """
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    case = Case((4, 4, 4, 4)[:world] if options else (4, 3, 2, 5)[:world], 3, 4)
    layer = make_layer(SEED, sum(case.tokens), 3, 4, hidden=32, ffn=32)
    everything = [layer.x.to(dtype), layer.weights.float(), layer.gate_up.to(dtype), layer.down.to(dtype)]
    experts = [case.experts // world] * world
    sizes = (case.tokens, case.tokens, experts, experts)

    def run(leaves, ids, group):
        x, weights, gate_up, down = leaves = [one.clone().requires_grad_() for one in leaves]
        more = options if group is not None else {}
        sent = moe.dispatch(x, ids, case.experts, group, reduce=reduce, **more)
        out = moe.combine(moe.experts_mlp(sent.rows, sent.offsets, gate_up, down), sent.handle, weights, group)
        assert out.dtype == dtype
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    mine = [part(one, size, rank) for one, size in zip(everything, sizes, strict=True)]
    first, second = (run(mine, part(layer.ids, case.tokens, rank), group) for _ in range(2))
    alone = run(everything, layer.ids, None)
    alone = [part(one, size, rank) for one, size in zip(alone, (case.tokens, *sizes), strict=True)]
    return all(map(torch.equal, first, second)), all(map(torch.equal, first, alone))


def compute_fixed_choices():
    return compute_twice_and_alone(torch.float32, "choice", max_rows=48)


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.float32)])
def test_sums_of_choices_have_the_bits_of_one_rank_with_all_experts(ranks, world, dtype):
    assert ranks(world).run(compute_twice_and_alone, dtype, "choice") == [(True, True)] * world


@pytest.mark.parametrize("world", [2, 4])
def test_sums_of_choices_have_these_bits_with_a_fixed_number_of_rows_too(ranks, world):
    assert ranks(world).run(compute_fixed_choices) == [(True, True)] * world


def test_sums_by_ranks_have_the_same_bits_in_each_call(ranks):
    assert [same for same, _ in ranks(2).run(compute_twice_and_alone, torch.float32, "rank")] == [True] * 2


def count_sent_rows(case, reduce):
    """Rows of x's dtype that this rank sends to others in forward and backward, and how many choices are elsewhere."""
    rank, group, hidden = dist.get_rank(), dist.group.WORLD, 64
    layer = make_layer(SEED, sum(case.tokens), case.k, case.experts, chosen=case.chosen, hidden=hidden)
    x, weights = (part(one, case.tokens, rank).clone().requires_grad_() for one in (layer.x, layer.weights))
    ids, sent_rows, real = part(layer.ids, case.tokens, rank), [], dist.all_to_all_single

    def count(received, sent, receives=None, sends=None, group=None):
        if sends is not None and sent.shape[1] == hidden:
            sent_rows.append(sum(sends) - sends[rank])
        return real(received, sent, receives, sends, group=group)

    with mock.patch.object(dist, "all_to_all_single", count):
        sent = moe.dispatch(x, ids, case.experts, group, reduce=reduce)
        moe.combine(sent.rows, sent.handle, weights, group).sum().backward()
    owners = ids // (case.experts // case.ranks)
    return sent_rows, owners.tolist()


@pytest.mark.parametrize("reduce", ["rank", "choice"])
def test_a_token_is_sent_once_to_each_rank_that_has_experts_of_it(ranks, reduce):
    case = Case((6, 9, 4), 4, 12)
    found = ranks(3).run(count_sent_rows, case, reduce)
    for rank, (rows, owners) in enumerate(found):
        others = [(sender, token) for sender, (_, of_rank) in enumerate(found) for token in of_rank if sender != rank]
        pairs = sum(len(set(token) - {rank}) for token in owners)
        choices = sum(owner != rank for token in owners for owner in token)
        pairs_here = sum(rank in token for _, token in others)
        choices_here = sum(token.count(rank) for _, token in others)
        assert pairs < choices  # as many rows were sent before
        back = pairs_here if reduce == "rank" else choices_here
        assert rows == [pairs, back, pairs, back]


def find_relative_error(max_rows):
    """The error of bf16 rows with fp32 weights, relative to the largest number, for output and gradients of x."""
    rank, group = dist.get_rank(), dist.group.WORLD
    case = Case((8, 8), 4, 4)
    layer = make_layer(SEED, 16, 4, 4)
    grad = draw(SEED + 9, *layer.x.shape).bfloat16()
    for name in ("x", "gate_up", "down"):
        setattr(layer, name, getattr(layer, name).bfloat16().double())
    layer.weights = layer.weights.float().double()
    expected = differentiate_dense(layer, grad.double())[:3]
    x = part(layer.x, case.tokens, rank).bfloat16().requires_grad_()
    weights = part(layer.weights, case.tokens, rank).float().requires_grad_()
    gate_up, down = (part(one, (2, 2), rank).bfloat16() for one in (layer.gate_up, layer.down))
    sent = moe.dispatch(x, part(layer.ids, case.tokens, rank), 4, group, max_rows=max_rows)
    out = moe.combine(moe.experts_mlp(sent.rows, sent.offsets, gate_up, down), sent.handle, weights, group)
    got = (out, *torch.autograd.grad(out, (x, weights), part(grad, case.tokens, rank)))
    assert [one.dtype for one in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    pairs = zip(got, expected, strict=True)
    return [((a.double() - part(b, case.tokens, rank)).abs().max() / b.abs().max()).item() for a, b in pairs]


@pytest.mark.parametrize("max_rows", [None, 64])
def test_bf16_rows_with_fp32_weights_are_within_rounding(ranks, max_rows):
    for errors in ranks(2).run(find_relative_error, max_rows):
        assert largest(errors) < 2 * 2**-8
