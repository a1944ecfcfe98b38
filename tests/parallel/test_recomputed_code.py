# SPDX-License-Identifier: Apache-2.0
"""Blocks that are recomputed and end with a linear: what their code, and the caller of backward, may do."""

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from stretto.parallel import Grid, parallelize, recomputation_contexts
from stretto.parallel.layers.weight_shard import WeightShard
from tests.processes import LIMIT

SEED = 3
MODES = ("full", "every:2", "every:3", "products", "communication", "host")
ROLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    """Its output is a linear's. `code` computes that from the input and the inner activations."""

    def __init__(self, code: Callable[["Block", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x, self.up(x).tanh())


def plain(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    return block.down(inner)


def write_to_output(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    return block.down(inner).mul_(0.5).add_(x)


def use_linears_twice(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    return block.down(block.up(block.down(inner)).sin())


def use_a_linear_for_nothing(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    y = block.down(inner)
    block.up(x)
    return y


def stop_gradients(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    return block.down(inner.detach()) + x


def compute_without_gradients(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    with torch.no_grad():
        offset = block.down(inner)
    return block.down(inner) + offset


def compute_in_inference_mode(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    with torch.inference_mode():
        offset = block.down(inner)
        offset += 1.0
    return block.down(inner) + offset.clone()


def checkpoint_a_part(block: Block, x: Tensor, inner: Tensor, context: str | None = None, **options: Any) -> Tensor:
    if context is not None:
        options["context_fn"] = partial(recomputation_contexts, context)
    return x + checkpoint(lambda part: block.down(block.up(part).tanh()), x, **options)


def hook_gradients(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    y = block.down(inner)
    for tensor, factor in ((inner, 3), (y, 2)):
        tensor.register_hook(lambda gradient, factor=factor: factor * gradient)
    return y


def take_a_gradient(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(block.down(block.up(leaf).tanh()).sum(), leaf)
    return block.down(inner) + gradient


CODES = {
    "plain": plain,
    "writes to its output": write_to_output,
    "uses linears twice": use_linears_twice,
    "uses a linear for nothing": use_a_linear_for_nothing,
    "stops gradients": stop_gradients,
    "computes without gradients": compute_without_gradients,
    "computes in inference mode": compute_in_inference_mode,
    "checkpoints": partial(checkpoint_a_part, use_reentrant=False),
    "checkpoints reentrantly": partial(checkpoint_a_part, use_reentrant=True),
    "checkpoints with contexts": partial(checkpoint_a_part, use_reentrant=False, context="communication"),
    "hooks gradients": hook_gradients,
    "takes a gradient": take_a_gradient,
}
# What may be frozen: parameters whose names have one of these.
FROZEN = ((), ("down.weight",), ("weight",), ("bias",), ("0.", "1."), ("0.weight", "0.up", "0.down.weight"), ("3.",))


class Loop(nn.Module):
    def __init__(self, code: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(code) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make(mode: str, code: Callable[..., Tensor], frozen: tuple[str, ...] = (), **sizes: int) -> nn.Module:
    torch.manual_seed(SEED)
    model = Loop(code)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return parallelize(model, Grid(**sizes), roles=ROLES, recompute=mode)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def backward_three_times(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().sum()
    for keeps in (True, True, False):
        loss.backward(retain_graph=keeps)


def backward_to_some(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().sum()
    for inputs in ([x], [model.blocks[2].down.weight], [block.up.bias for block in model.blocks]):  # type: ignore[union-attr]
        loss.backward(inputs=inputs, retain_graph=True)
    (x.grad,) = torch.autograd.grad(loss, x)


def backward_of_two(model: nn.Module, x: Tensor) -> None:
    (model(x).square().sum() + model(x.sin()).sum()).backward()


def backward_without_early_stop(model: nn.Module, x: Tensor) -> None:
    with set_checkpoint_early_stop(False):
        loss = model(x).square().sum()
    loss.backward()


def backward_through_a_checkpoint(model: nn.Module, x: Tensor, **options: Any) -> None:
    checkpoint(model, x, **options).square().sum().backward()


PASSES = {
    "three times": backward_three_times,
    "to some": backward_to_some,
    "of two": backward_of_two,
    "without early stop": backward_without_early_stop,
    "through a checkpoint": partial(backward_through_a_checkpoint, use_reentrant=False),
    "through a reentrant checkpoint": partial(backward_through_a_checkpoint, use_reentrant=True),
    "through contexts": partial(
        backward_through_a_checkpoint, use_reentrant=False, context_fn=partial(recomputation_contexts, "products")
    ),
}


def differing_modes(
    code: Callable[..., Tensor],
    run: Callable[[nn.Module, Tensor], None],
    needs: bool,
    modes: Sequence[str] = MODES,
    **options: Any,
) -> list[str]:
    """The modes whose gradients are not those of no recomputation, to the bit."""
    found: dict[str, dict[str, Tensor | None]] = {}
    for mode in ("none", *modes):
        model = make(mode, code, **options)
        x = torch.randn(3, 8, requires_grad=needs)
        run(model, x)
        found[mode] = {"x": x.grad, **{name: parameter.grad for name, parameter in model.named_parameters()}}
    right = found.pop("none")
    assert sum(gradient is not None for gradient in right.values()) > 3

    def equal(a: Any, b: Any) -> bool:
        return (
            a is b
            if a is None or b is None
            else torch.equal(*(getattr(each, "_local_tensor", each) for each in (a, b)))
        )

    return [mode for mode, seen in found.items() if not all(equal(seen[name], right[name]) for name in right)]


def try_codes() -> dict[str, list[str]]:
    return {name: differing_modes(code, backward, True) for name, code in CODES.items()}


@pytest.mark.long
def test_whatever_a_blocks_code_does_gradients_are_the_same_to_the_bit(ranks):
    print(f"seed {SEED}")
    assert ranks(1).run(try_codes)[0] == {name: [] for name in CODES}


def try_passes() -> dict[str, list[str]]:
    return {name: differing_modes(plain, run, True) for name, run in PASSES.items()}


@pytest.mark.long
def test_however_gradients_are_asked_for_they_are_the_same_to_the_bit(ranks):
    print(f"seed {SEED}")
    assert ranks(1).run(try_passes)[0] == {name: [] for name in PASSES}


def try_frozen() -> dict[Any, list[str]]:
    return {
        (frozen, needs): differing_modes(plain, backward, needs, frozen=frozen)
        for frozen in FROZEN
        for needs in (True, False)
    }


@pytest.mark.long
def test_whatever_is_frozen_gradients_are_the_same_to_the_bit(ranks):
    print(f"seed {SEED}")
    assert not any(ranks(1).run(try_frozen)[0].values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "modes",
    [
        pytest.param(("every:2", "products", "communication"), marks=pytest.mark.long),
        pytest.param(("full", "every:3", "host"), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_codes_and_passes_are_the_same_on_two_ranks(ranks, modes):
    print(f"seed {SEED}")
    for code in CODES.values():
        assert ranks(2).run(differing_modes, code, backward, True, modes, x=2) == [[], []]
    for run in PASSES.values():
        assert ranks(2).run(differing_modes, plain, run, True, modes, x=2) == [[], []]


def catch_exceptions(block: Block, x: Tensor, inner: Tensor) -> Tensor:
    """As code does that has a slower way, should the first one fail."""
    try:
        return block.down(inner)
    except Exception:  # noqa: BLE001
        return block.down(inner)


def test_blocks_that_are_computed_again_together_may_catch_exceptions(ranks):
    """torch's own checkpoint ends a recomputation by an Exception, which such code would catch."""
    found = [ranks(1).run(gradients_of, mode, catch_exceptions)[0] for mode in ("none", "every:2", "every:3")]
    assert all(torch.equal(*pair) for seen in found[1:] for pair in zip(seen, found[0], strict=True))


def gradients_of(mode: str, code: Callable[..., Tensor]) -> list[Tensor]:
    model = make(mode, code)
    backward(model, torch.ones(3, 8))
    return [parameter.grad.to_local() for parameter in model.parameters()]


class Failure(Exception):
    """Raised by a block's code."""


def fail_in_recomputation(mode: str) -> None:
    fails = False

    def code(block: Block, x: Tensor, inner: Tensor) -> Tensor:
        if fails and block is failing:
            raise Failure
        return block.down(inner)

    model = make(mode, code)
    failing = model.blocks[1]
    loss = model(torch.ones(3, 8)).square().sum()
    fails = True
    with pytest.raises(Failure):
        loss.backward()
    fails = False
    model.zero_grad()
    backward(model, torch.ones(3, 8))
    right = gradients_of("none", plain)
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        assert torch.equal(parameter.grad.to_local(), gradient)


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_in_a_recomputation_reaches_the_caller_and_the_next_step_is_right(ranks, mode):
    ranks(1).run(fail_in_recomputation, mode)


def note_input(inputs: list[Any], _: nn.Module, args: tuple[Tensor, ...]) -> None:
    inputs.append(weakref.ref(args[0]))


def count_alive(mode: str) -> list[int]:
    """Return how many inputs of blocks live on after the graph,
    though a backward pass has asked for a part of it alone.
    """
    model, alive = make(mode, plain), list[int]()
    gc.collect()
    gc.disable()
    try:
        for run in (backward, backward_to_some, lambda model, x: model(x)):
            inputs: list[weakref.ref[Tensor]] = []
            note = partial(note_input, inputs)
            hooks = [block.up.register_forward_pre_hook(note) for block in model.blocks]
            x = torch.ones(3, 8, requires_grad=True)
            run(model, x)
            alive.append(sum(each() is not None and each() is not x for each in inputs))
            for hook in hooks:
                hook.remove()
    finally:
        gc.enable()
    return alive


@pytest.mark.parametrize("mode", MODES)
def test_nothing_lives_longer_than_the_graph(ranks, mode):
    assert ranks(1).run(count_alive, mode)[0] == [0, 0, 0]


def count_gathered_weights() -> dict[str, tuple[int, int]]:
    """Return how many weights one forward pass gathers over z, and how many of them live on to the backward pass."""
    found = {}
    for mode in MODES:
        model, gathered = make(mode, plain, z=2), list[weakref.ref[Any]]()
        gather_weight = WeightShard.gather

        def gather(*args: Any, note: Any = gathered.append, gather: Any = gather_weight, **options: Any) -> Any:
            weight = gather(*args, **options)
            note(weakref.ref(weight.rows.untyped_storage()))
            return weight

        with mock.patch.object(WeightShard, "gather", gather):
            loss = model(torch.ones(3, 8)).sum()
        deadline = time.monotonic() + LIMIT
        while any(each() is not None for each in gathered) and time.monotonic() < deadline:
            time.sleep(0.001)  # gloo's thread may not have let go of the last one
        found[mode] = len(gathered), sum(each() is not None for each in gathered)
        loss.backward()
    return found


@pytest.mark.long
def test_weights_are_freed_between_the_passes(ranks):
    assert ranks(2).run(count_gathered_weights) == [dict.fromkeys(MODES, (8, 0))] * 2


def run_other_code_again(mode: str, adds: bool) -> None:
    """In the recomputation a block goes through one step more, or less, than in its forward pass."""
    is_again = False

    def code(block: Block, x: Tensor, inner: Tensor) -> Tensor:
        return block.down(inner if is_again != adds else inner.view(-1).sin().view_as(inner))

    loss = make(mode, code)(torch.ones(3, 8)).square().sum()
    is_again = True
    with pytest.raises(RuntimeError, match=r"run the same code again|different metadata|different number"):
        loss.backward()


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("mode", ["full", "every:2", "every:3"])
def test_blocks_whose_recomputation_runs_other_code_raise(ranks, mode, adds):
    ranks(1).run(run_other_code_again, mode, adds)
