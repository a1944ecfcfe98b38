# SPDX-License-Identifier: Apache-2.0
"""Weights that are pushed over z are the weights that a process group gathers."""

import importlib
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from stretto.models import GPT, GPTConfig
from stretto.ops.embedding.move_rows import look_up_rows
from stretto.parallel import Grid, Overlap, checkpoint_activations, gather_once, no_sync, parallelize
from stretto.parallel.comm import copy_engine_gather, copy_engine_scatter, gradient_reducer, weight_gathering
from stretto.parallel.comm.collectives import gather_rows
from stretto.parallel.comm.copy_engine_gather import CopyEngineAllGather, CopyEngineGatherer
from stretto.parallel.comm.copy_engine_scatter import MAX_STARTED, CopyEngineReduceScatter, ScatterRing
from stretto.parallel.layers import block_shard, linear, weight_shard
from stretto.parallel.layers.embedding import ParallelEmbedding
from stretto.parallel.layout import local, version_of

WEIGHTS = 9  # of the model: two blocks of four linears, and the head; the embedding is looked up where its rows are


SEED = 23

BATCH, SEQ_LEN = 6, 6

CONFIG = GPTConfig(layers=2, hidden=24, heads=2, vocab=37, max_seq_len=SEQ_LEN)


class Setup:
    """A model on a grid, and this rank's rows of a fixed text."""

    def __init__(
        self, x: int, z: int, *, is_pushed: bool, dtype: torch.dtype | None = None, blocks: list[str] | None = None
    ) -> None:
        self.grid = Grid(x=x, z=z)
        torch.manual_seed(SEED)
        module = importlib.import_module("stretto.parallel.builder")
        with (
            mock.patch.object(module, "have_copy_engines", lambda group, device: group.size() > 1),
            mock.patch.object(module, "CopyEngineAllGather", partial(CopyEngineAllGather, backend="host")),
            mock.patch.object(module, "make_scatter_ring", partial(ScatterRing, backend="host")),
            mock.patch.object(block_shard, "MIN_COPIED_BYTES", 1),
        ):
            overlap = Overlap(copy_engines=is_pushed)
            self.model = parallelize(GPT(CONFIG), self.grid, overlap=overlap, dtype=dtype, blocks=blocks)
        text = torch.randint(CONFIG.vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
        self.text = text.chunk(z)[self.grid.coordinate("z")]
        self.gathers = self.scatters = 0

    @property
    def pushed(self) -> CopyEngineAllGather | None:
        shard = next(m.plan.shard for m in self.model.modules() if isinstance(m, linear.ParallelLinear))
        gatherer = shard.gatherer.inner
        return gatherer.copies if isinstance(gatherer, CopyEngineGatherer) else None

    @property
    def num_pushed(self) -> int:
        return 0 if self.pushed is None else len(self.pushed._places)

    def loss(self) -> torch.Tensor:
        return self.model(self.text[:, :-1], self.text[:, 1:], num_targets=BATCH * SEQ_LEN)

    def update(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
                parameter.grad = None

    def shards(self) -> list[torch.Tensor]:
        return [parameter.to_local().detach().clone() for parameter in self.model.parameters()]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the weights and gradients that go through the process group."""
        gather, scatter = weight_gathering.start_gather_rows, weight_shard.start_scatter_rows

        def counted_gather(*arguments: Any) -> Any:
            self.gathers += 1
            return gather(*arguments)

        def counted_scatter(*arguments: Any) -> Any:
            self.scatters += 1
            return scatter(*arguments)

        with (
            mock.patch.object(weight_gathering, "start_gather_rows", counted_gather),
            mock.patch.object(weight_shard, "start_scatter_rows", counted_scatter),
            mock.patch.object(copy_engine_scatter, "start_scatter_rows", counted_scatter),
        ):
            yield


def train(x: int, z: int, is_pushed: bool, dtype: torch.dtype | None, straggles: bool) -> dict[str, Any]:
    """Three steps; the second and third know the order of use."""
    setup = Setup(x, z, is_pushed=is_pushed, dtype=dtype)
    pause = random.Random(SEED + setup.grid.coordinate("world"))
    real = CopyEngineAllGather._copy_to_peers

    def late(*arguments: Any) -> None:
        time.sleep(pause.random() / 50)
        real(*arguments)

    with (
        setup.counting(),
        mock.patch.object(CopyEngineAllGather, "_copy_to_peers", late if straggles else real),
        mock.patch.object(copy_engine_scatter, "SCATTER_RING_BYTES", 1),  # so that the ring is full at times
    ):
        for _ in range(3):
            loss = setup.loss()
            if straggles:
                time.sleep(pause.random() / 10)
            loss.backward()
            setup.update()
    counts = {"gathers": setup.gathers, "scatters": setup.scatters, "pushed": setup.num_pushed}
    return {"shards": setup.shards()} | counts


@pytest.mark.long
@pytest.mark.parametrize(
    ("x", "z", "dtype", "straggles", "tolerance"),
    # Over two ranks both ways add the same two numbers; in bf16 the group rounds their sum, and pushes do not.
    [
        pytest.param(1, 2, None, True, 0, marks=pytest.mark.exhaustive),
        (2, 2, torch.bfloat16, False, 1e-2),
        pytest.param(1, 3, None, True, 1e-6, marks=pytest.mark.exhaustive),
    ],
)
def test_training_is_the_same_and_only_gradients_of_embedding_and_head_go_through_the_group(
    interpret, x, z, dtype, straggles, tolerance
):
    pushed = interpret(x * z, train, x, z, True, dtype, straggles)
    plain = interpret(x * z, train, x, z, False, dtype, False)
    for ours, other in zip(pushed, plain, strict=True):
        for mine, theirs in zip(ours["shards"], other["shards"], strict=True):
            assert torch.equal(mine, theirs) or (mine - theirs).norm() < tolerance * theirs.norm()
        assert (ours["pushed"], other["pushed"]) == (WEIGHTS + 1, 0)
        assert (ours["gathers"], other["gathers"]) == (0, 3 * (WEIGHTS + 1))
        assert (ours["scatters"], other["scatters"]) == (3 * 2, 3 * (WEIGHTS + 1))


def note_what_starts() -> str:
    """What a third step's forward pass starts or takes: a gather by the group, copies of a weight, or a weight."""
    setup, events = Setup(1, 2, is_pushed=True), []
    copy, take, gather = (
        CopyEngineAllGather._copy_to_peers,
        CopyEngineAllGather._wait_for,
        weight_gathering.start_gather_rows,
    )

    def note(event: str, function: Any, *arguments: Any, **options: Any) -> Any:
        events.append(event)
        return function(*arguments, **options)

    def note_take(copies: CopyEngineAllGather, key: object, *arguments: Any, **options: Any) -> Any:
        return note("t" if key in copies._places else "", take, copies, key, *arguments, **options)

    with (
        mock.patch.object(copy_engine_gather, "CAST_AT_ONCE", 4),
        mock.patch.object(CopyEngineAllGather, "_copy_to_peers", lambda *each: note("c", copy, *each)),
        mock.patch.object(CopyEngineAllGather, "_wait_for", note_take),
        mock.patch.object(weight_gathering, "start_gather_rows", partial(note, "g", gather)),
    ):
        for _ in range(3):
            events.clear()
            loss = setup.loss()
            found = "".join(events)
            loss.backward()
            setup.update()
    return found


def note_sums() -> str:
    """What a backward pass does with gradients whose ring is small: comes with one, begins to send it, sums one."""
    setup, events = Setup(1, 2, is_pushed=True), []
    reducer, scatter = gradient_reducer.GradientReducer, copy_engine_scatter.CopyEngineReduceScatter
    come, start, finish = reducer.reduce_scatter_gradient, scatter.start, scatter.finish

    def note(event: str, function: Any, *arguments: Any, **options: Any) -> Any:
        events.append(event)
        return function(*arguments, **options)

    with (
        mock.patch.object(copy_engine_scatter, "SCATTER_RING_BYTES", 1),
        mock.patch.object(reducer, "reduce_scatter_gradient", lambda *each, **how: note("g", come, *each, **how)),
        mock.patch.object(scatter, "start", lambda *each: note("s", start, *each)),
        mock.patch.object(scatter, "finish", lambda *each: note("f", finish, *each)),
    ):
        setup.loss().backward()
    return "".join(events)


def test_room_is_made_before_the_next_gradient_needs_it(interpret):
    for events in interpret(2, note_sums):
        assert "sf" in events  # the ring is full at times
        assert not re.search("gf+s", events)


@pytest.mark.long
def test_a_pass_begins_with_the_embedding_and_the_first_weights_and_copies_the_others_under_these(interpret):
    assert interpret(2, note_what_starts) == ["cccc" + "ttt" + "cccccc" + "ttttttt"] * 2


def hold_two_graphs(is_pushed: bool) -> list[torch.Tensor]:
    """Two forward passes before their two backward passes."""
    setup = Setup(1, 2, is_pushed=is_pushed)
    first, second = setup.loss(), setup.loss()
    first.backward()
    second.backward()
    setup.update()
    return setup.shards()


@pytest.mark.long
def test_two_passes_may_be_alive_at_once(interpret):
    for ours, other in zip(*(interpret(2, hold_two_graphs, way) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours, other))


def write_copies(writes: bool) -> dict[str, Any]:
    """Steps of an optimizer that writes what copy engines send, and what the passes cast all the same."""
    setup, casts = Setup(1, 2, is_pushed=True, dtype=torch.bfloat16), []
    real = torch._foreach_copy_

    def note(into: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        casts.append(len(shards))
        real(into, shards)

    def step(rate: float) -> None:
        with torch.no_grad():
            for parameter in setup.model.parameters():
                copy = parameter.low_precision_weight if writes else None
                written = None if copy is None else copy.open(parameter)
                shard = parameter.to_local()
                shard.sub_(parameter.grad.to_local(), alpha=rate)
                torch.autograd.graph.increment_version(parameter)
                if written is not None:
                    written.copy_(shard)
                    copy.close(parameter)
                parameter.grad = None

    losses, counts = [], []
    with mock.patch.object(torch, "_foreach_copy_", note):
        for number in range(5):
            casts.clear()
            loss = setup.loss()
            counts.append(sum(casts))
            losses.append(float(loss))
            loss.backward()
            if number < 4:
                step(0.1)
            if number == 2:  # by somebody else: every copy is cast again
                with torch.no_grad():
                    for parameter in setup.model.parameters():
                        parameter.mul_(0.9)
        pushed = setup.pushed
        assert pushed is not None
        late = setup.loss()
        if writes:
            for parameter in setup.model.parameters():
                if parameter.low_precision_weight is not None:
                    parameter.low_precision_weight.open(parameter)
            with pytest.raises(RuntimeError, match="written over by a forward pass or an optimizer's copy"):
                late.backward()
        pushed.stop()
        for parameter in setup.model.parameters():
            assert parameter.low_precision_weight is None or parameter.low_precision_weight.open(parameter) is None
    return {"losses": losses, "casts": counts, "shards": setup.shards()}


def test_an_optimizer_writes_weights_where_they_are_sent_from(interpret):
    for ours, plain in zip(*(interpret(2, write_copies, writes) for writes in (True, False)), strict=True):
        assert ours["losses"] == plain["losses"]
        assert all(map(torch.equal, ours["shards"], plain["shards"]))
        every = WEIGHTS + 1  # the embedding's rows are cast in each pass, since others may still read them
        assert (ours["casts"], plain["casts"]) == ([every, 1, 1, every, 1], [every] * 5)


def change_before_backward() -> str:
    """Return what the backward pass says if the weights it needs were written over."""
    setup = Setup(1, 2, is_pushed=True)
    early = setup.loss()
    with torch.no_grad():
        for parameter in setup.model.parameters():
            if parameter.dim() == 2:  # of norms, which are not gathered, autograd itself says it
                parameter.mul_(0.5)
    setup.loss()
    try:
        early.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_weights_that_were_written_over_before_the_backward_pass_are_named(interpret):
    for message in interpret(2, change_before_backward):
        assert "was changed" in message
        assert "blocks.1.mlp.down" in message


def keep_a_graph_of_a_part() -> list[bool]:
    """True if a submodule's own graph, made outside of a pass, has its gradients after passes with other weights."""
    setup = Setup(1, 2, is_pushed=True)
    hidden = torch.ones(1, SEQ_LEN, CONFIG.hidden, requires_grad=True)
    setup.loss().backward()
    setup.update()
    early = setup.model.blocks[0].mlp(hidden)
    expected = torch.autograd.grad(setup.model.blocks[0].mlp(hidden).sum(), hidden)[0]
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter.mul_(0.5)
    setup.loss()
    return [torch.equal(torch.autograd.grad(early.sum(), hidden)[0], expected)]


def test_weights_gathered_outside_of_a_pass_are_never_overwritten(interpret):
    assert interpret(2, keep_a_graph_of_a_part) == [[True], [True]]


def call_a_part(is_pushed: bool) -> list[torch.Tensor]:
    """A submodule by itself, after the weights have changed in a way that no version counter shows; then all."""
    setup = Setup(1, 2, is_pushed=is_pushed)
    setup.loss().backward()
    hidden = torch.ones(1, SEQ_LEN, CONFIG.hidden)
    for parameter in setup.model.parameters():
        parameter.to_local().detach().numpy()[...] *= 0.5
    with torch.no_grad():
        part = setup.model.blocks[0].mlp(hidden)
        return [part, setup.loss()]


def test_calls_outside_of_a_pass_see_the_current_weights(interpret):
    for ours, other in zip(*(interpret(2, call_a_part, way) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours, other))


def use_a_table_in_many_ways(is_pushed: bool) -> list[torch.Tensor]:
    """Losses and weights where the embedding is called alone, frozen, thawed, written in place and twice in a pass."""
    setup = Setup(1, 2, is_pushed=is_pushed)
    (table,) = (m for m in setup.model.modules() if isinstance(m, ParallelEmbedding))
    found = []
    for step in range(5):
        table.weight.requires_grad_(step != 1)
        first, second = setup.loss(), setup.loss()
        (first + second).backward()
        with torch.no_grad():
            found += [first.detach(), setup.loss(), table(setup.text[:1])]
            for parameter in setup.model.parameters():
                if parameter.grad is not None:
                    parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
                    parameter.grad = None
            if step == 2:  # in a way that no version counter shows
                table.weight.to_local().detach().numpy()[...] *= 0.5
    return [*found, *setup.shards()]


@pytest.mark.long
def test_an_embedding_is_right_when_called_alone_frozen_written_in_place_and_twice_in_a_pass(interpret):
    for ours, other in zip(*(interpret(2, use_a_table_in_many_ways, way) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours, other))


def checkpoint_later(is_pushed: bool, how: str) -> dict[str, Any]:
    """Activation checkpointing, by Stretto's own function or by the user, who tells nobody."""
    setup = Setup(1, 2, is_pushed=is_pushed)
    if how == "stretto":
        checkpoint_activations(setup.model)
    else:
        for block in setup.model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=how == "reentrant")
    for _ in range(3):
        setup.loss().backward()
        setup.update()
    return {"shards": setup.shards(), "pushed": setup.num_pushed}


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["stretto", "reentrant", "not reentrant"])
def test_activation_checkpointing_ends_it_and_frees_its_memory(interpret, how):
    for ours, other in zip(*(interpret(2, checkpoint_later, way, how) for way in (True, False)), strict=True):
        assert all(map(torch.equal, ours["shards"], other["shards"]))
        assert ours["pushed"] == 0


def train_in_micro_batches(is_pushed: bool, once: bool, checkpoints: bool) -> dict[str, Any]:
    """Two steps of three micro-batches; what is gathered by copies, and through the process group."""
    setup = Setup(1, 2, is_pushed=is_pushed)
    if checkpoints:
        checkpoint_activations(setup.model)
    real, copies = CopyEngineAllGather._copy_to_peers, []

    def counted(*arguments: Any) -> None:
        copies.append(1)
        real(*arguments)

    with setup.counting(), mock.patch.object(CopyEngineAllGather, "_copy_to_peers", counted):
        for _ in range(2):
            with gather_once(setup.model) if once else nullcontext():
                for number in range(3):
                    with no_sync(setup.model) if number < 2 else nullcontext():
                        (setup.loss() * (number + 1)).backward()
            setup.update()
    return {"shards": setup.shards(), "copies": len(copies), "gathers": setup.gathers, "pushed": setup.num_pushed}


@pytest.mark.long
@pytest.mark.parametrize("checkpoints", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_step_gathers_each_weight_once_for_all_micro_batches(interpret, checkpoints):
    plain, pushed, each_time = (
        interpret(2, train_in_micro_batches, is_pushed, once, checkpoints)
        for is_pushed, once in ((False, True), (True, True), (False, False))
    )
    for one, ours, other in zip(plain, pushed, each_time, strict=True):
        assert all(map(torch.equal, ours["shards"], other["shards"]))
        assert all(map(torch.equal, one["shards"], other["shards"]))
        assert (one["copies"], one["gathers"]) == (0, 2 * (WEIGHTS + 1))
        assert (ours["copies"], ours["gathers"], ours["pushed"]) == (2 * (WEIGHTS + 1), 0, WEIGHTS + 1)
        assert other["gathers"] >= 6 * (WEIGHTS + 1)


def train_blocks(is_pushed: bool, once: bool) -> list[torch.Tensor]:
    """A model that is sharded by blocks, which are checkpointed: two steps of two micro-batches."""
    setup = Setup(1, 2, is_pushed=is_pushed, blocks=["blocks.*"])
    for block in setup.model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for _ in range(2):
        with gather_once(setup.model) if once else nullcontext():
            with no_sync(setup.model):
                setup.loss().backward()
            setup.loss().backward()
        setup.update()
    return setup.shards()


@pytest.mark.long
def test_blocks_are_gathered_once_too(interpret):
    runs = [
        interpret(2, train_blocks, is_pushed, once) for is_pushed, once in ((True, True), (False, True), (False, False))
    ]
    for pushed, once, each_time in zip(*runs, strict=True):
        assert all(map(torch.equal, pushed, each_time))
        assert all(map(torch.equal, once, each_time))


def change_in_a_step() -> list[bool]:
    """True if passes see weights that changed inside all the same, as their versions say so; and after it."""
    losses = []
    for is_pushed, once in ((True, True), (False, False)):
        setup = Setup(1, 2, is_pushed=is_pushed)
        seen = []
        for _ in range(2):
            with gather_once(setup.model) if once else nullcontext():
                for _ in range(2):
                    loss = setup.loss()
                    loss.backward()
                    seen.append(loss.detach())
                    setup.update()
        losses.append(seen)
    return [torch.equal(*pair) for pair in zip(*losses, strict=True)]


@pytest.mark.long
def test_a_weight_that_is_changed_inside_is_gathered_again(interpret):
    assert interpret(2, change_in_a_step) == [[True] * 4] * 2


def test_gather_once_raises_with_its_requirements(ranks):
    with (
        pytest.raises(ValueError, match=r"takes a model that stretto.parallelize has returned"),
        gather_once(GPT(CONFIG)),
    ):
        pass
    assert ranks(2).run(enter_wrongly) == [["frees; 'after_backward' would do", "is entered already"]] * 2


def enter_wrongly() -> list[str]:
    """The ends of two errors."""
    grid, found = Grid(z=2), []
    for policy in ("after_forward", "after_backward"):
        model = parallelize(GPT(CONFIG), grid, reshard=policy)
        try:
            with gather_once(model), gather_once(model):
                pass
        except ValueError as error:
            found.append(re.search(r"(frees; .*|is entered already)", str(error))[0])
    return found


def scatter_many(seed: int) -> list[str]:
    """Random gradients, several at a time, past stragglers: what is not the sum in rank order, rounded once."""
    rng = random.Random(seed)  # drawn alike on all ranks, but for pauses
    rank, world = dist.get_rank(), dist.get_world_size()
    pauses = random.Random(seed + 1 + rank)
    part = -(-40 // world) * 24 * 4
    scatter = CopyEngineReduceScatter(dist.group.WORLD, part, rng.randint(part, 4 * part), backend="host")
    wrong: list[str] = []
    waiting: list[tuple[Any, torch.Tensor]] = []

    def settle() -> None:
        pending, expected = waiting.pop(0)
        time.sleep(pauses.choice([0, 0, 0.003]))
        if not torch.equal(pending.wait(), expected) or pending.wait() is not pending.result:
            wrong.append(f"{list(expected.shape)} {expected.dtype}")

    shapes = [(rng.randint(1, 40), rng.randint(1, 24)) for _ in range(5)]  # few: lists of copies are used again
    for number in range(60):
        rows, columns = rng.choice(shapes)
        dtype, out = rng.choice([(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
        every = [
            torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 * number + source)).to(dtype)
            for source in range(world)
        ]
        chunk, factor = -(-rows // world), rng.choice([1.0, 1 / world])
        mine = slice(rank * chunk, min((rank + 1) * chunk, rows))
        expected = torch.zeros(every[0][mine].shape)
        for part in every:
            expected += part[mine].float()
        time.sleep(pauses.choice([0, 0, 0.003]))
        while not scatter.takes(every[rank]):  # the ring is full
            settle()
        waiting.append((scatter.start(every[rank], expected.shape[0], out, factor), (expected * factor).to(out)))
        while len(waiting) >= rng.randint(1, MAX_STARTED):
            settle()
    while waiting:
        settle()
    tiny, started = torch.ones(world, 1), []
    while scatter.takes(tiny) and len(started) <= MAX_STARTED:  # there is a word for each
        started.append(scatter.start(tiny, 1, torch.float32))
    if [pending.wait().item() for pending in started] != [world] * min(len(started), MAX_STARTED):
        wrong.append(f"{len(started)} at once")
    return wrong


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 3, pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_gradients_are_sums_in_rank_order_whatever_is_on_its_way(interpret, ranks):
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    assert interpret(ranks, scatter_many, seed) == [[]] * ranks


def calls_of_a_scatter() -> list[int]:
    """Python calls and torch's operators of a reduce-scatter in a third pass of 16, but for launches."""
    scatter = CopyEngineReduceScatter(dist.group.WORLD, 2048, 8 * 2048, backend="host")
    gradient, calls = torch.ones(32, 16), [0]

    def note(_: Any, event: str, __: Any) -> None:
        calls[0] += event == "call"

    def take_pass() -> None:
        waiting: list[Any] = []
        for _ in range(16):
            if len(waiting) == 7:
                waiting.pop(0).wait()
            assert scatter.takes(gradient)
            waiting.append(scatter.start(gradient, 16, torch.float32))
        for pending in waiting:
            pending.wait()

    def launch(*_: Any, **__: Any) -> None:
        pass

    with mock.patch.object(scatter._channel, "launch", launch):
        take_pass()
        with Operators() as operators:
            take_pass()
        sys.setprofile(note)
        take_pass()
        sys.setprofile(None)
    return [calls[0] / 16, len(operators.names) / 16]


class Operators(TorchDispatchMode):
    """The operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_reduce_scatter_takes_few_calls(interpret):
    print(found := interpret(2, calls_of_a_scatter))
    assert all(calls <= 60 and operators <= 4 for calls, operators in found)


class Scalings(TorchDispatchMode):
    """Counts the passes that multiply tensors in place."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._foreach_mul_.ScalarList, torch.ops.aten.mul_.Tensor)
        return func(*args, **(kwargs or {}))


def count_scalings(is_pushed: bool) -> int:
    setup = Setup(1, 2, is_pushed=is_pushed)
    loss = setup.loss()
    with Scalings() as scalings:
        loss.backward()
    return scalings.count


def test_the_kernel_that_sums_gradients_also_averages_them(interpret):
    # gloo does not average: embedding and head, and the bucket of norms and biases, are multiplied after it, or before.
    assert interpret(2, count_scalings, True) == [3] * 2
    assert interpret(2, count_scalings, False) == [WEIGHTS + 2] * 2


def give_up_a_pass(is_pushed: bool) -> tuple[list[torch.Tensor], int]:
    """A backward pass that ends in an exception with gradients on their way, and a step after it."""
    setup = Setup(1, 2, is_pushed=is_pushed)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    hidden = []
    handle = setup.model.blocks[0].attention_norm.register_forward_hook(lambda *_: hidden.append(_[-1]))
    loss = setup.loss()
    hidden[0].register_hook(fail)
    try:
        loss.backward()
    except ArithmeticError:
        pass
    else:
        raise AssertionError("the backward pass was to fail")
    handle.remove()
    for parameter in setup.model.parameters():
        parameter.grad = None
    with setup.counting():
        setup.loss().backward()
    setup.update()
    return setup.shards(), setup.scatters


def test_a_backward_pass_that_failed_leaves_nothing_on_its_way(interpret):
    pushed, plain = (interpret(2, give_up_a_pass, way) for way in (True, False))
    for (ours, by_group), (other, _) in zip(pushed, plain, strict=True):
        assert all(map(torch.equal, ours, other))
        assert by_group == 2  # embedding and head; the rest is pushed again


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_compile_and_load_and_store_16_bytes_at_a_time(target, dtype):
    from stretto.parallel.comm import copy_engine_scatter
    from stretto.tiles.compile_only import compile_kernel
    from tests.tiles.machine_code import compile_to_ptx, make_channel

    channel, word = make_channel("p2p"), torch.zeros(1, dtype=torch.int32)
    compile_kernel(copy_engine_scatter.begin_scatter, (channel, word, word, 3), {"num_warps": 1}, target)
    parts, out = torch.zeros(256, dtype=dtype), torch.zeros(256, dtype=torch.float32)
    arguments = (channel, word, word, parts, parts, out, 4096, 8192, 0.25, 2048)
    lines = compile_to_ptx(copy_engine_scatter.sum_parts, arguments, target, num_warps=8)
    loads = [line for line in lines if re.search(r"ld\.global.*\.v\d\.b32", line)]
    assert loads
    assert all(".v4.b32" in line for line in loads)
    assert any(re.search(r"st\.global.*\.v4\.b32", line) for line in lines)


def test_a_slot_is_released_when_all_programs_have_summed():
    from stretto.parallel.comm import copy_engine_scatter
    from tests.tiles.machine_code import RELEASE, compile_to_ptx, find, make_channel

    channel, word, numbers = make_channel("p2p"), torch.zeros(1, dtype=torch.int32), torch.zeros(256)
    arguments = (channel, word, word, numbers, numbers, numbers, 4096, 8192, 0.25, 2048)
    lines = compile_to_ptx(copy_engine_scatter.sum_parts, arguments, num_warps=8)
    # A program counts itself after the loads and stores of all its threads; the last one has seen all counts.
    counted = find(lines, r"atom\.global\.(gpu\.acq_rel|acq_rel\.gpu)\.add")
    before = [line for line in lines[:counted] if re.search(r"(ld|st)\.global|bar\.sync", line)]
    assert before[-1].startswith("bar.sync"), before[-3:]
    assert len([line for line in lines[counted:] if re.search(RELEASE, line)]) == 3  # one for each other rank


def look_only() -> int:
    """Return how many weights have a place after passes without gradients."""
    setup = Setup(1, 2, is_pushed=True)
    with torch.no_grad():
        setup.loss()
    return setup.num_pushed


def test_passes_without_gradients_alone_keep_no_weights(interpret):
    assert interpret(2, look_only) == [0, 0]


def take_at_once() -> list[bool]:
    """True if each weight is whole when it is taken, though a rank pushes late."""
    setup = Setup(1, 3, is_pushed=True)
    pushed, rank = setup.pushed, setup.grid.coordinate("z")
    assert pushed is not None
    real = CopyEngineAllGather._copy_to_peers

    def late(*arguments: Any) -> None:
        time.sleep(0.02 * rank)
        real(*arguments)

    equal = []
    for turn in range(2):
        for parameter in setup.model.parameters():
            with torch.no_grad():
                parameter.add_(1 + turn)
        with mock.patch.object(CopyEngineAllGather, "_copy_to_peers", late):
            pushed.begin()
        for key, weight in pushed._weights.items():
            version = version_of(weight.parameter)
            if weight.is_table:
                parts = pushed.find_parts(key, version)
                assert parts is not None
                whole = look_up_rows(torch.arange(weight.rows), parts.addresses, 0, weight.rows, parts.own)
            else:
                taken = pushed.take(key, version, in_backward=False)
                assert taken is not None
                whole = taken.rows.clone()
            equal.append((whole, weight))
        pushed.end()
    last = equal[len(equal) // 2 :]
    return [torch.equal(whole, gather_rows(local(w.parameter).detach(), w.rows, pushed.group)) for whole, w in last]


@pytest.mark.long
def test_a_weight_is_taken_when_all_of_it_has_come(interpret):
    assert interpret(3, take_at_once) == [[True] * (WEIGHTS + 1)] * 3


def take_on_streams() -> list[int]:
    """Return how many waits there have been when a weight is taken on a stream, on another one, on both again,
    and anew.
    """
    setup = Setup(1, 2, is_pushed=True)
    pushed = setup.pushed
    assert pushed is not None
    key, weight = next(item for item in pushed._weights.items() if not item[1].is_table)
    waits: list[int] = []
    tiles = importlib.import_module("stretto.tiles")
    real, counts = tiles.rank_wait_all, []

    def count(*arguments: Any) -> None:
        waits.append(1)
        real(*arguments)

    for streams in ((1, 2, 1, 2), (2, 1)):
        pushed.begin()
        for stream in streams:
            with (
                mock.patch(
                    "stretto.parallel.comm.copy_engine_gather._find_stream", lambda device, stream=stream: stream
                ),
                mock.patch.object(tiles, "rank_wait_all", count),
            ):
                assert pushed.take(key, version_of(weight.parameter), in_backward=False) is not None
            counts.append(len(waits))
        assert pushed._order == [key]
        pushed.end()
    return counts


def test_every_stream_that_takes_a_weight_waits_for_it_once_a_pass(interpret):
    assert interpret(2, take_on_streams) == [[1, 2, 2, 2, 3, 4]] * 2
