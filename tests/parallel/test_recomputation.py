# SPDX-License-Identifier: Apache-2.0
"""Modes of recomputation: the same gradients to the bit, and what each mode sends and keeps."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stretto.execution import Recomputation
from stretto.models import GPT, GPTConfig
from stretto.parallel import (
    Grid,
    checkpoint_activations,
    count_collectives,
    no_sync,
    parallelize,
    recomputation_contexts,
    run_once,
)
from stretto.parallel.blocks import find_blocks
from stretto.parallel.layers.fused import rotary_angles
from stretto.parallel.recomputation import _HostInputs
from stretto.recommendation.pooled_exchange import exchange_parts
from tests.parallel import zoo
from tests.parallel.training import Sizes, my_rows
from tests.peak_memory import PeakMemory

SEED = 11
BATCH, SEQ_LEN = 8, 8
MODES = ("full", "every:2", "every:3", "products", "communication", "host")
CONFIG = GPTConfig(
    layers=4, hidden=32, heads=4, kv_heads=2, vocab=61, max_seq_len=SEQ_LEN, dropout=0.1, activation="swiglu",
    positions="rotary",
)  # fmt: skip


def make_grid(sizes: Sizes) -> Grid:
    return Grid(**dict(zip(("data", "x", "y", "z"), sizes, strict=True)))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's parts of all gradients."""
    return {
        name: parameter.grad.to_local() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def differences(right: dict[str, Tensor], found: dict[str, dict[str, Tensor]]) -> list[str]:
    """Return which gradients of which modes are not those of no recomputation, to the bit."""
    assert len(right) > 10
    assert all(bool(gradient.isfinite().all()) for gradient in right.values())
    return [
        f"{mode}: {name}"
        for mode, seen in found.items()
        for name in right
        if name not in seen or not torch.equal(seen[name], right[name])
    ]


def train_gpt(sizes: Sizes, recompute: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Two micro-batches, the first within no_sync, with dropout and a frozen block."""
    grid = make_grid(sizes)
    torch.manual_seed(SEED)
    model = parallelize(GPT(CONFIG), grid, recompute=recompute, **options)
    model.blocks[1].requires_grad_(False)
    text = torch.randint(CONFIG.vocab, (BATCH, SEQ_LEN + 1))[my_rows(grid, BATCH)]
    torch.manual_seed(SEED + 1)
    first, second = text.chunk(2)
    with no_sync(model):
        model(first[:, :-1], first[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
    model(second[:, :-1], second[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
    return gradients(model)


def compare_modes(sizes: Sizes, options: dict[str, Any]) -> list[str]:
    right = train_gpt(sizes, "none", options)
    return differences(right, {mode: train_gpt(sizes, mode, options) for mode in MODES})


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 1, 1), {}),
        pytest.param((1, 2, 1, 2), {"reshard": "after_forward"}, marks=pytest.mark.exhaustive),
        pytest.param((1, 1, 2, 1), {}, marks=pytest.mark.exhaustive),
        pytest.param((2, 1, 1, 2), {}, marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 1, 1), {"shard_sequence": True}, marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 2, 1), {"shard_sequence": True}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_all_modes_give_the_same_gradients_to_the_bit(ranks, sizes, options):
    print(f"seed {SEED}")
    count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert ranks(count).run(compare_modes, sizes, options) == [[]] * count


def train_hugging_face(sizes: Sizes, family: str, task: str, recompute: str, blocks: bool) -> dict[str, Tensor]:
    grid = make_grid(sizes)
    torch.manual_seed(SEED)
    model = zoo.build(family, task)
    parallelize(model.train(), grid, recompute=recompute, blocks=find_blocks(model) if blocks else None)
    rows = grid.coordinate("batch"), grid.size("batch")
    batch = {name: value.chunk(rows[1])[rows[0]] for name, value in zoo.make_batch(task).items()}
    model(**batch).loss.backward()
    return gradients(model)


def compare_hugging_face(sizes: Sizes, family: str, task: str, blocks: bool) -> list[str]:
    train = partial(train_hugging_face, sizes, family, task, blocks=blocks)
    # Torch's own checkpoint gives T5's gradients other last bits than none.
    right = train("full" if family == "t5" else "none")
    modes = ("full", "every:2", "products", "communication", "host")
    return differences(right, {mode: train(mode) for mode in modes})


X2, Y2, Z2 = (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)


@pytest.mark.parametrize(
    ("sizes", "family", "task", "blocks"),
    [
        pytest.param(X2, "llama", "causal", False, marks=pytest.mark.long),
        pytest.param(Z2, "bart", "seq2seq", True, marks=pytest.mark.exhaustive),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                *((X2, family, "causal", False) for family in ("gpt2", "falcon", "opt", "bloom", "gemma2", "phi3")),
                (Y2, "qwen3", "causal", False),
                *((Z2, family, "causal", True) for family in ("llama", "gpt2", "falcon", "mamba")),
                (Z2, "t5", "seq2seq", True),
                (Z2, "bert", "masked", True),
            )
        ),
    ],
    ids=str,
)
def test_hugging_face_models_take_all_modes_with_roles_and_block_by_block(ranks, sizes, family, task, blocks):
    print(f"seed {SEED}")
    count = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    assert ranks(count).run(compare_hugging_face, sizes, family, task, blocks) == [[]] * count


def calls_of_a_block(sizes: Sizes, recompute: str, shards: bool) -> tuple[Counter[Any], Counter[Any]]:
    """The collectives of one block in its forward pass, and in its backward pass with the recomputation."""
    grid = make_grid(sizes)
    torch.manual_seed(SEED)
    model = parallelize(GPT(CONFIG), grid, recompute=recompute, shard_sequence=shards, overlap=False)
    block: Any = model.blocks[0]
    rows, middle = 2, SEQ_LEN
    if shards:
        block.attention.qkv.plan.tokens.note(torch.Size((rows, middle)))
        rows, middle = 1, rows * middle // grid.size("x")
    x = torch.randn(rows, middle, CONFIG.hidden // grid.size("y"), requires_grad=True)
    angles = rotary_angles(torch.arange(SEQ_LEN, device=x.device), CONFIG.head_dim)
    with count_collectives(grid) as forward:
        y = block(x, angles)
    with count_collectives(grid) as backward:
        y.sum().backward()
    first, second = (
        Counter((call.axis, call.kind, call.bytes_sent) for call in counts.calls if call.ranks > 1)
        for counts in (forward, backward)
    )
    return first, second


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        (X2, False),
        pytest.param(Y2, False, marks=pytest.mark.exhaustive),
        pytest.param(X2, True, marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 2, 1), True, marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 1, 2), False, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_block_sends_activations_once_under_communication_and_twice_under_full(ranks, sizes, shards):
    pool = ranks(sizes[0] * sizes[1] * sizes[2] * sizes[3])
    forward, backward = pool.run(calls_of_a_block, sizes, "none", shards)[0]
    sent = Counter({call: count for call, count in forward.items() if call[0] in ("x", "y")})
    weights = forward - sent  # over z: gathered again in every mode
    assert sent
    assert bool(weights) == (sizes[3] > 1)
    for mode, times in {"full": 2, "every:2": 2, "host": 2, "communication": 1}.items():
        again = pool.run(calls_of_a_block, sizes, mode, shards)[0]
        assert again[0] == forward
        assert again[1] - backward == weights + (sent if times == 2 else Counter()), mode
        assert not backward - again[1]


def train_without_dropout(sizes: Sizes, recompute: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], int, int]:
    """Gradients, and how many products and sums over x one step makes."""
    grid = make_grid(sizes)
    torch.manual_seed(SEED)
    model = parallelize(GPT(replace(CONFIG, dropout=0.0)), grid, recompute=recompute, **options)
    text = torch.randint(CONFIG.vocab, (BATCH, SEQ_LEN + 1))[my_rows(grid, BATCH)]
    with Products() as products, count_collectives(grid) as counts:
        model(text[:, :-1], text[:, 1:], num_targets=BATCH * SEQ_LEN).backward()
    sums = sum(call.axis == "x" and call.kind in ("all_reduce", "reduce_scatter") for call in counts.calls)
    return gradients(model), products.count, sums


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "options", "sums"),
    [
        ((1, 2, 1, 1), {}, 2),
        pytest.param((1, 1, 1, 2), {"reshard": "after_forward"}, 0, marks=pytest.mark.exhaustive),
        pytest.param((1, 2, 1, 1), {"shard_sequence": True}, 2, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_block_that_is_computed_again_ends_before_its_last_linear(ranks, sizes, options, sums):
    """Nobody would read its output. 4 blocks of 5 linears, of which 2 sum their outputs over x."""
    print(f"seed {SEED}")
    pool = ranks(2)
    right, products, sent = pool.run(train_without_dropout, sizes, "none", options)[0]
    for mode, segments in {"full": 4, "host": 4, "every:2": 2, "every:3": 2}.items():
        seen = pool.run(train_without_dropout, sizes, mode, options)[0]
        assert not differences(right, {mode: seen[0]})
        assert seen[1:] == (products + 4 * 5 - segments, sent + 4 * sums - segments * (sums > 0)), mode


@pytest.mark.long
def test_products_sends_no_sum_again_but_statistics_of_norms_and_gathered_tokens(ranks):
    forward, backward = ranks(2).run(calls_of_a_block, Y2, "none", False)[0]
    again = ranks(2).run(calls_of_a_block, Y2, "products", False)[0][1] - backward
    assert again == Counter({call: count for call, count in forward.items() if call[1] == "all_gather"})
    forward, backward = ranks(2).run(calls_of_a_block, X2, "none", True)[0]
    again = ranks(2).run(calls_of_a_block, X2, "products", True)[0][1] - backward
    assert again == Counter({call: count for call, count in forward.items() if call[1] == "all_gather"})


class Doubling(nn.Module):
    """Writes to what its linear returns, as some models do, and counts its calls."""

    def __init__(self, writes: bool = True) -> None:
        super().__init__()
        self.writes = writes
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.counted: list[float] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.up(x).tanh()
        run_once(self.counted.append, float(y.detach().sum()))
        y = self.down(y)
        if self.writes:
            y += 1.0
        return x + y.sin()


class Loop(nn.Module):
    """Blocks in a loop that may do something of its own between two blocks."""

    def __init__(self, between: float = 1.0, writes: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Doubling(writes) for _ in range(4))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.between == 1.0 else block(x * self.between)
        return x


ROLES = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def train_loop(recompute: str) -> tuple[list[Tensor], list[int], list[int]]:
    """Gradients of two backward passes through one graph; calls of blocks, and of what runs once."""
    grid = Grid(x=2)
    torch.manual_seed(SEED)
    model = parallelize(Loop(), grid, roles=ROLES, recompute=recompute)
    x = torch.randn(3, 8, requires_grad=True)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    found = [x.grad, *gradients(model).values()]
    return found, [block.calls for block in model.blocks], [len(block.counted) for block in model.blocks]


def compare_loops() -> dict[str, tuple[bool, list[int], list[int]]]:
    right = train_loop("none")[0]
    found = {}
    for mode in MODES:
        seen, calls, counted = train_loop(mode)
        found[mode] = all(map(torch.equal, seen, right)), calls, counted
    return found


@pytest.mark.long
def test_outputs_that_are_overwritten_graphs_that_are_kept_and_functions_that_run_once(ranks):
    """Each block runs once in the forward pass, and once in each of two backward passes; run_once counts one."""
    print(f"seed {SEED}")
    expected = dict.fromkeys(MODES, (True, [3] * 4, [1] * 4))
    assert ranks(2).run(compare_loops) == [expected] * 2


def exchange_in_recomputation(mode: str) -> tuple[int, Tensor]:
    grid = Grid(x=2)
    pooled = torch.arange(12.0).view(4, 3).requires_grad_()
    with count_collectives(grid) as counts:
        checkpoint(
            lambda x: exchange_parts(x.sin().flatten(), [6, 6], [6, 6], grid.group("x"), needs_grad=True).square(),
            pooled,
            use_reentrant=False,
            context_fn=partial(recomputation_contexts, mode),
        ).sum().backward()
    return len(counts.calls), pooled.grad


def test_a_pooled_exchange_is_not_sent_again(ranks):
    full, communication = (ranks(2).run(exchange_in_recomputation, mode)[0] for mode in ("full", "communication"))
    assert (full[0], communication[0]) == (3, 2)
    assert torch.equal(full[1], communication[1])


def refuse() -> None:
    grid = Grid()
    for mode in ("ful", "every:0", "every:x", "every:", True):
        with pytest.raises(ValueError, match=r"must be one of none, full, products, communication, host, or every:k"):
            parallelize(Loop(), grid, roles=ROLES, recompute=mode)
    with pytest.raises(ValueError, match="the model has 4 blocks; every:4 would do"):
        parallelize(Loop(), grid, roles=ROLES, recompute="every:5")
    untouched = Loop()
    with pytest.raises(ValueError, match=r"has no nn\.ModuleList"):
        parallelize(untouched.blocks[0], grid, roles={"up": "colwise", "down": "rowwise"}, recompute="host")
    assert type(untouched.blocks[0].up) is nn.Linear
    gaps = parallelize(Loop(between=0.5), grid, roles=ROLES, recompute="every:2")
    with pytest.raises(ValueError, match="block 1 was not given what block 0 returned; recompute='full' would do"):
        gaps(torch.ones(2, 8))
    loop = zoo.build("ctrl", "causal")
    with pytest.raises(ValueError, match="does not support activation checkpointing"):
        parallelize(loop, grid, blocks=["transformer.h.*"], recompute="communication")
    loop.supports_gradient_checkpointing = True
    with pytest.raises(ValueError, match="in a loop of its own, which computes each again by itself"):
        parallelize(loop, grid, blocks=["transformer.h.*"], recompute="every:2")


def test_modes_and_models_that_do_not_go_together_are_refused(ranks):
    ranks(1).run(refuse)


def overwrite_inputs() -> None:
    class Overwriting(Doubling):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2) if x.requires_grad and not x.is_leaf else x)

    for mode, words in (("host", "recompute='full' keeps it on the device"), ("every:2", "write to a copy")):
        model = Loop()
        model.blocks = nn.ModuleList(Overwriting() for _ in range(4))
        parallelize(model, Grid(), roles=ROLES, recompute=mode)
        with pytest.raises(RuntimeError, match=words):
            model(torch.ones(2, 8, requires_grad=True) * 1.0).sum().backward()


def test_blocks_that_overwrite_their_input_raise(ranks):
    ranks(1).run(overwrite_inputs)


def test_modes_are_parsed_and_unknown_ones_refused():
    assert Recomputation.parse("every:12") == ("every", 12)
    with pytest.raises(ValueError, match="recompute is 'communicate'"):
        checkpoint_activations(Loop(), "communicate")


def bytes_left(mode: str) -> list[int]:
    """Bytes that are alive after each of three steps, without a garbage collection."""
    model = parallelize(Loop(), Grid(), roles=ROLES, recompute=mode)
    gc.collect()
    gc.disable()
    left = []
    try:
        with PeakMemory() as memory:
            for _ in range(3):
                model(torch.ones(3, 8)).square().sum().backward()
                model.zero_grad()
                left.append(memory.now)
    finally:
        gc.enable()
    return left


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_after_the_backward_pass(ranks, mode):
    left = ranks(1).run(bytes_left, mode)[0]
    assert left[0] == left[1] == left[2]


def inputs_alive(mode: str) -> list[bool]:
    """True if the input of each block is alive between the passes."""
    model = parallelize(Loop(), Grid(), roles=ROLES, recompute=mode)
    inputs: list[Any] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    loss = model(torch.ones(3, 8) * 2).sum()
    alive = [storage() is not None for storage in inputs]
    loss.backward()
    return alive


def test_inputs_leave_with_host_and_every_second_one_is_never_kept_with_every_2(ranks):
    expected = {"full": [True] * 4, "host": [False] * 4, "every:2": [True, False] * 2}
    assert {mode: ranks(1).run(inputs_alive, mode)[0] for mode in expected} == expected


def test_the_inputs_of_the_block_before_are_fetched_meanwhile():
    tensors = [torch.randn(3, requires_grad=True), torch.randn(3)]
    first = _HostInputs(tensors[:1], None, None)
    second = _HostInputs(tensors[1:], None, first)
    assert first._fetched is None
    (found,) = second.get()
    assert torch.equal(found, tensors[1])
    assert not found.requires_grad
    assert first._fetched is not None
    for _ in range(2):  # of a graph that is kept
        (found,) = first.get()
        assert torch.equal(found, tensors[0])
        assert found.requires_grad
        assert found.is_leaf


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def count_products(options: dict[str, Any]) -> dict[str, int]:
    """By the mode, "none" among them."""
    found, grid = {}, Grid(x=2)
    for mode in ("none", *MODES):
        model = parallelize(Loop(writes=False), grid, recompute=mode, **options)
        with Products() as products:
            model(torch.ones(3, 8)).sum().backward()
        found[mode] = products.count
    return found


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is sharded only over z")
def test_products_that_are_kept_or_whose_sum_is_kept_are_not_computed_again(ranks):
    """4 blocks of two linears, the second of which is summed over x."""
    for options, of_sum in (({"roles": ROLES}, 4), ({"blocks": ["blocks.*"]}, 0)):
        found = ranks(2).run(count_products, options)[0]
        again = {mode: found[mode] - found["none"] for mode in MODES}
        whole = dict.fromkeys(("full", "every:2", "every:3", "host"), 8)
        assert again == whole | {"products": 0, "communication": 8 - of_sum}
