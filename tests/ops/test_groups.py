# SPDX-License-Identifier: Apache-2.0
"""The operators in several groups and threads, and between ranks whose operands differ."""

import threading

import pytest
import torch
import torch.distributed as dist
from tests.ops.leaves import OPERATORS, make_leaves, multiply
from tests.ops.operands import find_plan, random_of
from tests.processes import LIMIT

from stretto import ops
from stretto.memory import PeerError
from stretto.ops import choices, config


def infer_then_train(plan):
    """A group whose first calls are in inference mode has the same products and gradients as one that only trains."""
    for operator in OPERATORS:
        found = []
        for infers in (False, True):
            group = dist.new_group([0, 1])
            if infers:
                with torch.inference_mode():
                    x, weight, bias = make_leaves("", rows=18)
                    multiply(operator, x, weight, group, bias=bias, implementation=find_plan(plan))
            leaves = make_leaves(rows=18)
            out = multiply(operator, *leaves[:2], group, bias=leaves[2], implementation=find_plan(plan))
            out.sum().backward()
            found.append([out, *(leaf.grad for leaf in leaves)])
        assert all(map(torch.equal, *found)), operator.__name__


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", ["auto", "copies", "packets"])
def test_a_group_that_has_inferred_may_train(interpret, plan):
    interpret(2, infer_then_train, plan)


def call_from_threads():
    """Two threads, each with a group of its own; how many of their products are right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups, right = [dist.new_group(list(range(world))) for _ in range(2)], []

    def call(number):
        for rows in (3, 4, 5):
            xs = [random_of(peer, rows, 8 + number).round() for peer in range(world)]
            weight = random_of(10 + rank, 6, 8 + number).round()
            out = ops.all_gather_matmul(xs[rank], weight, groups[number], implementation="library")
            right.append(torch.equal(out, torch.cat(xs) @ weight.T))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    return right.count(True)


def test_threads_may_have_groups_of_their_own(interpret):
    assert interpret(2, call_from_threads) == [6, 6]


def leave_groups(count):
    """Groups that are gone, and that operators still know."""
    for _ in range(count):
        group = dist.new_group([0, 1])
        x, weight, _ = make_leaves("")
        ops.matmul_all_reduce(x, weight, group)
        dist.destroy_process_group(group)
        del group
    return len(choices._groups) - 1


def test_destroyed_groups_are_forgotten(interpret):
    assert interpret(2, leave_groups, 4) == [0, 0]


def disagree_about_nothing():
    """Rank 1 has no rows, or no columns; whether each rank's errors name that."""
    rank, are_named = dist.get_rank(), []
    for place, operator in enumerate(OPERATORS):
        x, weight, _ = make_leaves("", n=6 + place)  # so that each call is the first of its kind
        for operands in ((x[: 0 if rank else 4], weight), (x, weight[: 0 if rank else 6 + place])):
            with pytest.raises(ValueError, match="ranks of a group make the same calls") as error:
                operator(*operands)
            are_named.append("=0 " in str(error.value))
        assert multiply(operator, x[:0], weight).shape == (0, 6 + place)  # as on all ranks
        assert len(multiply(operator, x, weight)) > 0
    return all(are_named)


def test_a_rank_with_nothing_to_multiply_has_the_shapes_of_the_others(interpret):
    assert interpret(2, disagree_about_nothing) == [True, True]


def disagree_about_biases():
    """Rank 1 alone has a bias, or asks for the gathered x too."""
    x, weight, bias = make_leaves("")
    rank = dist.get_rank()
    for operator in (ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce):
        with pytest.raises(ValueError, match=r"ranks of a group make the same calls.* with a bias"):
            operator(x, weight, bias=bias if rank else None)
    with pytest.raises(ValueError, match=r"ranks of a group make the same calls.*all_gather_matmul_gathered "):
        OPERATORS[rank](x, weight)


def test_ranks_that_differ_in_a_bias_or_in_what_is_returned_raise(interpret):
    interpret(2, disagree_about_biases)


def miss_a_call():
    """Rank 1 refuses what it is given, so rank 0 waits in vain; then both call the same."""
    rank = dist.get_rank()
    x, weight, _ = make_leaves("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.memory.groups.group_timeout", lambda group: 0.5)
        ops.all_gather_matmul(x, weight)
        dist.barrier()
        for _ in range(2):
            if rank == 0:
                with pytest.raises(PeerError, match="rank 1 has called nothing like it"):
                    ops.all_gather_matmul(x[:2], weight)
            else:
                with pytest.raises(ValueError, match="contiguous x"):
                    ops.all_gather_matmul(torch.ones(8, 2).t(), weight)
            dist.barrier()
    return list(ops.all_gather_matmul(x[:2], weight).shape), list(ops.all_gather_matmul(x[:3], weight).shape)


@pytest.mark.long
def test_a_rank_that_waited_in_vain_may_call_again(interpret):
    assert interpret(2, miss_a_call) == [([4, 6], [6, 6])] * 2


def align_apart(plan):
    """Rank 1's operands lie where TMA does not take them, in turn with rank 0's; what each call ran as."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def lie(tensor, is_aligned):
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)  # whose address is a multiple of 64
        return room[0 if is_aligned else 1 :][: tensor.numel()].view(tensor.shape).copy_(tensor)

    for operator in OPERATORS[1:] if plan == "packets" else OPERATORS:
        for far in range(world + 1):  # `world`: none, of a kind that is known by now
            is_scatter = operator is ops.matmul_reduce_scatter
            xs = [random_of(peer, 34 * (world if is_scatter else 1), 24).round() for peer in range(world)]
            weights = [random_of(10 + peer, 40 + far % world, 24).round() for peer in range(world)]
            x, weight = (lie(tensors[rank], rank != far) for tensors in (xs, weights))
            out = multiply(operator, x, weight, implementation=find_plan(plan))
            if "gather" in operator.__name__:
                expected = torch.cat(xs) @ weights[rank].T
            else:
                expected = sum(x @ weight.T for x, weight in zip(xs, weights, strict=True))
            if is_scatter:
                expected = expected[34 * rank : 34 * (rank + 1)]
            assert torch.equal(out, expected), (operator.__name__, far)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", ["auto", "copies", "pushes", "packets"])
def test_ranks_operands_may_be_aligned_differently(interpret, plan):
    interpret(2, align_apart, plan)


def choose_apart():
    """True if ranks, of which one has operands that TMA does not take, choose as if none had."""
    rank, name = dist.get_rank(), dist.group.WORLD.group_name
    weight, room, seen = torch.zeros(32, 16), torch.zeros(32 * 16 + 1), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            choices, "_choose", lambda known, call, machine, how: seen.append(machine) or (config.LIBRARY, "")
        )
        for n, places in ((32, (0, 0)), (31, (0, 1)), (31, (0, 0)), (32, (1, 0))):
            x = room[places[rank] :][: 32 * 16].view(32, 16)
            call = choices.describe_problem("all_gather_matmul", 64, x, weight[:n], name)
            choices.choose_config(call, x, weight[:n], name, "auto")
    return [machine.by_tma for machine in seen]


def test_one_ranks_alignment_does_not_change_its_choice(interpret):
    """Taken by TMA on all ranks, and not so at the first call of a kind; later calls of a kind are as its first."""
    assert interpret(2, choose_apart) == [[True, False]] * 2
