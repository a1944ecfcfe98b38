# SPDX-License-Identifier: Apache-2.0
"""Tests of what a block of attention and experts sends: with dropped duplicates,
and with communication-aware recomputation.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, count_collectives, gather, install, layout_of, parallelize
from stretto.parallel.comm.collectives import running_collective
from stretto.parallel.comm.counting import CollectiveCall
from tests.differences import largest
from tests.parallel.moe_families import build
from tests.parallel.training import SEED

TOKENS = 128  # of a rank
LARGE = 4000  # bytes: rows and tokens send more, numbers of rows and routers' weights less
Counts = Counter[tuple[str, str]]


def send(grid: Grid, layers: int, options: dict[str, Any]) -> tuple[Counts, Counts]:
    """Calls, and bytes of this rank, by kind and axis, of a step of a GPT of so many layers."""
    torch.manual_seed(SEED)
    config = GPTConfig(
        layers=layers, hidden=32, heads=4, vocab=61, max_seq_len=32, num_experts=8, expert_ffn=16, balance="none"
    )
    model = parallelize(GPT(config).double(), grid, **options)
    tokens = torch.randint(61, (TOKENS // 32, 32), generator=torch.Generator().manual_seed(grid.coordinate("batch")))
    calls, sent = Counts(), Counts()

    def count(call: CollectiveCall) -> None:
        kind = running_collective() or call.kind  # CPUs reduce-scatter experts' rows by an all-to-all
        if call.axis in ("x", "expert") and call.bytes_sent > LARGE:
            calls[kind, call.axis] += 1
            sent[kind, call.axis] += call.bytes_sent

    with count_collectives(grid, before=count):
        model(tokens, tokens).backward()
    return calls, sent


def sent_by_a_block(sizes: dict[str, int], options: dict[str, Any]) -> tuple[Counts, Counts]:
    """Return what the second of two blocks has sent; the first is the same."""
    grid = Grid(**sizes)
    (calls, sent), (calls_of_one, sent_of_one) = (send(grid, layers, options) for layers in (2, 1))
    calls.subtract(calls_of_one)
    sent.subtract(sent_of_one)
    return +calls, +sent


TED = {"data": 2, "x": 2, "expert": 2}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("recompute", "times"), [("full", 6), ("communication", 4)])
def test_a_block_of_ted_has_six_all_to_alls_and_six_all_reduces_and_four_of_each_if_they_are_kept(
    ranks, recompute, times
):
    options = {"drop_duplicates": False, "recompute": recompute}
    for calls, _ in ranks(4).run(sent_by_a_block, TED, options):
        assert calls == {("all_to_all", "expert"): times, ("all_reduce", "x"): times}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("recompute", "times"), [("full", 6), ("communication", 4)])
def test_a_block_whose_sequence_is_sharded_has_as_many_reduce_scatters_and_gathers(ranks, recompute, times):
    options = {"shard_sequence": True, "recompute": recompute}
    for calls, _ in ranks(4).run(sent_by_a_block, TED, options):
        assert calls == {(kind, "x"): times for kind in ("reduce_scatter", "all_gather")} | {
            ("all_to_all", "expert"): times
        }


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("recompute", "passes"), [("none", 1), ("full", 2), ("communication", 1)])
def test_dropping_duplicates_gathers_what_it_has_cut_and_recomputation_keeps_that_too(ranks, recompute, passes):
    for calls, _ in ranks(4).run(sent_by_a_block, TED, {"recompute": recompute}):
        assert calls == {
            ("all_to_all", "expert"): 2 * passes + 2,
            ("all_reduce", "x"): passes + 1,  # of attention alone
            ("reduce_scatter", "x"): passes + 1,
            ("all_gather", "x"): passes + 3,  # the last one, of outputs, is no input of anything that is recomputed
        }


@pytest.mark.long
def test_where_x_folds_into_expert_nothing_but_tokens_is_gathered_over_it(ranks):
    sizes = TED | {"expert": 4, "expert_tensor": "fold"}
    for calls, _ in ranks(4).run(sent_by_a_block, sizes, {"recompute": "communication"}):
        assert calls == {("all_to_all", "expert"): 4, ("all_reduce", "x"): 2, ("all_gather", "x"): 2}


def all_to_all_bytes(found: list[tuple[Counts, Counts]]) -> int:
    return sum(sent["all_to_all", "expert"] for _, sent in found)


@pytest.mark.long
def test_dropping_duplicates_divides_the_bytes_of_all_to_alls_by_x_exactly(ranks):
    kept, dropped = (
        all_to_all_bytes(ranks(4).run(sent_by_a_block, TED, {"drop_duplicates": drops})) for drops in (False, True)
    )
    assert kept == 2 * dropped > 0


@pytest.mark.exhaustive
def test_on_x_of_4_dropping_duplicates_and_keeping_what_was_sent_leave_a_sixth_of_the_bytes(ranks):
    sizes, run = {"data": 2, "x": 4, "expert": 2}, ranks(8).run
    ted = {"drop_duplicates": False, "recompute": "full"}
    both = {"recompute": "communication"}
    before, after = (all_to_all_bytes(run(sent_by_a_block, sizes, options)) for options in (ted, both))
    assert before == 6 * after


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["none", "communication"])
def test_where_x_has_one_rank_dropping_duplicates_sends_nothing_more(ranks, recompute):
    sizes = {"data": 2, "expert": 2}
    with_it, without = (
        ranks(2).run(sent_by_a_block, sizes, {"drop_duplicates": drops, "recompute": recompute})
        for drops in (True, False)
    )
    assert with_it == without
    assert with_it[0][0] == {("all_to_all", "expert"): 4}


def test_experts_of_one_rank_are_summed_over_x_as_any_mlp(ranks):
    for calls, _ in ranks(2).run(sent_by_a_block, {"x": 2}, {"recompute": "full"}):
        assert calls == {("all_reduce", "x"): 5}  # what the block adds at last is not recomputed


def small_messages(sizes: dict[str, int], options: dict[str, Any]) -> int:
    """How many of all ranks' messages over x in a block's experts are of few bytes."""
    grid = Grid(**sizes)
    torch.manual_seed(SEED)
    config = GPTConfig(
        layers=1, hidden=32, heads=4, vocab=61, max_seq_len=32, num_experts=8, expert_ffn=16, activation="swiglu",
        balance="none",
    )  # fmt: skip
    model = parallelize(GPT(config).double(), grid, **options)
    tokens = torch.randint(61, (4, 32), generator=torch.Generator().manual_seed(SEED))
    with count_collectives(grid) as counts:
        model(tokens, tokens).backward()
    return sum(call.axis == "x" and call.bytes_sent <= LARGE for call in counts.calls)


def test_experts_of_a_sharded_sequence_send_no_numbers_of_rows(ranks):
    for count in ranks(2).run(small_messages, {"x": 2}, {"shard_sequence": True}):
        assert count == 6  # ids and weights, the gradient of these, and what routers and norms send


def all_calls(sizes: dict[str, Any], options: dict[str, Any]) -> Counter[tuple[str, str, int]]:
    """All collectives of a step with everything that routers count, but those of weights and their gradients."""
    grid = Grid(**sizes)
    torch.manual_seed(SEED)
    config = GPTConfig(
        layers=2, hidden=32, heads=4, vocab=61, max_seq_len=32, activation="swiglu", num_experts=8, expert_ffn=16,
        shared_ffn=16, shared_expert_gate=True, capacity_factor=0.9, z_loss=0.1,
    )  # fmt: skip
    model = parallelize(GPT(config).double(), grid, **options)
    tokens = torch.randint(61, (4, 32), generator=torch.Generator().manual_seed(grid.coordinate("batch")))
    with count_collectives(grid) as counts:
        model(tokens, tokens).backward()
    others = ("data", "z", "expert_data", "expert_z")
    return Counter((call.kind, call.axis, call.bytes_sent) for call in counts.calls if call.axis not in others)


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (TED, {}),
        (TED, {"drop_duplicates": False}),
        (TED, {"shard_sequence": True}),
        ({"x": 2, "z": 2, "expert": 4, "expert_tensor": "fold"}, {}),
        ({"data": 2, "y": 2, "expert": 2}, {}),
        ({"x": 2, "y": 2}, {}),
        ({"x": 2, "y": 2}, {"shard_sequence": True}),
        ({"data": 2, "z": 2, "expert": 4}, {"expert_rows": 512}),
    ],
    ids=str,
)
def test_recomputation_that_keeps_communication_sends_what_no_recomputation_sends(ranks, sizes, options):
    expected = ranks(4).run(all_calls, sizes, options)
    assert ranks(4).run(all_calls, sizes, options | {"recompute": "communication"}) == expected
    again = ranks(4).run(all_calls, sizes, options | {"recompute": "full"})
    assert all(full > found for full, found in zip(again, expected, strict=True))


def pass_with_shared_experts(
    make_model: Callable[[], nn.Module], sizes: dict[str, int], reduce: str
) -> tuple[list[str], float]:
    """The order of a pass's exchanges and of what its shared expert does, and how far gradients are from those of the
    block's own order."""
    grid, results, happened = Grid(**sizes), [], list[str]()

    def note_gradient(module: nn.Module, _: Any, y: Tensor) -> None:
        y.register_hook(lambda gradient: happened.append("shared's gradient"))

    def note_exchange(call: CollectiveCall) -> None:
        if call.axis == "expert":
            happened.append("exchange")

    for keeps_order in (True, False):
        with patch.object(install, "compute_under_exchange") if keeps_order else nullcontext():
            model = parallelize(make_model(), grid, expert_reduce=reduce)
        happened.clear()
        for name, module in model.named_modules():
            if name.endswith(("shared", "shared_expert", "shared_experts")):
                module.register_forward_hook(lambda *_: happened.append("shared"))
                next(module.children()).register_forward_hook(note_gradient)
        tokens = torch.randint(61, (4, 8), generator=torch.Generator().manual_seed(grid.coordinate("batch")))
        with count_collectives(grid, before=note_exchange):
            (model(tokens, tokens) if isinstance(model, GPT) else model(tokens, labels=tokens).loss).backward()
        results.append([parameter.grad.to_local() for parameter in model.parameters()])  # type: ignore[union-attr]
    return happened, largest((one - other).abs().max().item() for one, other in zip(*results, strict=True))


def make_gpt() -> nn.Module:
    torch.manual_seed(SEED)
    sizes = {"layers": 1, "hidden": 32, "heads": 4, "vocab": 61, "max_seq_len": 32, "activation": "swiglu"}
    return GPT(GPTConfig(**sizes, num_experts=8, expert_ffn=16, shared_ffn=16, balance="none"))


def halve_tokens(module: nn.Module, args: Any) -> Any:
    return args[0] * 0.5, *args[1:]


def double_gradients(module: nn.Module, given: Any, _: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in given)


def distance_with_hooks(is_backward: bool) -> float:
    """How far gradients are from one rank's if hooks change what experts take, or its gradients."""
    grid, tokens = Grid(z=2, expert=2), torch.randint(61, (4, 8), generator=torch.Generator().manual_seed(1))
    plain, model = make_gpt(), parallelize(make_gpt(), grid)
    for each, rows in ((plain, tokens), (model, tokens.chunk(2)[grid.coordinate("batch")])):
        experts = each.get_submodule("blocks.0.mlp.experts")
        if is_backward:
            experts.register_full_backward_hook(double_gradients)
        else:
            experts.register_forward_pre_hook(halve_tokens)
        each(rows, rows).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return largest((one.grad - gather(other.grad, layout_of(other))).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("is_backward", [False, True])
def test_hooks_of_experts_change_what_is_sent_beside_a_shared_expert(ranks, is_backward):
    assert largest(ranks(2).run(distance_with_hooks, is_backward)) < 1e-6


def make_qwen() -> nn.Module:
    return build("qwen2_moe", num_hidden_layers=1)


def make_glm() -> nn.Module:
    return build("glm4_moe", num_hidden_layers=2)  # the first is dense


def make_llama4() -> nn.Module:
    return build("llama4_text", num_hidden_layers=1, moe_layers=[0], no_rope_layers=[1])


@pytest.mark.parametrize(
    ("make_model", "sizes", "reduce", "tolerance"),
    [
        (make_gpt, {"z": 2, "expert": 2}, "rank", 0),  # the block calls the shared expert last
        pytest.param(make_gpt, {"z": 2, "expert": 2}, "choice", 0, marks=pytest.mark.exhaustive),
        # Qwen2's does so first, so that the parts of its input's gradient were added in another order.
        pytest.param(make_qwen, {"data": 2, "expert": 2}, "rank", 1e-6, marks=pytest.mark.exhaustive),
        pytest.param(make_glm, {"z": 2, "expert": 2}, "rank", 0, marks=pytest.mark.long),  # experts alone have roles
        (make_llama4, {"z": 2, "expert": 2}, "rank", 0),  # each choice of a token is a token of its own
    ],
)
def test_shared_experts_run_while_tokens_and_their_gradients_travel(ranks, make_model, sizes, reduce, tolerance):
    forward = ["exchange"] * 3 + ["shared", "exchange"]  # counts, experts, tokens; sums
    # Of sums, of weights (Llama 4 scales tokens by them, before they are sent), of tokens.
    backward = ["exchange"] * (2 + (reduce == "rank" and make_model is not make_llama4)) + ["shared's gradient"]
    for happened, far in ranks(2).run(pass_with_shared_experts, make_model, sizes, reduce):
        assert happened == forward + backward
        assert far <= tolerance
