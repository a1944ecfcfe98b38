# SPDX-License-Identifier: Apache-2.0
"""Tests of what a call does beside its result: collectives and who sees them, reads by the host, graphs,
and refusals.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops.moe.oracle import make_layer
from torch.utils.checkpoint import checkpoint

from stretto.ops import moe
from stretto.ops.moe.call_route import RouteCall

SEED = 40


def run_layer(x, layer, ids, weights, group, wrap_collective, **options):
    sent = moe.dispatch(x, ids, len(layer.gate_up), group, wrap_collective=wrap_collective, **options)
    return moe.combine(sent.rows * 2, sent.handle, weights, group, wrap_collective=wrap_collective)


class Recorder:
    """Records the kinds of collectives, and which of them ran inside of another's `make`."""

    def __init__(self):
        self.kinds, self.depth = [], 0

    def __call__(self, kind, make):
        self.kinds.append((kind, self.depth))
        self.depth += 1
        try:
            return make()
        finally:
            self.depth -= 1


def record_kinds(options):
    """Kinds of collectives in the forward, then in the backward pass."""
    layer = make_layer(SEED, 3, 2, 4)
    x, weights = layer.x.requires_grad_(), layer.weights.requires_grad_()
    group, recorder = dist.group.WORLD, Recorder()
    if options.pop("is_gathered"):
        group, options["gather_group"] = None, group
    out = run_layer(x, layer, layer.ids, weights, group, recorder, **options)
    forward, recorder.kinds = recorder.kinds, []
    out.sum().backward()
    return forward, recorder.kinds


EXCHANGE, GATHER, SCATTER = ("all_to_all", 0), ("all_gather", 0), ("reduce_scatter", 0)


@pytest.mark.parametrize(
    ("is_gathered", "max_rows", "forward", "backward"),
    [
        (False, None, [EXCHANGE] * 5, [EXCHANGE] * 3),
        (True, None, [GATHER] * 4 + [SCATTER], [GATHER, SCATTER, SCATTER]),
        (False, 12, [GATHER, GATHER, GATHER, SCATTER], [GATHER, SCATTER, SCATTER]),
    ],
)
def test_every_collective_is_announced(ranks, is_gathered, max_rows, forward, backward):
    options = {"is_gathered": is_gathered, "max_rows": max_rows}
    assert ranks(2).run(record_kinds, options) == [(forward, backward)] * 2


def count_collectives(function):
    """(result, how many collectives the function issues)."""
    count = 0

    def counting(real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            return real(*args, **kwargs)

        return call

    from stretto.ops import operator

    with (
        mock.patch.object(dist, "all_to_all_single", counting(dist.all_to_all_single)),
        mock.patch.object(operator, "gather_rows", counting(operator.gather_rows)),
        mock.patch.object(operator, "scatter_sum", counting(operator.scatter_sum)),
    ):
        return function(), count


def replay(max_rows):
    """(collectives of the first call, of a second one that is given the first's results, whether both agree)."""
    rank, layer = dist.get_rank(), make_layer(SEED, 8, 2, 4)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x, ids, weights = (one.split(2)[rank] for one in (layer.x, layer.ids, layer.weights))
    group, options = columns[rank % 2], {"gather_group": pairs[rank // 2], "max_rows": max_rows}
    kept, depth = [], 0

    def keep(kind, make):
        nonlocal depth
        depth += 1
        result = make()
        depth -= 1
        if depth == 0:
            kept.append(result)
        return result

    first, count = count_collectives(lambda: run_layer(x, layer, ids, weights, group, keep, **options))
    results = iter(kept)
    second, again = count_collectives(
        lambda: run_layer(x, layer, ids, weights, group, lambda kind, make: next(results), **options)
    )
    return count, again, torch.equal(first, second), len(kept)


def test_a_caller_that_keeps_the_outermost_results_repeats_the_layer_without_collectives(ranks):
    # Counts, experts, rows, weights and sums travel over two groups each, and one result of each pair is kept.
    assert ranks(4).run(replay, None) == [(10, 0, True, 5)] * 4
    # Ids, tokens, weights and results.
    assert ranks(4).run(replay, 16) == [(8, 0, True, 8)] * 4


def count_reads(max_rows):
    """Return how often the host reads device memory in a call of dispatch, and in the rest of a step."""
    layer, rank = make_layer(SEED, 8, 2, 4), dist.get_rank()
    x, ids, weights = (one.split(4)[rank] for one in (layer.x, layer.ids, layer.weights))
    reads = []

    def reading(name):
        real = getattr(torch.Tensor, name)

        def read(tensor, *args):
            reads.append(name)
            return real(tensor, *args)

        return mock.patch.object(torch.Tensor, name, read)

    run_layer(x, layer, ids, weights, dist.group.WORLD, lambda kind, make: make(), max_rows=max_rows)
    with (
        reading("cpu"), reading("item"), reading("__bool__"), reading("__int__"), reading("__index__"),
        mock.patch("stretto.ops.moe.permutation.torch.aminmax", side_effect=lambda _: (0, 0)),  # the check on CPUs
    ):  # fmt: skip
        x = x.clone().requires_grad_()
        sent = moe.dispatch(x, ids, 4, dist.group.WORLD, max_rows=max_rows)
        first = len(reads)
        moe.combine(sent.rows, sent.handle, weights, dist.group.WORLD).sum().backward()
    return reads[:first].count("cpu"), len(reads) - first


def test_the_host_reads_the_counts_once_and_with_a_fixed_number_of_rows_nothing(ranks):
    assert ranks(2).run(count_reads, None) == [(1, 0)] * 2
    assert ranks(2).run(count_reads, 16) == [(0, 0)] * 2


def combine_by_changed_weights():
    """Collectives of `combine` with weights that were sent before, and whether others count after all."""
    x, ids, weights = torch.ones(2, 4), torch.tensor([[0, 2], [3, 1]]), torch.ones(2, 2)
    group, recorder = dist.group.WORLD, Recorder()
    sent = moe.dispatch(x, ids, 4, group, topk_weights=weights)
    found = [moe.combine(sent.rows, sent.handle, weights, group, wrap_collective=recorder)]
    found.append(moe.combine(sent.rows, sent.handle, weights.clone(), group))
    found.append(moe.combine(sent.rows, sent.handle, weights.mul_(3), group) / 3)
    return len(recorder.kinds), [torch.equal(one, torch.full_like(x, 2.0)) for one in found]


def test_weights_are_sent_once_unless_they_are_changed(ranks):
    assert ranks(2).run(combine_by_changed_weights) == [(1, [True] * 3)] * 2


def find_errors():
    """Messages of the errors of wrong calls."""
    rank, group = dist.get_rank(), dist.group.WORLD
    x, ids, weights = torch.ones(2, 4), torch.tensor([[0, 1]] * 2), torch.ones(2, 2)
    other, outside = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    sent = moe.dispatch(x, ids, 6, group)
    messages = []
    for call in (
        lambda: moe.dispatch(x, ids, 7, group),
        lambda: moe.dispatch(x, ids, 2, group),
        lambda: moe.dispatch(x, ids, 6, "world"),
        lambda: moe.dispatch(x, ids, 6, outside) if rank == 2 else moe.combine(sent.rows, sent.handle, weights, other),
        lambda: moe.combine(sent.rows, sent.handle, weights, other),
        lambda: moe.exchange._dispatch_to_ranks(
            x, ids + 5, None, RouteCall(6, group, None, None, False, moe.exchange.call), "rank"
        ),
        lambda: moe.dispatch(x[: rank + 1], ids[: rank + 1], 6, group, max_rows=9),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
        else:
            messages.append("none")
    return messages


def test_wrong_groups_and_different_calls_are_refused(ranks):
    for rank, messages in enumerate(ranks(3).run(find_errors)):
        expected = (
            "7 experts cannot be divided among 3 ranks: a multiple of the group's size will do, such as 6",
            "2 experts cannot be divided among 3 ranks: a multiple of the group's size will do, such as 3",
            "group must be a torch.distributed.ProcessGroup",
            "(rank 2) is not in the group" if rank == 2 else "the group that dispatch was given",
            "the group that dispatch was given",
            "2 of topk_ids are no experts: they are numbered 0 to 5",
            "ranks of a group make the same calls",
        )
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def compile_layer():
    """True if a compiled layer gives the bits of an eager one, with its gradient."""
    layer, rank, group = make_layer(SEED, 8, 2, 4), dist.get_rank(), dist.group.WORLD
    x, ids, weights = (one.split(4)[rank] for one in (layer.x, layer.ids, layer.weights))

    def run(x):
        return run_layer(x * 2, layer, ids, weights, group, moe.exchange.call).square()

    results = []
    for function in (run, torch.compile(run, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        results.append((out, torch.autograd.grad(out.sum(), leaf)[0]))
    return all(map(torch.equal, *results))


@pytest.mark.exhaustive
def test_several_ranks_compile_with_a_graph_break(ranks):
    assert ranks(2).run(compile_layer, timeout=120) == [True] * 2


def recompute():
    """True if a layer that is checkpointed, and so computed again in the backward pass, has the same gradients."""
    layer, rank, group = make_layer(SEED, 8, 2, 4), dist.get_rank(), dist.group.WORLD
    x, ids, weights = (one.split(4)[rank] for one in (layer.x, layer.ids, layer.weights))

    def run(x):
        return run_layer(x, layer, ids, weights, group, moe.exchange.call).square()

    results = []
    for function in (run, lambda x: checkpoint(run, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        out = function(leaf)
        results.append((out, torch.autograd.grad(out.sum(), leaf)[0]))
    return all(map(torch.equal, *results))


def test_a_checkpointed_layer_has_the_same_gradients(ranks):
    assert ranks(2).run(recompute) == [True] * 2


def differentiate_twice():
    layer, group = make_layer(SEED, 3, 2, 4), dist.group.WORLD
    x = layer.x.requires_grad_()
    out = run_layer(x, layer, layer.ids, layer.weights, group, moe.exchange.call).square()
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    grad.sum().backward()


def test_a_second_derivative_is_an_error_and_not_wrong(ranks):
    with pytest.raises(RuntimeError, match="once_differentiable"):
        ranks(2).run(differentiate_twice)
