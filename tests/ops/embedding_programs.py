# SPDX-License-Identifier: Apache-2.0
"""What ranks run that look up embeddings with interpreted kernels. Only they import this: see conftest."""

import contextlib
import gc
import os
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ops.backward_configs import push_by_copies
from tests.ops.jagged import is_close, make_case
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from stretto import ops, tiles
from stretto.memory import PeerError
from stretto.ops.embedding import autotune, backward, forward, launch_config
from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.launch_config import LaunchConfig, LookupSize
from stretto.ops.embedding.output_ring import find_output_rings
from stretto.ops.embedding.table_set import find_tables
from stretto.tuning import TuningStore

assert tiles.INTERPRETED.value, "tests.ops.embedding_programs is for processes that interpret their kernels"


def call(case, tables=None, **options):
    """This rank's output of a case."""
    own = case.owners[dist.get_rank()]
    tables = own.tables if tables is None else tables
    return ops.embedding_all_to_all(
        own.indices,
        own.offsets,
        tables,
        weights=own.weights,
        mode=case.mode,
        batch=case.batch,
        name=str(case.seed),
        **options,
    )


def own_rows(case, whole):
    """This rank's rows of what is of the global batch."""
    rows = case.batch // dist.get_world_size()
    return whole[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]


def take_random_configs(generator, order):
    """Have the operator launch itself with another config, on this rank."""
    draws = [1 << int(torch.randint(0, 3, (1,), generator=generator)) for _ in range(4)]
    config = LaunchConfig(draws[0], draws[1], draws[0] * draws[2], 1, draws[3], order)
    forward.choose_launch_config = lambda *_: config


def look_up_random_batches(first, calls):
    """Look up so many random batches, in all orders, past stragglers; the seeds of those that are wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chosen = forward.choose_launch_config
    wrong = []
    for seed in range(first, first + calls):
        case = make_case(seed, world)
        if seed % 3:
            take_random_configs(torch.Generator().manual_seed(seed * world + rank), ORDERS[seed % len(ORDERS)])
        if seed % 7 == rank:
            time.sleep(0.02)
        out = call(case)
        if not is_close(out, own_rows(case, case.expected()), out.dtype):
            wrong.append((seed, "wrong"))
        if seed % 5 == 0 and not torch.equal(out, call(case)):
            wrong.append((seed, "another time"))
        forward.choose_launch_config = chosen
    return wrong


def differentiate(first, calls):
    """Gradients of random batches, dense and sparse; the seeds of those that are wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for seed in range(first, first + calls):
        case = make_case(seed, world, most_indices=12, most_rows=5)
        dtype = case.grad.dtype
        expected = case.expected_gradients(rank)
        found = {}
        for sparse, by_copies in ((False, False), (True, False), (True, True), (False, True)):
            tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
            out = call(case, tables, sparse=sparse)
            with push_by_copies() if by_copies else contextlib.nullcontext(), warnings.catch_warnings():
                warnings.simplefilter("error")
                out.backward(own_rows(case, case.grad))
            grads = [table.grad for table in tables]
            if sparse and any(
                sorted(grad._indices()[0].tolist()) != touched_rows(case, place) for place, grad in enumerate(grads)
            ):
                wrong.append((seed, "rows"))
            grads = [grad.to_dense() if sparse else grad for grad in grads]
            if not all(is_close(grad, right, dtype) for grad, right in zip(grads, expected, strict=True)):
                wrong.append((seed, sparse, "wrong"))
            before = found.setdefault("grads", grads)
            if not all(torch.equal(one, other) for one, other in zip(before, grads, strict=True)):
                wrong.append((seed, "other bits"))
    return wrong


def differentiate_by_64_bits(first, calls):
    """As `differentiate`, with places in the gradient as there are more than 32 bits count."""
    with mock.patch.object(backward, "_MOST_BY_32_BITS", -1):
        return differentiate(first, calls)


def touched_rows(case, place):
    """The rows of this rank's table that are looked up, each once."""
    owner = case.owners[dist.get_rank()]
    first, last = owner.offsets[place * case.batch], owner.offsets[(place + 1) * case.batch]
    return sorted(set(owner.indices[first:last].tolist()))


def train_in_two_ways(seed, optimizer, steps, dtype):
    """Tables trained by the fused update and by a torch optimizer on gradients (adagrad: by its definition).

    Whether they are equal to the last bit, and the largest difference, relative to numbers over 1.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    case = make_case(seed, world, most_indices=12, dtypes=[dtype])
    tables = case.owners[rank].tables
    shapes = [tuple(table.shape) for table in tables]
    fused = ops.EmbeddingAllToAll(shapes, mode=case.mode, optimizer=optimizer, learning_rate=0.5, dtype=dtype)
    unfused = ops.EmbeddingAllToAll(shapes, mode=case.mode, sparse=optimizer == "sgd", dtype=dtype)
    for module in (fused, unfused):
        for parameter, table in zip(module.tables, tables, strict=True):
            parameter.data.copy_(table)
    squares = [torch.zeros(rows) for rows, _ in shapes]
    sgd = torch.optim.SGD(unfused.parameters(), lr=0.5) if shapes else None
    own = case.owners[rank]
    for step in range(steps):
        grad = own_rows(case, torch.randn(case.grad.shape, generator=torch.Generator().manual_seed(step))).to(dtype)
        for module in (fused, unfused):
            module(own.indices, own.offsets, weights=own.weights, batch=case.batch).backward(grad)
        if optimizer == "adagrad":
            for parameter, square in zip(unfused.tables, squares, strict=True):
                square += parameter.grad.square().mean(1)
                parameter.data -= 0.5 * parameter.grad / (square.sqrt() + 1e-8)[:, None]
                parameter.grad = None
        elif sgd is not None:
            sgd.step()
            sgd.zero_grad()
    pairs = list(zip(fused.tables, unfused.tables, strict=True))
    pairs += list(zip(fused.states, squares, strict=True)) if optimizer == "adagrad" else []
    differences = [((a - b).abs() / b.abs().clamp(min=1.0)).max().item() for a, b in pairs]
    return all(torch.equal(*pair) for pair in pairs), max(differences, default=0.0)


def update_a_table_of_two_features():
    """A table that is there twice, one after a step of SGD, the other after one of Adagrad, and Adagrad's state."""
    world = dist.get_world_size()
    offsets = torch.arange(2 * 2 * world + 1)
    indices = torch.tensor([0, 1] * world + [1, 2] * world)
    found = []
    for optimizer in ("sgd", "adagrad"):
        table, state, settings = torch.zeros(4, 8), torch.zeros(4), torch.tensor([1.0, 1e-8])
        states = [state] * 2 if optimizer == "adagrad" else []
        tables = [table, table]
        grad = torch.ones_like(ops.embedding_all_to_all(indices, offsets, tables))
        ops.embedding_all_to_all_update(
            grad, indices, offsets, tables, optimizer=optimizer, settings=settings, states=states
        )
        assert (table == table[:, :1]).all()
        found.append(table[:, 0].tolist())
    with pytest.raises(ValueError, match="tables 0 and 1 are one table, so they have one state"):
        ops.embedding_all_to_all_update(
            grad, indices, offsets, tables, optimizer="adagrad", settings=settings, states=[state, torch.zeros(4)]
        )
    with pytest.raises(ValueError, match="tables 0 and 1 have a part of their memory in common"):
        ops.embedding_all_to_all_update(
            grad, indices, offsets, [table[:3], table[1:]], optimizer="sgd", settings=settings
        )
    return *found, state.tolist()


def move_modules():
    """Modules whose tables become fp16, that come from the meta device, and that begin anew, train as others do."""
    world = dist.get_world_size()
    indices, offsets = torch.zeros(world, dtype=torch.int64), torch.arange(world + 1)
    options = {"optimizer": "adagrad", "learning_rate": 0.1, "epsilon": 1e-8}

    def train(layer):
        before = layer.tables[0].detach()[0].float().clone()
        layer(indices, offsets).sum().backward()
        assert (layer.tables[0][0].float() - before + layer.settings[0]).abs().max() < 0.01
        assert layer.states[0].tolist() == [world**2, 0.0]
        assert layer.settings.dtype == layer.states[0].dtype == torch.float32

    for layer in (ops.EmbeddingAllToAll([(2, 4)], **options).half(), ops.EmbeddingAllToAll([(2, 4)], **options)):
        layer.set_learning_rate(0.5)
        train(layer)
        layer.to(torch.bfloat16)
        assert layer.settings[0] == 0.5
        layer.reset_parameters()
        assert layer.tables[0].dtype == torch.bfloat16
        train(layer)
        assert torch.equal(layer.settings, torch.tensor([0.1, 1e-8]))
    layer = ops.EmbeddingAllToAll([(2, 4)], device="meta", **options).to_empty(device="cpu")
    layer.reset_parameters()
    train(layer)


def look_up_with_faults():
    """What each kind of bad input raises, on the rank that has it alone; and that the next call is right again."""
    rank = dist.get_rank()
    tables = [torch.ones(5, 4), torch.ones(3, 4)]
    indices = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    offsets = torch.tensor([0, 2, 3, 4, 5, 6, 7, 7, 8])  # two tables, a global batch of 4
    bad_index, negative, falling, beyond = indices.clone(), indices.clone(), offsets.clone(), offsets.clone()
    bad_index[5], negative[1], falling[3], beyond[8] = 3, -7, 9, 12
    said = []
    for wrong, bounds in ((bad_index, offsets), (negative, offsets), (indices, falling), (indices, beyond)):
        try:
            ops.embedding_all_to_all(wrong if rank == 1 else indices, bounds if rank == 1 else offsets, tables)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    out = ops.embedding_all_to_all(indices, offsets, tables)
    ops.check_indices()
    return said, out[:, ::4].tolist()


def read_rows_out_of_range_as_zeros():
    """An index that is out of range adds nothing to the others of its bag, and gets no gradient."""
    table = torch.ones(5, 4, requires_grad=True)
    indices, offsets = torch.tensor([4, 5, 0]), torch.tensor([0, 2, 3])
    with pytest.raises(ValueError, match=r"indices\[1\] is 5"):
        ops.embedding_all_to_all(indices, offsets, [table])
    operator = torch.ops.stretto.embedding_all_to_all_gradients
    grads = operator(torch.ones(2, 4), indices, offsets, None, "sum", 2, [5], [4], "", dist.group.WORLD.group_name)
    return grads[0][:, 0].tolist()


def hold_outputs(count):
    """Keep `count` outputs alive; whether each still holds what it did, and how many lie in the ring."""
    world = dist.get_world_size()
    held, right = [], True
    for call_number in range(count):
        if dist.get_rank() == 0 and call_number % 3 == 2:
            held.pop(0)  # this rank's slots are free at other times than the others'
        tables = [torch.full((1, 4), float(call_number))]
        offsets = torch.arange(world + 1)
        held.append(
            (float(call_number), ops.embedding_all_to_all(torch.zeros(world, dtype=torch.int64), offsets, tables))
        )
        right = right and all(torch.equal(out, torch.full_like(out, value)) for value, out in held)
    rings = find_output_rings(dist.group.WORLD.group_name)
    assert len(rings) == 1
    slots = rings[0].slots
    inside = [slots.data_ptr() <= out.data_ptr() < slots.data_ptr() + slots.numel() for _, out in held]
    return right, sum(inside)


def keep_a_part():
    """A slot is not taken again while a view of its output lives, or its storage, and is when that dies."""
    table, offsets = [torch.ones(1, 4)], torch.arange(2)

    def look_up():
        return ops.embedding_all_to_all(torch.zeros(1, dtype=torch.int64), offsets, table)

    found = []
    for take_part in (lambda out: out[0, 1:], torch.Tensor.untyped_storage):
        first = look_up()
        address, part = first.data_ptr(), take_part(first)
        del first
        second = look_up()
        found.append(second.data_ptr() != address)
        del part, second
        found.append(look_up().data_ptr() == address)
    return found


def look_up_other_tables_under_one_name():
    """Two sets of tables under one name, of which one rank has the same part; what each rank is told."""
    rank = dist.get_rank()
    indices, offsets = torch.zeros(2, dtype=torch.int64), torch.arange(3)
    for dims in ((4, 8), (8, 4)):  # of rank 0's table and rank 1's
        ops.embedding_all_to_all(indices, offsets, [torch.ones(2, dims[rank])])
    with pytest.raises(ValueError, match=f"rank {1 - rank} has looked up other tables in this call.*: give each set"):
        ops.embedding_all_to_all(indices, offsets, [torch.ones(2, 4)])  # each has had it, beside another one
    return ops.embedding_all_to_all(indices, offsets, [torch.ones(2, 4)], name="narrow").tolist()


def wait_for_nobody():
    """A rank that does not come to a call is named when the time has run out."""
    rank = dist.get_rank()
    indices, offsets, tables = torch.zeros(2, dtype=torch.int64), torch.arange(3), [torch.ones(2, 4)]
    ops.embedding_all_to_all(indices, offsets, tables)
    if rank == 1:
        time.sleep(2.5)
        return "late"
    for ring in find_output_rings(dist.group.WORLD.group_name):
        ring.channel._clock[1] = 500_000_000
    with pytest.raises(PeerError, match="waited in vain for rank 1"):
        ops.embedding_all_to_all(indices, offsets, tables)
    with pytest.raises(PeerError, match=r"embedding_all_to_all, call 2: .* The channel is broken"):
        ops.embedding_all_to_all(indices, offsets, tables)
    return "named"


def ask_wrongly():
    indices, offsets, table = torch.zeros(3, dtype=torch.int64), torch.arange(5), torch.zeros(2, 8)
    for arguments, options, words in (
        ((indices, offsets, [table]), {"mode": "max"}, "mode is one of sum, mean, not 'max'"),
        (
            (indices.float(), offsets, [table]),
            {},
            "indices as a contiguous tensor of one dim, int32 or int64, not torch.f",
        ),
        ((indices, offsets[None], [table]), {}, r"offsets as a contiguous .* not torch.int64 \[1, 5\]"),
        ((indices, offsets[::2], [table]), {}, r"not torch.int64 \[3\] with strides \(2,\)"),
        ((indices, offsets, [table[0]]), {}, r"table 0 is no contiguous tensor \[rows, dim\]"),
        (
            (indices, offsets, [table, table[:, :6].contiguous()]),
            {},
            "multiple of 4 up to 2048, and table 1 has 6: 8 will",
        ),
        ((indices, offsets, [torch.zeros(1, 4096)]), {}, "up to 2048, and table 0 has 4096: 2048 will do"),
        ((indices, offsets, [torch.zeros(0, 8)]), {}, "table 0 has no rows"),
        ((indices, offsets, [table.double()]), {}, "takes tables of .*, and table 0 is torch.float64"),
        ((indices, offsets, [table, table.half()]), {}, "table 0 is torch.float32 and table 1 torch.float16"),
        ((indices, offsets, [table.to("meta")]), {}, "table 0 is on meta and offsets on cpu"),
        ((indices.to("meta"), offsets, [table]), {}, "offsets are on cpu and indices on meta"),
        (
            (indices, offsets, [table, table.clone().requires_grad_()]),
            {},
            "table 0 and table 1 differ in requires_grad",
        ),
        ((indices, offsets, [table] * 3), {}, r"offsets of 3 tables have 3 x the global batch \+ 1 elements, not 5"),
        ((indices, offsets[:4], [table]), {}, "2 ranks do not divide the global batch of 3: 4 will do"),
        ((indices, offsets, [table]), {"batch": 6}, "offsets are for a global batch of 4, and batch says 6"),
        ((indices, offsets[:1], []), {}, "this rank has no tables, .*: give batch="),
        ((indices, offsets, []), {"batch": 4}, "offsets for no tables have one element, not 5"),
        ((indices, offsets, [table]), {"weights": torch.ones(2)}, r"one an index, \[3\] on cpu, not \[2\]"),
        ((indices, offsets, [table]), {"weights": torch.ones(6)[::2]}, r"not \[3\] with strides \(2,\) on cpu"),
        ((indices, offsets, [table]), {"weights": torch.ones(3).double()}, "takes weights of .*, not torch.float64"),
        ((indices, offsets, [table]), {"weights": torch.ones(3).requires_grad_()}, "no gradient: detach"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.embedding_all_to_all(*arguments, **options)
    rank, grad = dist.get_rank(), torch.zeros(2, 16)
    settings = torch.zeros(2)
    for arguments, options, words in (
        ((grad[:1],), {"optimizer": "sgd", "settings": settings}, r"gradient is torch.float32 \[2, 16\] on cpu"),
        ((grad,), {"optimizer": "adam", "settings": settings}, "optimizer is one of sgd, adagrad, not 'adam'"),
        ((grad,), {"optimizer": "sgd", "settings": settings[:1]}, r"settings are fp32 \[2\]"),
        ((grad,), {"optimizer": "sgd", "settings": torch.zeros(4)[::2]}, r"contiguous, .* with strides \(2,\) on cpu"),
        ((grad,), {"optimizer": "sgd", "settings": settings.to("meta")}, "contiguous, on cpu: .* on meta"),
        (
            (grad,),
            {"optimizer": "adagrad", "settings": settings, "states": [settings.to("meta")]},
            r"the state of table 0 is fp32 \[2\], contiguous, on cpu, not .* on meta",
        ),
        ((grad,), {"optimizer": "adagrad", "settings": settings}, "adagrad of 1 tables has 1 states, not 0"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.embedding_all_to_all_update(*arguments, indices, offsets, [table], **options)
    with pytest.raises(ValueError, match="optimizer is None or one of sgd, adagrad"):
        ops.EmbeddingAllToAll([(2, 4)], optimizer="adam")
    for shape, options, words in (
        ((0, 4), {}, "table 0 has no rows"),
        ((2, 6), {}, "multiple of 4 up to 2048, and table 0 has 6: 8 will do"),
        ((2, 4), {"dtype": torch.float64}, "takes tables of .*, and table 0 is torch.float64"),
        ((2, 4), {"mode": "max"}, "mode is one of sum, mean, not 'max'"),
        ((2, 4), {"optimizer": "sgd", "learning_rate": -0.1}, "learning_rate is -0.1 and epsilon 1e-08, but both must"),
        ((2, 4), {"optimizer": "sgd", "learning_rate": float("nan")}, "learning_rate is nan"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.EmbeddingAllToAll([shape], **options)
    with pytest.raises(ValueError, match="none can be sparse"):
        ops.EmbeddingAllToAll([(2, 4)], optimizer="sgd", sparse=True)
    for place, (own, words) in enumerate(
        (
            (([table], [table.half()]), "one tables' dtype: rank 0's is float32, rank 1's float16"),
            (([table], [table.clone().requires_grad_()]), "tables' requires_grad: rank 0's is False, rank 1's True"),
            (([table], [torch.zeros(2, 8), torch.zeros(2, 8)]), "one global batch: rank 0's is 4, rank 1's 2"),
            (([], []), "no rank of the group has a table"),
        )
    ):
        tables = own[rank]
        bounds = offsets if tables else offsets[:1]
        with pytest.raises(ValueError, match=words):
            ops.embedding_all_to_all(indices, bounds, tables, name=f"disagree {place}", batch=None if tables else 4)


def check_registration():
    """torch's own checks: schema, fake implementation, autograd and ahead-of-time dispatch."""
    name = dist.group.WORLD.group_name
    indices, offsets = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2, 3, 3])
    tables = [torch.randn(2, 4), torch.randn(3, 8)]
    leaves = [table.clone().requires_grad_() for table in tables]
    operators = torch.ops.stretto
    for mode in ("sum", "mean"):
        arguments = (indices, offsets, leaves, None, None, mode, 2, 24, torch.float32, True, False, "", name)
        torch.library.opcheck(operators.embedding_all_to_all.default, arguments)
    grad = torch.randn(1, 24)
    arguments = (grad, indices, offsets, None, "sum", 2, [2, 3], [4, 8], "", name)
    torch.library.opcheck(operators.embedding_all_to_all_gradients.default, arguments)
    states = [torch.zeros(2), torch.zeros(3)]
    settings = torch.tensor([0.1, 1e-8])
    arguments = (grad, indices, offsets, tables, states, settings, None, "adagrad", "sum", 2, "", name)
    torch.library.opcheck(operators.embedding_all_to_all_update.default, arguments)


def compile_a_look_up():
    """A look-up and what follows it, traced whole by torch.compile, has the bits of the eager one, both ways."""
    indices, offsets = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2, 3, 3])
    tables = [torch.randn(2, 4), torch.randn(3, 8)]
    group = dist.group.WORLD

    def layer(first, second):
        return torch.relu(ops.embedding_all_to_all(indices, offsets, [first, second], group, mode="mean"))

    outcomes = []
    for function in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
        leaves = [table.clone().requires_grad_() for table in tables]
        out = function(*leaves)
        out.square().sum().backward()
        outcomes.append([out, *(leaf.grad for leaf in leaves)])
    return [torch.equal(one, other) for one, other in zip(*outcomes, strict=True)]


def compile_more_look_ups():
    """As `compile_a_look_up`: batches one after another, rank 1 without tables; sparse gradients, for a graph break."""
    rank, group = dist.get_rank(), dist.group.WORLD
    tables = [torch.randn(3, 4)] * (1 - rank)

    def layer(indices, offsets, leaves, batch, sparse):
        name = "compiled more"
        options = {"batch": batch, "name": name, "sparse": sparse}
        return torch.relu(ops.embedding_all_to_all(indices, offsets, leaves, group, **options))

    right = []
    for sparse, batches in ((False, (2, 4, 6)), (True, (2,))):
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=not sparse)
        for batch in batches:
            indices, offsets = torch.arange(batch * len(tables)) % 3, torch.arange(batch * len(tables) + 1)
            outcomes = []
            for function in (compiled, layer):
                leaves = [table.clone().requires_grad_() for table in tables]
                out = function(indices, offsets, leaves, batch, sparse)
                out.square().sum().backward()
                assert all(leaf.grad.is_sparse == sparse for leaf in leaves)
                outcomes.append([out, [leaf.grad.to_dense() for leaf in leaves]])
            (out, grads), (other, others) = outcomes
            right += [torch.equal(out, other), all(map(torch.equal, grads, others))]
    return right


def change_tables_between_calls():
    """What is looked up in tables that others replace, or that are moved, filled and resized in place."""
    indices, offsets = torch.tensor([0, 1]), torch.arange(3)

    def look_up(table):
        return ops.embedding_all_to_all(indices, offsets, [table]).unique().tolist()

    found = [look_up(torch.full((2, 4), value)) for value in (1.0, 2.0, 3.0)]  # which may be at one address
    table = torch.full((2, 4), 4.0)
    found.append(look_up(table))
    table.data = torch.full((2, 4), 5.0)
    found.append(look_up(table))
    table.fill_(6.0)
    found.append(look_up(table))
    table.resize_(1, 4)
    with pytest.raises(ValueError, match="is 1, but table 0 of this rank has 1 rows"):
        look_up(table)
    table.data = torch.ones(4, 2).t()
    with pytest.raises(ValueError, match="table 0 is no contiguous tensor"):
        look_up(table)
    return found


def look_up_many_sets_of_tables(after_capture):
    """Of the words that one step had kernels read, how many live when many other tables have been described.

    after_capture: whether a CUDA graph, of which CPUs have none, would have been captured from the step.
    """
    launch_config._kept.clear()  # what earlier programs of this process have made
    for function in (
        launch_config._describe_tables,
        backward._describe_rows,
        backward._describe_target,
        backward._find_tables_of,
    ):
        function.cache_clear()
    layer = ops.EmbeddingAllToAll([(3, 4), (5, 8)], optimizer="sgd", learning_rate=0.5)

    def step():
        layer(torch.tensor([0, 1]), torch.tensor([0, 1, 2])).sum().backward()

    step()
    kept = [*launch_config._kept.values(), backward._find_tables_of((4, 8), torch.device("cpu"))]
    words = [weakref.ref(word) for word in kept]
    del kept
    if after_capture:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch_config, "_is_capturing", lambda device: True)
            step()
    for number in range(300):
        shape = (number + 1, 4 * (number + 1))
        launch_config.describe_tables(find_tables([torch.empty(shape)], torch.device("cpu")), 0, 1, shape[1], 1)
        backward._describe_rows((number,), (4,), 4, torch.device("cpu"))
        backward._describe_target((shape[1],), 4, "sgd", False, torch.device("cpu"))
    gc.collect()
    return sum(word() is not None for word in words), len(words)


def look_up_in_all_modes_of_autograd():
    """What an output knows of gradients, mode by mode; and what may be done with it."""
    world = dist.get_world_size()
    indices, offsets = torch.zeros(world, dtype=torch.int64), torch.arange(world + 1)
    table = torch.ones(2, 4, requires_grad=True)

    def look_up():
        return ops.embedding_all_to_all(indices, offsets, [table])

    assert look_up().requires_grad
    with torch.no_grad():
        weights = torch.ones(world, requires_grad=True)  # which only gradients would need
        assert torch.equal(ops.embedding_all_to_all(indices, offsets, [table], weights=weights), look_up())
        assert not look_up().requires_grad
    with torch.inference_mode():
        assert look_up().is_inference()
    table.requires_grad_(False)
    assert not look_up().requires_grad
    table.requires_grad_()
    out = look_up()
    out += 1.0  # no view of anything: it may be changed in place
    out.relu_().sum().backward()
    assert table.grad.tolist() == [[world] * 4, [0.0] * 4]
    (grad,) = torch.autograd.grad(look_up().square().sum(), [table], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
    table.requires_grad_(False)
    with forward_ad.dual_level():
        table = forward_ad.make_dual(table, torch.ones(2, 4))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            look_up()


class Watch(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(str(operator))
        return operator(*args, **kwargs or {})


def watch_operators():
    """Torch's modes, and export, see the operators that eager calls do without; the bits are the same."""
    world = dist.get_world_size()
    indices, offsets = torch.zeros(world, dtype=torch.int64), torch.arange(world + 1)
    settings, grad = torch.tensor([1.0, 0.0]), torch.ones(1, 4 * world)
    outcomes = []
    for mode in (contextlib.nullcontext(), watch := Watch()):
        table = torch.full((2, 4), 8.0, requires_grad=True)
        with mode:
            out = ops.embedding_all_to_all(indices, offsets, [table])
            out.backward(grad)
            version = table._version
            ops.embedding_all_to_all_update(grad, indices, offsets, [table], optimizer="sgd", settings=settings)
        outcomes.append((out.tolist(), table.grad.tolist(), table.tolist(), table._version - version))
    seen = [name for name in watch.seen if name.startswith("stretto")]

    class Model(torch.nn.Module):
        def forward(self, indices, offsets, table):
            return ops.embedding_all_to_all(indices, offsets, [table])

    exported = torch.export.export(Model(), (indices, offsets, torch.ones(2, 4)))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    return outcomes[0] == outcomes[1], outcomes[0][3], seen, called


def tune(folder):
    """A look-up is launched as was measured to be fastest, and files that hold no configs change nothing."""
    os.environ["STRETTO_CACHE"] = folder
    autotune._load.cache_clear()
    indices, offsets, tables = torch.zeros(2, dtype=torch.int64), torch.arange(3), [torch.ones(2, 4)]
    before = forward.find_tuned_config(LookupSize(2, 16, 1, 2, 2), offsets.device)
    config = ops.tune_embedding(indices, offsets, tables)
    found = forward.find_tuned_config(LookupSize(2, 16, 1, 2, 2), offsets.device)
    other = forward.find_tuned_config(LookupSize(2, 16, 1, 4, 2), offsets.device)
    store = TuningStore()
    machine = autotune._autotuner(offsets.device).machine
    store.add(machine, {"embedding x, 3/1/1/1/1/by_table": [1.0], "embedding y, z": [1.0]})
    autotune._load.cache_clear()
    again = forward.find_tuned_config(LookupSize(2, 16, 1, 2, 2), offsets.device)
    del os.environ["STRETTO_CACHE"]
    autotune._load.cache_clear()
    return before is None, found == config == again, other is None
