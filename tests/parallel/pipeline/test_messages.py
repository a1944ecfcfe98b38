# SPDX-License-Identifier: Apache-2.0
"""Messages between pipeline ranks: each arrives once, whole, whatever the order of sends, arrivals and takes."""

import platform
import random
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from stretto.parallel.pipeline.gloo_transport import GlooTransport
from stretto.parallel.pipeline.message_format import DTYPES, ReceiveBuffers
from stretto.parallel.pipeline.messages import MessageKey
from stretto.parallel.pipeline.shared_memory_transport import SharedMemoryTransport
from stretto.parallel.pipeline.transports import make_transport
from tests.parallel.pipeline.gpu_fakes import FakeNCCLTransport, LateTransport
from tests.processes import LIMIT

TRANSPORTS = {
    "gloo": GlooTransport,
    "shared memory": SharedMemoryTransport,
    "symmetric memory, late copies": LateTransport,
    "nccl, on gloo": FakeNCCLTransport,
}


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
    if dtype in (torch.complex64, torch.complex128) and kind < 0.6:
        return tensor.conj() if kind < 0.55 else tensor.conj().imag  # lazily: only a bit of the tensor says so
    return tensor


def bits(tensor):
    if tensor is None:
        return None
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return tensor.dtype, tuple(tensor.shape), plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


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


def make_message(seed, largest, device):
    """The tensors of a message; on a GPU some of them, written by kernels that have just been launched."""
    draw = random.Random(seed)
    tensors = [make_tensor(draw, largest) for _ in range(draw.randrange(5))]
    return [tensor if tensor is None or draw.random() < 0.3 else tensor.to(device) for tensor in tensors]


def make_any(kind, device):
    return TRANSPORTS[kind]() if device == "cpu" else make_transport(None, device, kind)


def exchange_at_random(kind, seed, steps, messages, largest, device="cpu"):
    """All ranks derive the plan of each step from the seed, and check what they get against it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shared, own = random.Random(seed), random.Random(f"{seed} {rank}")
    with make_any(kind, device) as transport:
        for _ in range(steps):
            plan = plan_step(shared, world, messages)
            seeds = {key: number for _, _, key, number in plan}
            sends = [(to, key) for source, to, key, _ in plan if source == rank]
            expected = {source: sum(s == source and to == rank for s, to, _, _ in plan) for source in range(world)}
            waiting = {key for _, to, key, _ in plan if to == rank}
            transport.begin_step(expected)
            while sends or waiting:
                action = own.random()
                if sends and (action < 0.6 or not waiting):
                    to, key = sends.pop(0)
                    if device != "cpu":
                        torch.cuda._sleep(own.randrange(300_000))  # what is sent has not been computed yet
                    transport.send(to, key, make_message(seeds[key], largest, device))
                    continue
                if action < 0.8:
                    keys = [key for key in transport.poll() if key in waiting]
                elif not sends and action < 0.9:
                    keys = [own.choice(sorted(waiting))]
                else:
                    keys = []
                own.shuffle(keys)
                for key in keys:
                    tensors = transport.take(key)
                    want = make_message(seeds[key], largest, device)
                    assert len(tensors) == len(want)
                    for number, (one, other) in enumerate(zip(tensors, want, strict=True)):
                        assert same(bits(one), bits(other)), (key, number)
                        assert one is None or not one.requires_grad
                        assert one is None or one.device == other.device
                    waiting.remove(key)
            transport.end_step()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stretto-messages")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_messages_arrive_whole(ranks, kind, world):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    assert ranks(world).run(exchange_at_random, kind, seed, 3, 40, 300_000) == [[]] * world


def number(key):
    return MessageKey("F", 0, key)


def exchange_listed(kind, listed, options):
    """Rank 0 sends messages of tensors of so many bytes, rank 1 takes them in another order; twice."""
    rank = dist.get_rank()
    with TRANSPORTS[kind](**options) as transport:
        for step in range(2):
            transport.begin_step({0: len(listed)} if rank else {})
            if rank == 0:
                for place, sizes in enumerate(listed):
                    tensors = [torch.full((size,), (place + step) % 251, dtype=torch.uint8) for size in sizes]
                    transport.send(1, number(place), tensors)
            else:
                order = list(range(len(listed)))
                random.Random(step).shuffle(order)
                for place in order:
                    tensors = transport.take(number(place), 0)
                    assert [tensor.numel() for tensor in tensors] == list(listed[place])
                    assert all(bool((tensor == (place + step) % 251).all()) for tensor in tensors)
            transport.end_step()


LARGE = 100_000  # more than gloo's first part holds
CHANGING = [
    *((LARGE,), (LARGE,), (LARGE // 2 + 1,), (LARGE // 2,), (3 * LARGE,), (3 * LARGE,), (), (LARGE,), (1,)),
    *((LARGE, 2 * LARGE, LARGE), (2 * LARGE, LARGE, 10), (2 * LARGE - 1,), (LARGE,) * 5, (65_000,), (66_000,), (0, 0)),
]


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_sizes_may_change_from_message_to_message(kind, ranks):
    ranks(2).run(exchange_listed, kind, CHANGING, {})
    seed = random.randrange(1 << 30)
    print("seed", seed)
    draw = random.Random(seed)
    listed = [tuple(draw.randrange(2 * LARGE) for _ in range(draw.randrange(3))) for _ in range(40)]
    ranks(2).run(exchange_listed, kind, listed, {})


def test_messages_of_many_slots_wrap_around_the_ring(ranks):
    ranks(2).run(exchange_listed, "shared memory", CHANGING, {"slot_bytes": 1 << 15, "slots": 1})
    ranks(2).run(exchange_listed, "shared memory", CHANGING, {"slot_bytes": (1 << 15) + 64, "slots": 3})


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_thousands_of_small_messages(kind, ranks):
    ranks(2).run(exchange_listed, kind, [(place % 7,) for place in range(1000)], {})


def send_before_taking(kind):
    """All ranks send far more than any buffer holds before any takes; they end the step before another calls."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    with TRANSPORTS[kind]() as transport:
        others = [other for other in range(world) if other != rank]
        transport.begin_step(dict.fromkeys(others, 5))
        for place in range(5):
            for other in others:
                transport.send(other, MessageKey("B", rank, place), [torch.full((1 << 20,), float(rank))])
        for place in range(5):
            for other in others:
                (tensor,) = transport.take(MessageKey("B", other, place))
                assert tensor.eq(other).all()
        transport.end_step()
        # Rank 0 calls nothing until rank 1 has ended a step in which it sent to rank 0.
        transport.begin_step({1: 3} if rank == 0 else {})
        if rank == 1:
            for place in range(3):
                transport.send(0, number(place), [torch.ones(5 << 20)])
        if rank == 0:
            store.wait(["rank 1 has ended its step"], timedelta(seconds=LIMIT))
            for place in range(3):
                assert transport.take(number(place))[0].eq(1).all()
        transport.end_step()
        if rank == 1:
            store.set("rank 1 has ended its step", "")


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_messages_move_while_their_receiver_computes(kind, ranks):
    ranks(3).run(send_before_taking, kind)


def send_to_itself(kind):
    with TRANSPORTS[kind]() as transport:
        for _ in range(2):
            transport.begin_step({0: 1})
            sent = torch.randn(3, 5, requires_grad=True).t()
            transport.send(0, number(1), [sent, None])
            assert transport.wait_any() == number(1)
            tensor, nothing = transport.take(number(1))
            assert nothing is None
            assert tensor.data_ptr() == sent.data_ptr()
            assert tensor.shape == (5, 3)
            assert not tensor.requires_grad
            transport.end_step()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_rank_hands_messages_to_itself_without_a_copy(kind, ranks):
    ranks(1).run(send_to_itself, kind)


def report_arrivals(kind):
    rank = dist.get_rank()
    with TRANSPORTS[kind]() as transport:
        transport.begin_step({} if rank else {1: 4, 2: 1})
        if rank == 1:
            for place in range(4):
                transport.send(0, number(place), [torch.ones(2)])
            dist.barrier()
        else:
            dist.barrier()  # rank 1 has sent
        if rank == 2:
            transport.send(0, MessageKey("B", 3, 0), [])
        if rank == 0:
            with pytest.raises(ValueError, match="has been taken"):
                transport.take(number(2)) and transport.take(number(2))
            seen = [transport.wait_any() for _ in range(2)]
            while len(seen) < 4:
                seen += transport.poll()
            of_one = [key for key in seen if key.operation == "F"]
            assert of_one == [number(0), number(1), number(3)]
            assert MessageKey("B", 3, 0) in seen
            with pytest.raises(RuntimeError, match="all messages of this step have been reported"):
                transport.wait_any()
            with pytest.raises(ValueError, match=r"stage 0, micro-batch 9 cannot arrive"):
                transport.take(number(9))
            for key in seen:
                transport.take(key)
        transport.end_step()


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_messages_are_reported_once_in_the_order_of_arrival(kind, ranks):
    ranks(3).run(report_arrivals, kind)


def misuse():
    transport = GlooTransport()
    with pytest.raises(RuntimeError, match="call begin_step first"):
        transport.send(0, number(0), [])
    with pytest.raises(ValueError, match="expected names pipe rank 2: there are ranks 0 to 1"):
        transport.begin_step({2: 1})
    with pytest.raises(ValueError, match="-1 messages are expected of pipe rank 1"):
        transport.begin_step({1: -1})
    transport.begin_step({})
    with pytest.raises(RuntimeError, match="a step has begun"):
        transport.begin_step({})
    with pytest.raises(ValueError, match="destination names pipe rank -1"):
        transport.send(-1, number(0), [])
    with pytest.raises(ValueError, match="messages hold dense tensors"):
        transport.send(1 - transport.rank, number(0), [torch.eye(2).to_sparse()])
    with pytest.raises(ValueError, match="on meta: this transport's are on cpu"):
        transport.send(1 - transport.rank, number(0), [torch.empty(1, device="meta")])
    with pytest.raises(ValueError, match="1000 tensors of 2000 dims in all are too many"):
        transport.send(1 - transport.rank, number(0), [torch.eye(2)] * 1000)
    transport.end_step()  # nothing of it was sent
    transport.close()
    transport.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        transport.begin_step({})
    with pytest.raises(ValueError, match="a multiple of 64 bytes from 32768 on, not 1000"):
        SharedMemoryTransport(slot_bytes=1000)
    with pytest.raises(ValueError, match="not on cuda: take gloo"):
        SharedMemoryTransport(device="cuda")
    with pytest.raises(ValueError, match="must make the same transport of messages, not"):
        (GlooTransport if dist.get_rank() else SharedMemoryTransport)()


def test_invalid_arguments_raise_before_anything_is_sent(ranks):
    ranks(2).run(misuse)


def choose(on_one_machine):
    """Return what is chosen; each rank on a machine of its own unless on_one_machine."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if not on_one_machine:
            patch.setattr(platform, "node", lambda: f"node-{rank}")
        with make_transport(None, "cpu") as transport:
            return transport.name


def refuse_transports():
    with pytest.raises(ValueError, match=r"no transport of messages 'glo'.*did you mean 'gloo'"):
        make_transport(None, "cpu", "glo")
    with pytest.raises(ValueError, match="of tensors on GPUs, not on cpu"):
        make_transport(None, "cpu", "symmetric memory")
    with pytest.raises(ValueError, match="of tensors on GPUs, not on cpu"):
        make_transport(None, "cpu", "nccl")


def test_the_transport_that_reaches_all_ranks_is_chosen(ranks):
    assert ranks(3).run(choose, True) == ["shared memory"] * 3
    assert ranks(3).run(choose, False) == ["gloo"] * 3
    assert ranks(1).run(choose, True) == ["gloo"]
    ranks(1).run(refuse_transports)


def test_memory_is_used_again_once_its_tensors_are_dead():
    buffers = ReceiveBuffers()
    first = buffers.take(200_000)
    place = first.data_ptr()
    assert place % 64 == 0
    row = first[:100_000].view(torch.float32)[7:9].view(2, 1)  # some view of it that stays
    del first
    other = buffers.take(200_000)
    assert other.data_ptr() != place
    other.fill_(1)
    row.fill_(3)
    assert other.eq(1).all()
    del row
    again = buffers.take(150_000)
    assert (again.data_ptr(), again.numel()) == (place, 150_000)
    assert buffers.take(50_000_000).data_ptr() not in (place, other.data_ptr())
    del again
    assert buffers.take(90_000).data_ptr() != place  # less than half of it
    buffers.trim()
    buffers.trim()  # nothing has been taken since
    assert buffers._buffers == []
    assert other.eq(1).all()
