# SPDX-License-Identifier: Apache-2.0
"""Messages between pipeline ranks: each arrives once, whole, whatever the order of sends, arrivals and takes."""

import random
import threading

import pytest
import torch
import torch.distributed as dist

from stretto.parallel.pipeline.gloo_carrier import GlooCarrier
from stretto.parallel.pipeline.message_format import DTYPES
from stretto.parallel.pipeline.messages import MessageKey
from stretto.parallel.pipeline.shared_memory_carrier import SharedMemoryCarrier

CARRIERS = {"gloo": GlooCarrier, "shared memory": SharedMemoryCarrier}


def make_tensor(draw, largest):
    """A random tensor, of any dtype, shape and strides, or None; its bytes are random, NaNs too."""
    kind = draw.random()
    if kind < 0.1:
        return None
    dtype = draw.choice(DTYPES)
    shape = [draw.choice([0, 1, 2, 3, 5, 17]) for _ in range(draw.randrange(4))]
    if kind > 0.8:
        shape = [draw.randrange(1, largest)]
    count = 1
    for size in shape:
        count *= size
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    if dtype == torch.bool:
        return (torch.rand(count, generator=generator) < 0.5).view(shape)
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    tensor = data.view(dtype).view(shape)
    if len(shape) > 1 and kind < 0.5:
        return tensor.transpose(0, -1)
    return tensor


def bits(tensor):
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(-1).view(torch.uint8)


def same(one, other):
    if one is None or other is None:
        return one is other
    return one[:2] == other[:2] and torch.equal(one[2], other[2])


def plan_step(draw, world, messages):
    """(source, destination, key, seed of the tensors), each key once."""
    plan = []
    for number in range(messages):
        key = MessageKey(draw.choice("FB"), draw.randrange(8), number)
        plan.append((draw.randrange(world), draw.randrange(world), key, draw.randrange(1 << 30)))
    return plan


def exchange_at_random(kind, seed, steps, messages, largest):
    """All ranks derive the plan of each step from the seed, and check what they get against it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    with CARRIERS[kind]() as carrier:
        for _ in range(steps):
            plan = plan_step(shared, world, messages)
            seeds = {key: number for _, _, key, number in plan}
            sends = [(to, key) for source, to, key, _ in plan if source == rank]
            expected = {source: sum(s == source and to == rank for s, to, _, _ in plan) for source in range(world)}
            waiting = {key for _, to, key, _ in plan if to == rank}
            carrier.begin_step(expected)
            while sends or waiting:
                action = own.random()
                if sends and (action < 0.6 or not waiting):
                    to, key = sends.pop(0)
                    draw = random.Random(seeds[key])
                    carrier.send(to, key, [make_tensor(draw, largest) for _ in range(draw.randrange(5))])
                    continue
                if action < 0.8:
                    keys = [key for key in carrier.poll() if key in waiting]
                elif not sends and action < 0.9:
                    keys = [own.choice(sorted(waiting))]
                else:
                    keys = []
                own.shuffle(keys)
                for key in keys:
                    tensors = carrier.take(key)
                    draw = random.Random(seeds[key])
                    want = [make_tensor(draw, largest) for _ in range(draw.randrange(5))]
                    assert len(tensors) == len(want)
                    for number, (one, other) in enumerate(zip(tensors, want, strict=True)):
                        assert same(bits(one), bits(other)), (key, number)
                        assert one is None or not one.requires_grad
                    waiting.remove(key)
            carrier.end_step()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stretto-messages")]


@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_messages_arrive_whole(ranks, kind, world):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    assert ranks(world).run(exchange_at_random, kind, seed, 3, 60, 300_000) == [[]] * world
