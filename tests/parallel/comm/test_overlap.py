# SPDX-License-Identifier: Apache-2.0
"""Tests that what overlap hides, it hides under computation; and whatever it does, results keep their bits."""

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.execution import ReshardPolicy
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Overlap, checkpoint_activations, no_sync, parallelize
from stretto.parallel.comm import gradient_buckets
from stretto.parallel.comm.collectives import Pending
from stretto.parallel.layers import linear_plan
from tests.differences import largest
from tests.parallel.training import Sizes, my_rows

SEED = 11
BATCH, SEQ_LEN = 8, 8
CONFIG = GPTConfig(layers=3, hidden=32, heads=4, vocab=61, max_seq_len=SEQ_LEN)
SWITCHES = [field.name for field in fields(Overlap)]


@dataclass(frozen=True)
class How:
    """Options with which a model is run."""

    reshard: ReshardPolicy = "after_backward"
    checkpoints: bool = False
    micro_batches: int = 1
    bucket_bytes: int = 20_000
    halves: bool = False  # outputs are summed in two halves, as large ones are


def small_limits(how: How) -> ExitStack:
    """Buckets and halves at the sizes of a small model."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(gradient_buckets, "BUCKET_BYTES", how.bucket_bytes))
    if how.halves:
        stack.enter_context(mock.patch.object(linear_plan, "HALVED_BYTES", 0))
        stack.enter_context(mock.patch.object(linear_plan, "HALVED_INPUTS", 17))
    return stack


def make_model(sizes: Sizes, overlap: Overlap, how: How) -> tuple[Grid, torch.nn.Module, torch.Tensor]:
    """The model, and this rank's rows of text."""
    data, x, y, z = sizes
    grid = Grid(data=data, x=x, y=y, z=z)
    torch.manual_seed(SEED)
    model = parallelize(GPT(CONFIG), grid, overlap=overlap, reshard=how.reshard)
    if how.checkpoints:
        checkpoint_activations(model)
    text = torch.randint(CONFIG.vocab, (BATCH, SEQ_LEN + 1))[my_rows(grid, BATCH)]
    return grid, model, text


def backward(model: torch.nn.Module, text: torch.Tensor, micro_batches: int) -> None:
    parts = text.chunk(micro_batches)
    for part in parts[:-1]:
        with no_sync(model):
            model(part[:, :-1], part[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
    model(parts[-1][:, :-1], parts[-1][:, 1:], num_targets=BATCH * SEQ_LEN).backward()


def weights_after_steps(sizes: Sizes, overlap: Overlap, how: How) -> list[torch.Tensor]:
    """This rank's shards after two steps of SGD: one that learns the order of things, and one that relies on it."""
    with small_limits(how):
        _, model, text = make_model(sizes, overlap, how)
        for _ in range(2):
            backward(model, text, how.micro_batches)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
                    parameter.grad = None
    return [parameter.to_local().detach() for parameter in model.parameters()]


def compare_with_nothing_hidden(sizes: Sizes, how: How) -> dict[str, bool]:
    """True if each way to hide gives the bits of hiding nothing."""
    expected = weights_after_steps(sizes, Overlap.parse(False), how)
    ways = {"all": Overlap()} | {f"all but {name}": replace(Overlap(), **{name: False}) for name in SWITCHES}
    return {
        name: all(map(torch.equal, weights_after_steps(sizes, overlap, how), expected))
        for name, overlap in ways.items()
    }


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "how"),
    [
        ((1, 2, 1, 2), How()),
        ((1, 2, 2, 1), How(halves=True)),
        ((2, 2, 1, 1), How(halves=True, checkpoints=True)),
        ((2, 1, 1, 2), How(reshard="after_forward")),
        pytest.param(
            (2, 2, 1, 2), How(checkpoints=True, reshard="after_forward", micro_batches=2), marks=pytest.mark.exhaustive
        ),
        pytest.param((2, 1, 2, 2), How(checkpoints=True), marks=pytest.mark.exhaustive),
        ((4, 1, 1, 1), How(micro_batches=2)),
    ],
    ids=str,
)
def test_switching_any_overlap_off_changes_no_bit_in_fp32(ranks, sizes, how):
    print(f"seed {SEED}")
    for seen in ranks(prod(sizes)).run(compare_with_nothing_hidden, sizes, how):
        assert seen == dict.fromkeys(seen, True)


class Log(TorchDispatchMode):
    """Record of what happened in which order: products, collectives as they are issued, and waits for them."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.axes = {grid.group(axis).group_name: axis for axis in ("world", "batch", "data", "x", "y", "z")}
        self.events: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in ("mm", "addmm", "bmm"):
            self.events.append(("product",))
        elif name in ("allreduce_", "_allgather_base_", "_reduce_scatter_base_"):
            output = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            self.events.append(("issue", name.strip("_"), self.axes[self._group_name(args)], output.data_ptr()))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _group_name(args: Any) -> str:
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                try:
                    return torch.distributed.ProcessGroup.unbox(arg).group_name
                except RuntimeError:
                    continue
        raise AssertionError("a collective without a group")

    def waited(self, pending: Pending) -> None:
        self.events.append(("wait", pending.result.data_ptr()))


def products_hidden_under(sizes: Sizes, overlap: Overlap, how: How) -> dict[tuple[str, str], list[int]]:
    """Of the third step: by (kind, axis), how many products ran between each collective's issue and its wait."""
    original = Pending.wait
    with small_limits(how):
        grid, model, text = make_model(sizes, overlap, how)
        for _ in range(2):
            backward(model, text, how.micro_batches)
        log = Log(grid)

        def wait(pending: Pending) -> torch.Tensor:
            if pending.work is not None:
                log.waited(pending)
            return original(pending)

        with log, mock.patch.object(Pending, "wait", wait):
            backward(model, text, how.micro_batches)
    hidden: dict[tuple[str, str], list[int]] = {}
    for place, event in enumerate(log.events):
        if event[0] == "issue":
            _, kind, axis, address = event
            later = log.events[place + 1 :]
            until = next((n for n, other in enumerate(later) if other[-1] == address), None)
            # Others were waited for by the call that issued them; their memory may have been used again since.
            if until is not None and later[until][0] == "wait":
                hidden.setdefault((kind, axis), []).append(later[:until].count(("product",)))
    return hidden


def test_an_input_gradients_sum_overlaps_with_the_weight_gradients_product(ranks):
    for seen in ranks(2).run(products_hidden_under, (1, 2, 1, 1), Overlap(), How()):
        assert seen["allreduce", "x"] == [1] * 2 * CONFIG.layers  # qkv and up; the others sum over y
    for seen in ranks(2).run(products_hidden_under, (1, 2, 1, 1), replace(Overlap(), all_reduce=False), How()):
        assert seen["allreduce", "x"] == [0] * 2 * CONFIG.layers


def test_the_sum_of_the_first_half_of_a_large_output_overlaps_with_the_product_of_the_second(ranks):
    forward = CONFIG.layers  # the outputs of down; out has 16 inputs here, which are too few
    for seen in ranks(2).run(products_hidden_under, (1, 2, 1, 1), Overlap(), How(halves=True)):
        assert seen["allreduce", "x"][: 2 * forward] == [1, 0] * forward
    for seen in ranks(2).run(
        products_hidden_under, (1, 2, 1, 1), replace(Overlap(), all_reduce=False), How(halves=True)
    ):
        assert seen["allreduce", "x"][: 2 * forward] == [0, 0] * forward


def test_a_weights_gather_overlaps_with_the_product_before_it(ranks):
    for seen in ranks(2).run(products_hidden_under, (1, 1, 1, 2), Overlap(), How()):
        # The embedding's is the first of a pass: nothing is before it. It has no product, so that of the first linear,
        # which is issued when the embedding's has arrived, has none to hide under either.
        assert seen["allgather_base", "z"][:2] == [0, 0]
        assert min(seen["allgather_base", "z"][2:]) >= 1
        assert len(seen["allgather_base", "z"]) == 4 * CONFIG.layers + 2
    for seen in ranks(2).run(products_hidden_under, (1, 1, 1, 2), replace(Overlap(), all_gather=False), How()):
        assert set(seen["allgather_base", "z"]) == {0}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how",
    [How(reshard="after_forward"), How(checkpoints=True), How(reshard="after_forward", checkpoints=True)],
    ids=str,
)
def test_weights_that_the_backward_pass_gathers_again_are_gathered_ahead_too(ranks, how):
    for seen in ranks(2).run(products_hidden_under, (1, 1, 1, 2), Overlap(), how):
        counts = seen["allgather_base", "z"]
        gathers = how.checkpoints + (how.reshard == "after_forward")
        # Recomputation stops at the last linear that saved something.
        assert len(counts) >= 4 * CONFIG.layers * (1 + gathers) + 2 - CONFIG.layers * how.checkpoints
        assert sum(count == 0 for count in counts) <= 4, counts


@pytest.mark.long
def test_weight_gradients_are_scattered_during_the_rest_of_the_backward_pass(ranks):
    for seen in ranks(2).run(products_hidden_under, (1, 1, 1, 2), Overlap(), How()):
        # The head's first, then four of each block, and the embedding's last, after which no product is left.
        counts = seen["reduce_scatter_base", "z"]
        assert len(counts) == 4 * CONFIG.layers + 2
        assert min(counts[:-3]) >= 1
    for seen in ranks(2).run(products_hidden_under, (1, 1, 1, 2), replace(Overlap(), reduce_scatter=False), How()):
        assert set(seen["reduce_scatter_base", "z"]) == {0}


def test_buckets_of_gradients_are_summed_over_data_during_the_backward_pass(ranks):
    for seen in ranks(2).run(products_hidden_under, (2, 1, 1, 1), Overlap(), How()):
        assert len(seen["allreduce", "data"]) > 3
        assert seen["allreduce", "data"][0] >= 8
    for seen in ranks(2).run(products_hidden_under, (2, 1, 1, 1), replace(Overlap(), data=False), How()):
        assert len(seen["allreduce", "data"]) > 3
        assert set(seen["allreduce", "data"]) == {0}


def gradients_after(sizes: Sizes, disturb: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of a step that comes after something unusual, with overlap and without."""
    found = []
    for overlap in (Overlap(), Overlap.parse(False)):
        _, model, text = make_model(sizes, overlap, How())
        backward(model, text, 1)
        model.zero_grad()
        match disturb:
            case "weights are written to while the next one is on its way":
                change = partial(enlarge, model.blocks[1].mlp.up.weight)
                model.blocks[1].attention.out.register_forward_hook(change)
                model.blocks[1].mlp_norm.register_forward_hook(change)
            case "a block is called on its own":
                with torch.no_grad():
                    model.blocks[1](torch.ones(2, SEQ_LEN, CONFIG.hidden // sizes[2]), None)
            case "blocks come in another order":
                model.blocks = torch.nn.ModuleList(reversed(model.blocks))
            case "a backward pass fails":
                handle = model.blocks[0].register_full_backward_hook(fail)
                with pytest.raises(RuntimeError, match="on purpose"):
                    backward(model, text, 1)
                handle.remove()
                model.zero_grad()
            case "a forward pass has no backward pass":
                with torch.no_grad():
                    model(text[:, :-1], text[:, 1:])
        backward(model, text, 1)
        found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
    return found[0], found[1]


def enlarge(weight: torch.Tensor, *_: Any) -> None:
    with torch.no_grad():
        weight.to_local().mul_(1.5)


def fail(*_: Any) -> None:
    raise RuntimeError("on purpose")


@pytest.mark.long
@pytest.mark.parametrize(
    "disturb",
    [
        "weights are written to while the next one is on its way",
        pytest.param("a block is called on its own", marks=pytest.mark.exhaustive),
        "blocks come in another order",
        "a backward pass fails",
        pytest.param("a forward pass has no backward pass", marks=pytest.mark.exhaustive),
    ],
)
def test_the_learned_order_is_verified_in_each_pass(ranks, disturb):
    print(f"seed {SEED}")
    for hidden, plain in ranks(4).run(gradients_after, (2, 1, 1, 2), disturb):
        assert [torch.equal(a, b) for a, b in zip(hidden, plain, strict=True)] == [True] * len(plain)


def accumulated(sizes: Sizes) -> list[float]:
    """Return how far gradients of two passes without zeroing are from twice those of one."""
    _, model, text = make_model(sizes, Overlap(), How())
    backward(model, text, 1)
    once = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    backward(model, text, 1)
    return [
        float((parameter.grad.to_local() - 2 * first).abs().max())
        for parameter, first in zip(model.parameters(), once, strict=True)
    ]


def test_gradients_that_were_not_zeroed_are_added_to(ranks):
    for distances in ranks(4).run(accumulated, (2, 1, 1, 2)):
        assert largest(distances) < 1e-7


def given_up(sizes: Sizes) -> bool:
    """True if a step after one that was given up between micro-batches has the gradients of a step of its own."""
    found = []
    for gives_up in (False, True):
        _, model, text = make_model(sizes, Overlap(), How())
        if gives_up:
            with no_sync(model):
                model(text[:1, :-1], text[:1, 1:], num_targets=BATCH * SEQ_LEN).backward()
            model.zero_grad()
        backward(model, text, 1)
        found.append([parameter.grad.to_local().clone() for parameter in model.parameters()])
    return all(map(torch.equal, *found))


@pytest.mark.long
def test_a_step_that_was_given_up_between_micro_batches_leaves_nothing_behind(ranks):
    print(f"seed {SEED}")
    assert ranks(4).run(given_up, (2, 1, 1, 2)) == [True] * 4


def compiled_like_eager(sizes: Sizes) -> bool:
    """True if a compiled model's gradients are those of the model itself (traced only: no compiler is needed)."""
    _, model, text = make_model(sizes, Overlap(), How())
    backward(model, text, 1)
    expected = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        model.zero_grad()
        compiled(text[:, :-1], text[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
    found = [parameter.grad.to_local() for parameter in model.parameters()]
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [(1, 2, 1, 2)], ids=str)
def test_torch_compile_takes_a_parallelized_model(ranks, sizes):
    assert ranks(4).run(compiled_like_eager, sizes, timeout=180) == [True] * 4
