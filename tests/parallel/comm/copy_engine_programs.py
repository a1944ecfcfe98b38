# SPDX-License-Identifier: Apache-2.0
"""What each interpreted rank does in test_copy_engines.py."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Overlap, checkpoint_activations, parallelize
from stretto.parallel.comm import copy_engine_scatter, weight_gathering
from stretto.parallel.comm.collectives import gather_rows
from stretto.parallel.comm.copy_engine_gather import CopyEngineAllGather, CopyEngineGatherer
from stretto.parallel.comm.copy_engine_scatter import SLOTS, CopyEngineReduceScatter, ScatterRing
from stretto.parallel.layers import linear, weight_shard
from stretto.parallel.layout import local, version_of

SEED = 23
BATCH, SEQ_LEN = 6, 6
CONFIG = GPTConfig(layers=2, hidden=24, heads=2, vocab=37, max_seq_len=SEQ_LEN)


class Setup:
    """A model on a grid, and this rank's rows of a fixed text."""

    def __init__(self, x: int, z: int, *, is_pushed: bool, dtype: torch.dtype | None = None) -> None:
        self.grid = Grid(x=x, z=z)
        torch.manual_seed(SEED)
        module = import_module("stretto.parallel.builder")
        with (
            mock.patch.object(module, "have_copy_engines", lambda group, device: group.size() > 1),
            mock.patch.object(module, "CopyEngineAllGather", partial(CopyEngineAllGather, backend="host")),
            mock.patch.object(module, "make_scatter_ring", partial(ScatterRing, backend="host")),
        ):
            self.model = parallelize(GPT(CONFIG), self.grid, overlap=Overlap(copy_engines=is_pushed), dtype=dtype)
        text = torch.randint(CONFIG.vocab, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
        self.text = text.chunk(z)[self.grid.coordinate("z")]
        self.gathers = self.scatters = 0

    @property
    def pushed(self) -> CopyEngineAllGather | None:
        shard = next(m.plan.shard for m in self.model.modules() if isinstance(m, linear.ParallelLinear))
        return shard.gatherer.copies if isinstance(shard.gatherer, CopyEngineGatherer) else None

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

    with setup.counting(), mock.patch.object(CopyEngineAllGather, "_copy_to_peers", late if straggles else real):
        for _ in range(3):
            loss = setup.loss()
            if straggles:
                time.sleep(pause.random() / 10)
            loss.backward()
            setup.update()
    counts = {"gathers": setup.gathers, "scatters": setup.scatters, "pushed": setup.num_pushed}
    return {"shards": setup.shards()} | counts


def hold_two_graphs(is_pushed: bool) -> list[torch.Tensor]:
    """Two forward passes before their two backward passes."""
    setup = Setup(1, 2, is_pushed=is_pushed)
    first, second = setup.loss(), setup.loss()
    first.backward()
    second.backward()
    setup.update()
    return setup.shards()


def change_before_backward() -> str:
    """What the backward pass says if the weights it needs were written over."""
    setup = Setup(1, 2, is_pushed=True)
    early = setup.loss()
    with torch.no_grad():
        for parameter in setup.model.parameters():
            parameter.mul_(0.5)
    setup.loss()
    try:
        early.backward()
    except RuntimeError as error:
        return str(error)
    return ""


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


def keep_a_graph_of_a_part() -> list[bool]:
    """Whether a submodule's own graph, made outside of a pass, has its gradients after passes with other weights."""
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


def look_only() -> int:
    """How many weights have a place after passes without gradients."""
    setup = Setup(1, 2, is_pushed=True)
    with torch.no_grad():
        setup.loss()
    return setup.num_pushed


def take_at_once() -> list[bool]:
    """Whether each weight is whole when it is taken, though a rank pushes late."""
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
            whole = pushed.take(key, version_of(weight.parameter), in_backward=False)
            assert whole is not None
            equal.append((whole.clone(), weight))
        pushed.end()
    last = equal[len(equal) // 2 :]
    return [torch.equal(whole, gather_rows(local(w.parameter).detach(), w.rows, pushed.group)) for whole, w in last]


def take_on_streams() -> list[int]:
    """How many waits there have been when a weight is taken on a stream, on another one, on both again, and anew."""
    setup = Setup(1, 2, is_pushed=True)
    pushed = setup.pushed
    assert pushed is not None
    key, weight = next(iter(pushed._weights.items()))
    waits: list[int] = []
    tiles = import_module("stretto.tiles")
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


def scatter_many(seed: int) -> list[str]:
    """Random gradients, several at a time, past stragglers: what is not the sum in rank order, rounded once."""
    rng = random.Random(seed)  # drawn alike on all ranks, but for pauses
    rank, world = dist.get_rank(), dist.get_world_size()
    pauses = random.Random(seed + 1 + rank)
    scatter = CopyEngineReduceScatter(dist.group.WORLD, -(-40 // world) * 24 * 4, backend="host")
    wrong: list[str] = []
    waiting: list[tuple[Any, torch.Tensor]] = []

    def settle() -> None:
        pending, expected = waiting.pop(0)
        time.sleep(pauses.choice([0, 0, 0.003]))
        if not torch.equal(pending.wait(), expected) or pending.wait() is not pending.result:
            wrong.append(f"{list(expected.shape)} {expected.dtype}")

    for number in range(60):
        rows, columns = rng.randint(1, 40), rng.randint(1, 24)
        dtype, out = rng.choice([(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
        every = [
            torch.randn(rows, columns, generator=torch.Generator().manual_seed(1000 * number + source)).to(dtype)
            for source in range(world)
        ]
        chunk = -(-rows // world)
        mine = slice(rank * chunk, min((rank + 1) * chunk, rows))
        expected = torch.zeros(every[0][mine].shape)
        for part in every:
            expected += part[mine].float()
        time.sleep(pauses.choice([0, 0, 0.003]))
        assert scatter.takes(every[rank])
        waiting.append((scatter.start(every[rank], expected.shape[0], out), expected.to(out)))
        while len(waiting) >= rng.randint(1, SLOTS):
            settle()
    while waiting:
        settle()
    return wrong


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
