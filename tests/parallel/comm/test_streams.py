# SPDX-License-Identifier: Apache-2.0
"""Backward passes on several streams, which this test simulates: what each stream has waited for when it reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.parallel import Grid, no_sync, parallelize
from stretto.parallel.comm.autograd import at_end_of_backward
from stretto.parallel.comm.streams import ReductionStream, bound_to_stream, use_here
from stretto.parallel.state import require_state
from stretto.recommendation.tables import ReplicatedGradients

ROLES = {"0": "colwise", "1": "inner_norm", "2": "rowwise"}


class Stream:
    """done: its own work so far. seen: that of each stream which its next work comes after."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.done = number, 0
        self.seen: dict[int, int] = {}

    def wait_stream(self, other: "Stream") -> None:
        self.seen |= {key: max(count, self.seen.get(key, 0)) for key, count in other.seen.items()}
        self.seen[other.cuda_stream] = max(other.done, self.seen.get(other.cuda_stream, 0))

    def misses(self, streams: "list[Stream]") -> list[int]:
        """The streams of which this one has not waited for all work."""
        return [
            each.cuda_stream for each in streams if each is not self and self.seen.get(each.cuda_stream, 0) < each.done
        ]


class Machine:
    """Three streams, the first of which is the caller's; and the tensors whose memory is kept for others."""

    def __init__(self) -> None:
        self.streams = [Stream(number) for number in range(3)]
        self.current = self.streams[0]
        self.recorded: list[tuple[Tensor, Stream]] = []

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def get_current(self, device: object = None) -> Stream:
        return self.current

    def get_handle(self, index: int) -> int:
        return self.current.cuda_stream

    @contextmanager
    def patched(self) -> Iterator[None]:
        with (
            mock.patch("torch.cuda.current_stream", self.get_current),
            mock.patch("torch.cuda.stream", self.on),
            mock.patch("torch._C._cuda_getCurrentRawStream", self.get_handle, create=True),
            mock.patch.object(Tensor, "record_stream", lambda tensor, stream: self.recorded.append((tensor, stream))),
        ):
            yield


class OnStream(torch.autograd.Function):
    """What comes before this in a backward pass runs on a stream, as autograd's engine would have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, machine: Machine, number: int) -> Tensor:
        ctx.machine, ctx.number = machine, number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        machine = ctx.machine
        if ctx.number == 0:  # the engine calls back on the caller's stream, which has waited for leaves' streams alone
            at_end_of_backward(lambda: setattr(machine, "current", machine.streams[0]))
        machine.current = machine.streams[ctx.number]
        machine.current.wait_stream(machine.streams[0])
        machine.current.done += 1
        return gradient, None, None


class Layers(nn.Module):
    """Two branches: the backward pass of one is on stream 1, that of the other on stream 2."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.machine = machine
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(6), nn.Linear(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        first = OnStream.apply(self.layers[0](x), self.machine, 1)
        second = OnStream.apply(self.layers[2](self.layers[1](x)), self.machine, 2)
        return OnStream.apply(first + second, self.machine, 0)


def find_unordered(sizes: dict[str, int], how: str) -> list[str]:
    """Collectives and sinks that read gradients for which their stream has not waited; and the caller's at the end."""
    machine, wrong = Machine(), []

    def look(kind: str) -> None:
        if missed := machine.current.misses(machine.streams):
            wrong.append(f"{kind} on stream {machine.current.cuda_stream} has not waited for {missed}")

    def looking(name: str) -> Any:
        call = getattr(dist, name)
        return mock.patch.object(dist, name, lambda *args, **options: (look(name), call(*args, **options))[1])

    class Sink:
        add = complete = staticmethod(lambda *_: look("the sink"))
        end_pass = finish = staticmethod(lambda: look("the sink's end"))

    if how == "tables":
        model: Any = Layers(machine)
        sums = ReplicatedGradients([list(model.parameters())], dist.group.WORLD)
        begin = sums._begin
        sums._begin = lambda _: begin(torch.device("cuda", 0))  # type: ignore[method-assign]
    else:
        roles = {f"layers.{name}": role for name, role in ROLES.items()}
        given = {"blocks": ["layers.0", "layers.2"]} if how == "blocks" else {"roles": roles}
        model = parallelize(Layers(machine), Grid(**sizes), **given)
        reducer = require_state(model, "this test").gradient_reducer
        reducer.stream = ReductionStream(torch.device("cuda", 0))
        if how == "sink":
            reducer.send_to(Sink())  # type: ignore[arg-type]
        note = reducer._note_unsummed
        reducer._note_unsummed = lambda parameter: (look("`.grad`"), note(parameter))[1]  # type: ignore[method-assign]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    # These gradients come by autograd's hooks; it waits for others itself.
    penalized = [] if how == "tables" else [each for each in model.parameters() if reducer.is_watched(each)]

    def run() -> None:
        penalty = sum(OnStream.apply(each, machine, 1).square().sum() for each in penalized)
        (model(x).sum() + getattr(penalty, "full_tensor", lambda: penalty)()).backward()

    for number in range(3):  # the first pass has an order of its own; the last two are one step
        with machine.patched(), looking("all_reduce"), looking("reduce_scatter_tensor"):
            if number == 1 and how in ("roles", "blocks"):
                with no_sync(model):
                    run()
            else:
                run()
            look("the caller")
    if not machine.recorded:
        wrong.append("no memory is kept for the other stream")
    return wrong


KINDS = [
    ("data", "roles"),
    ("z", "roles"),
    ("z", "blocks"),
    ("data", "sink"),
    ("z", "sink"),
    ("data", "tables"),
    ("alone", "roles"),
]


@pytest.mark.parametrize(("axis", "how"), KINDS)
def test_gradients_of_several_streams_are_waited_for(ranks, axis, how):
    world = 1 if axis == "alone" else 2
    for of_rank in ranks(world).run(find_unordered, {} if world == 1 else {axis: 2}, how):
        assert not of_rank


def test_what_is_kept_is_used_on_another_stream_after_its_own() -> None:
    machine, device, kept = Machine(), torch.device("cuda", 0), torch.zeros(1, device="cpu")
    main, side, _ = machine.streams
    with machine.patched():
        use_here(kept, main)
        assert not machine.recorded
        side.done += 1
        use_here(kept, side)  # type: ignore[arg-type]
        assert not main.misses(machine.streams)
        assert machine.recorded == [(kept, main)]
        ran_on = []
        with machine.on(side):
            later = bound_to_stream(lambda: ran_on.append(machine.current), device)
        later()
        assert ran_on == [side]
        assert machine.current is main
