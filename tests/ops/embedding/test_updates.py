# SPDX-License-Identifier: Apache-2.0
"""Gradients and fused updates of embedding tables, by interpreted kernels, against the unfused ones."""

import random
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.embedding.jagged import Kind, fill_case, is_close, look_up_case, make_case, own_rows

from stretto import ops
from stretto.ops.embedding import backward

SEED = random.randrange(10**6)


def touched_rows(case, place):
    """The rows of this rank's table that are looked up, each once."""
    owner = case.owners[dist.get_rank()]
    first, last = owner.offsets[place * case.batch], owner.offsets[(place + 1) * case.batch]
    return sorted(set(owner.indices[first:last].tolist()))


def differentiate(first, calls):
    """Gradients of random batches, dense and sparse; the seeds of those that are wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for seed in range(first, first + calls):
        case = make_case(seed, world, most_indices=12, most_rows=5)
        dtype = case.grad.dtype
        expected = case.expected_gradients(rank)
        found = {}
        for sparse in (False, True):
            tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
            out = look_up_case(case, tables, sparse=sparse)
            with warnings.catch_warnings():
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "calls"),
    [(2, 2), pytest.param(2, 4, marks=pytest.mark.exhaustive), pytest.param(3, 2, marks=pytest.mark.exhaustive)],
)
def test_gradients_dense_and_sparse_are_the_unfused_ones(interpret, ranks, calls):
    print("seed", SEED)
    assert interpret(ranks, differentiate, SEED, calls) == [[]] * ranks


def differentiate_by_64_bits(first, calls):
    """As `differentiate`, with places in the gradient as there are more than 32 bits count."""
    with mock.patch.object(backward, "_MAX_BY_32_BITS", -1):
        return differentiate(first, calls)


@pytest.mark.parametrize("calls", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_gradients_of_more_numbers_than_32_bits_count_are_found_by_64(interpret, calls):
    print("seed", SEED)
    assert interpret(2, differentiate_by_64_bits, SEED, calls) == [[]] * 2


def push_many_samples():
    """Whether the gradients of a batch are right whose samples are sent by several tiles to a signal, the last cut."""
    case = fill_case(Kind([[(5, 4)], []], 66, torch.float32, torch.int64, "sum", False, 2), 13)
    assert len(case.owners[0].indices) > 66
    rank = dist.get_rank()
    tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
    look_up_case(case, tables).backward(own_rows(case, case.grad))
    expected = case.expected_gradients(rank)
    return all(is_close(table.grad, right, torch.float32) for table, right in zip(tables, expected, strict=True))


@pytest.mark.long
def test_gradients_of_many_samples_arrive_whole(interpret):
    assert interpret(2, push_many_samples) == [True, True]


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
    return all(torch.equal(*pair) for pair in pairs), largest(differences, default=0.0)


@pytest.mark.parametrize(
    ("ranks", "optimizer", "bound"), [pytest.param(3, "sgd", 0.0, marks=pytest.mark.long), (2, "adagrad", 1e-5)]
)
def test_the_fused_update_is_the_unfused_one(interpret, ranks, optimizer, bound):
    print("seed", SEED)
    for is_equal, difference in interpret(ranks, train_in_two_ways, SEED, optimizer, 2, torch.float32):
        assert is_equal or difference <= bound


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
            grad, indices, offsets, tables, update=ops.TableUpdate(optimizer, settings, states)
        )
        assert (table == table[:, :1]).all()
        found.append(table[:, 0].tolist())
    with pytest.raises(ValueError, match="tables 0 and 1 are one table, so they have one state"):
        ops.embedding_all_to_all_update(
            grad, indices, offsets, tables, update=ops.TableUpdate("adagrad", settings, [state, torch.zeros(4)])
        )
    with pytest.raises(ValueError, match="tables 0 and 1 share memory partially"):
        ops.embedding_all_to_all_update(
            grad, indices, offsets, [table[:3], table[1:]], update=ops.TableUpdate("sgd", settings)
        )
    return *found, state.tolist()


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_table_of_several_features_gets_one_step_of_all_its_lookups(interpret, ranks):
    # Rows 0 and 2 are looked up once by each rank's samples, row 1 twice, by two features.
    for sgd, adagrad, state in interpret(ranks, update_a_table_of_two_features):
        assert sgd == [-ranks, -2 * ranks, -ranks, 0]
        assert adagrad == [-1, -1, -1, 0]
        assert state == [ranks**2, 4 * ranks**2, ranks**2, 0]


def freeze_and_train():
    """Tables that are frozen, trained, frozen again, and two look-ups of which one trains; rank 1 has no tables.

    Returns the gradients of each step, and the errors of ranks of which only one trains its tables.
    """
    rank, count = dist.get_rank(), 3
    tables = [torch.ones(2, 4)] * (rank != 1)
    indices, offsets = torch.zeros(count * len(tables), dtype=torch.int64), torch.arange(count * len(tables) + 1)
    scale = torch.ones(1, requires_grad=True)  # what a frozen model trains besides

    def look_up(trains, place=0):
        leaves = [(table + place).requires_grad_(trains) for table in tables]
        out = ops.embedding_all_to_all(indices, offsets, leaves, batch=count)
        return leaves, (out * scale).sum()

    grads = []
    for trains in (False, True, False, True):
        leaves, loss = look_up(trains)
        loss.backward()
        grads += [leaf.grad[:, 0].tolist() for leaf in leaves if leaf.grad is not None]
    (_, teacher), (leaves, student) = look_up(False), look_up(True, 1)
    (student - teacher).backward()
    (leaves, student), (_, teacher) = look_up(True), look_up(False, 1)
    (student - teacher).backward()
    grads += [leaf.grad[:, 0].tolist() for leaf in leaves]
    with pytest.raises(ValueError, match="tables of rank 2 need gradients in this call, and rank 0 will send none"):
        look_up(rank == 2)
    with torch.set_grad_enabled(rank != 1):
        with pytest.raises(ValueError, match="tables of rank 2 need gradients in this call, and rank 1 will send none"):
            look_up(True)
    return grads


@pytest.mark.long
def test_tables_may_be_frozen_and_trained_from_call_to_call(interpret):
    first, without, last = interpret(3, freeze_and_train, timeout=40.0)
    assert without == []
    assert first == last == [[3.0, 0.0]] * 3


def update_without_an_epsilon():
    """Adagrad's rows after gradients of zeros, and of ones, on states of zeros; row 0 has more lookups than a chunk."""
    layer = ops.EmbeddingAllToAll([(3, 4)], optimizer="adagrad", learning_rate=0.5, epsilon=0.0)
    layer.tables[0].data.fill_(1.0)
    indices = torch.tensor([0] * 40 + [1])
    for factor in (0.0, 1.0):
        out = layer(indices, torch.tensor([0, 20, 41]))
        (out * torch.tensor([[0.0], [factor]])[dist.get_rank()]).sum().backward()
    return layer.tables[0].tolist(), layer.states[0].tolist()


def test_without_an_epsilon_a_gradient_of_zeros_changes_nothing(interpret):
    found = interpret(2, update_without_an_epsilon)
    assert found == [([[0.5] * 4, [0.5] * 4, [1.0] * 4], [400.0, 1.0, 0.0])] * 2


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


def test_a_module_moves_to_other_dtypes_and_from_the_meta_device(interpret):
    interpret(2, move_modules)
