# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel experts between real processes, against a loop over tokens on one process in fp64."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tests.ops.moe.oracle import differentiate_dense, draw, list_rows, make_layer
from torch.utils.flop_counter import FlopCounterMode

from stretto.ops import moe

SEED, FFN, EXACT = 640, 12, 1e-12


@dataclass(frozen=True)
class Case:
    """tokens: of each rank. chosen: the experts that tokens choose among (None: all)."""

    ranks: int
    tokens: int
    k: int
    experts: int
    chosen: range | None = None

    def layer(self):
        return make_layer(SEED, self.ranks * self.tokens, self.k, self.experts, chosen=self.chosen, ffn=FFN)


CASES = {
    "two ranks": Case(2, 4, 2, 4),
    "skewed to half of the experts": Case(4, 3, 3, 6, range(3)),
    "all to one expert": Case(3, 3, 1, 4, range(2, 3)),
    "no tokens": Case(2, 0, 2, 4),
    "one rank": Case(1, 5, 2, 4),
}


def cut(one, ranks, rank, dim, parts=1):
    """This rank's part of a dim, or of each of a dim's parts."""
    return torch.cat([half.chunk(ranks, dim)[rank] for half in one.chunk(parts, dim)], dim).contiguous()


def take_parts(case, tensors):
    """This rank's parts of (x, weights, gate_up, down), or their gradients."""
    x, weights, gate_up, down = tensors
    ranks, rank = case.ranks, dist.get_rank()
    mine = slice(rank * case.tokens, (rank + 1) * case.tokens)
    return [x[mine], weights[mine], cut(gate_up, ranks, rank, 1, 2), cut(down, ranks, rank, 2)]


def find_differences(case, **options):
    """Largest differences of this rank's output and gradients from the loop's."""
    layer, rank = case.layer(), dist.get_rank()
    grad = draw(SEED + 9, *layer.x.shape)
    expected_out, *expected = differentiate_dense(layer, grad)
    leaves = [one.clone().requires_grad_() for one in take_parts(case, layer.leaves)]
    mine = slice(rank * case.tokens, (rank + 1) * case.tokens)
    x, weights, gate_up, down = leaves
    out = moe.moe_mlp(x, layer.ids[mine], weights, gate_up, down, dist.group.WORLD, **options)
    found = [out, *torch.autograd.grad(out, leaves, grad[mine])]
    wanted = [expected_out[mine], *take_parts(case, expected)]
    assert [one.shape for one in found] == [one.shape for one in wanted]
    return [(one - other).abs().max().item() for one, other in zip(found, wanted, strict=True) if one.numel()]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(ranks, case):
    for differences in ranks(case.ranks).run(find_differences, case):
        assert all(difference < EXACT for difference in differences), differences


def gather_numbers(case):
    """(rows as (rank, token), offsets) of experts that copy their tokens' first numbers, and the FLOPs counted."""
    rank, ids = dist.get_rank(), case.layer().ids
    x = torch.stack((torch.full((case.tokens,), float(rank)), torch.arange(float(case.tokens)))).t().contiguous()
    mine = slice(rank * case.tokens, (rank + 1) * case.tokens)
    with FlopCounterMode(display=False) as counter:
        found = moe.all_gather_moe(x, torch.eye(2).expand(case.experts, 2, 2), ids[mine])
    return found.rows.tolist(), found.offsets.tolist(), counter.get_total_flops()


def test_rows_are_by_expert_then_source_rank_then_token(ranks):
    case = Case(3, 4, 2, 5)
    ids = [one.tolist() for one in case.layer().ids.split(case.tokens)]
    expected, offsets = list_rows(ids, range(case.experts))
    for rows, found_offsets, flops in ranks(case.ranks).run(gather_numbers, case):
        assert ([tuple(row) for row in rows], found_offsets) == (expected, offsets)
        assert flops == 2 * len(expected) * 2 * 2


def differentiate_some(names):
    """Differences from a run with all gradients of one in which only these leaves have any."""
    case = CASES["two ranks"]
    layer, rank = case.layer(), dist.get_rank()
    mine = slice(rank * case.tokens, (rank + 1) * case.tokens)
    grad = draw(SEED + 9, *layer.x.shape)[mine]
    parts = dict(zip(("x", "weights", "gate_up", "down"), take_parts(case, layer.leaves), strict=True))
    found = {}
    for wanted in (tuple(parts), names):
        leaves = {name: one.clone().requires_grad_(name in wanted) for name, one in parts.items()}
        out = moe.moe_mlp(leaves["x"], layer.ids[mine], leaves["weights"], leaves["gate_up"], leaves["down"])
        out.backward(grad)
        found[wanted] = {name: leaves[name].grad for name in names}
    first, second = found.values()
    return [torch.equal(first[name], second[name]) for name in names]


@pytest.mark.parametrize("names", [("down",), ("weights",), ("gate_up",), ("x", "down")], ids=str)
def test_a_gradient_is_the_same_where_others_are_not_needed(ranks, names):
    assert all(map(all, ranks(2).run(differentiate_some, names)))


def compile_layer():
    """True for each result of a compiled layer, one graph, that equals the eager one."""
    case = CASES["two ranks"]
    layer, rank = case.layer(), dist.get_rank()
    mine = slice(rank * case.tokens, (rank + 1) * case.tokens)
    grad = draw(SEED + 9, *layer.x.shape)[mine]

    def run(x, weights, gate_up, down):
        return moe.moe_mlp(x, layer.ids[mine], weights, gate_up, down, dist.group.WORLD)

    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaves = [one.clone().requires_grad_() for one in take_parts(case, layer.leaves)]
        out = function(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    return [torch.equal(*pair) for pair in zip(*results, strict=True)]


@pytest.mark.long
def test_a_compiled_layer_is_one_graph_with_the_same_bits(ranks):
    assert all(map(all, ranks(2).run(compile_layer)))


def refuse():
    """Messages of refused calls."""
    rank, x, ids = dist.get_rank(), torch.ones(2, 4), torch.tensor([[0, 1]] * 2)
    weight = torch.ones(2, 3, 4)
    found = moe.all_gather_moe(x, weight, ids)
    weights = torch.ones(2, 2)
    calls = [
        lambda: moe.all_gather_moe(x.repeat(2 + rank, 1), weight, ids.repeat(2 + rank, 1)),
        lambda: moe.all_gather_moe(x, weight.transpose(1, 2), ids),
        lambda: moe.all_gather_moe(x, weight, ids + 1),
        lambda: moe.moe_reduce_scatter(found.rows[1:], weight.mT, found.handle, weights),
        lambda: moe.moe_reduce_scatter(found.rows, weight.mT, found.handle, weights[1:]),
        lambda: moe.moe_mlp(x, ids, weights, weight, weight),
        lambda: moe.moe_mlp(x, ids, weights[1:], weight, weight.mT),
        lambda: moe.all_gather_moe(x, weight, ids, implementation="fast"),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_what_cannot_be_is_refused(ranks):
    parts = [
        "ranks of a group make the same calls, with the same shapes",
        "all_gather_moe takes rows [n, a] and weight [experts, b, a], not [2, 4] and [2, 4, 3]",
        "topk_ids has 2, but experts are numbered 0 to 1",
        "the handle is of 8 rows, and rows is [7, 3]",
        "takes rows [n, h] and, for these tokens, topk_weights [2, 2], not [8, 3] and [1, 2]",
        "moe_mlp takes gate_up [e, 2 * f, h], or [e, f, h] without a gate, and down [e, h, f], not",
        "topk_weights [2, 2], not [2, 4] and [1, 2]",
        "implementation must be one of",
    ]
    for messages in ranks(2).run(refuse):
        for message, part in zip(messages, parts, strict=True):
            assert part in message
