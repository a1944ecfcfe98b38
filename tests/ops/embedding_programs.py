"""What ranks run that look up embeddings with interpreted kernels. Only they import this: see conftest."""

import time

import pytest
import torch
import torch.distributed as dist
from tests.ops.jagged import is_close, make_case

from stretto import ops, tiles
from stretto.ops.embedding import forward
from stretto.ops.embedding.forward_kernel import ORDERS
from stretto.ops.embedding.ways import Way

assert tiles.INTERPRETED.value, "tests.ops.embedding_programs is for processes that interpret their kernels"


def call(case, tables=None, **options):
    """This rank's output of a case."""
    own = case.owners[dist.get_rank()]
    tables = own.tables if tables is None else tables
    return ops.embedding_all_to_all(
        own.indices, own.offsets, tables, weights=own.weights, mode=case.mode, batch=case.batch, name=str(case.seed), **options
    )


def own_rows(case, whole):
    """This rank's rows of what is of the global batch."""
    rows = case.batch // dist.get_world_size()
    return whole[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]


def take_random_ways(generator, order):
    """Have the operator launch itself some other way, on this rank."""
    draws = [1 << int(torch.randint(0, 3, (1,), generator=generator)) for _ in range(4)]
    way = Way(draws[0], draws[1], draws[0] * draws[2], 1, draws[3], order)
    forward.choose_way = lambda *_: way


def look_up_random_batches(first, calls):
    """Look up so many random batches, in all orders, past stragglers; the seeds of those that are wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    chosen = forward.choose_way
    wrong = []
    for seed in range(first, first + calls):
        case = make_case(seed, world)
        if seed % 3:
            take_random_ways(torch.Generator().manual_seed(seed * world + rank), ORDERS[seed % len(ORDERS)])
        if seed % 7 == rank:
            time.sleep(0.02)
        out = call(case)
        if not is_close(out, own_rows(case, case.expected()), out.dtype):
            wrong.append((seed, "wrong"))
        if seed % 5 == 0 and not torch.equal(out, call(case)):
            wrong.append((seed, "another time"))
        forward.choose_way = chosen
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
        for sparse in (False, True, True):
            tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
            out = call(case, tables, sparse=sparse)
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


def touched_rows(case, place):
    """The rows of this rank's table that are looked up, each once."""
    owner = case.owners[dist.get_rank()]
    first, last = owner.offsets[place * case.batch], owner.offsets[(place + 1) * case.batch]
    return sorted(set(owner.indices[first:last].tolist()))


def train_in_two_ways(seed, optimizer, steps, dtype):
    """Tables trained by the fused update and by a torch optimizer on gradients (adagrad: by its definition).

    Whether they are equal to the last bit, and the largest difference.
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
    return all(torch.equal(*pair) for pair in pairs), max([(a - b).abs().max().item() for a, b in pairs], default=0.0)
