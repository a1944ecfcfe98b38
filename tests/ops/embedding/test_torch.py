# SPDX-License-Identifier: Apache-2.0
"""Embedding look-ups as torch checks, compiles, exports and watches them, and in all modes of autograd."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from stretto import ops


def check_registration():
    """torch's own checks: schema, fake implementation, autograd and ahead-of-time dispatch."""
    name = dist.group.WORLD.group_name
    indices, offsets = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2, 3, 3])
    tables = [torch.randn(2, 4), torch.randn(3, 8)]
    leaves = [table.clone().requires_grad_() for table in tables]
    operators = torch.ops.stretto
    arguments = (indices, offsets, leaves, None, None, "mean", 2, 24, torch.float32, True, False, True, "", name, "")
    torch.library.opcheck(operators.embedding_all_to_all.default, arguments)
    grad = torch.randn(1, 24)
    arguments = (grad, indices, offsets, None, "sum", 2, [2, 3], [4, 8], "", name)
    torch.library.opcheck(operators.embedding_all_to_all_gradients.default, arguments)
    states = [torch.zeros(table.shape) for table in tables for _ in range(2)]
    update = ops.table_settings(2), torch.tensor([3, 1]), None, "adam", [5, 0, 0, 6, 0, 0], False
    arguments = (grad, indices, offsets, tables, states, *update, "sum", 2, "", name)
    torch.library.opcheck(operators.embedding_all_to_all_update.default, arguments)


@pytest.mark.long
def test_the_operators_are_registered_as_torch_asks(interpret):
    interpret(2, check_registration, timeout=200.0)


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


@pytest.mark.long
def test_torch_compile_takes_a_look_up_without_a_graph_break(interpret):
    assert interpret(2, compile_a_look_up, timeout=200.0) == [[True] * 3] * 2


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


@pytest.mark.long
def test_torch_compile_takes_other_batches_ranks_without_tables_and_sparse_gradients(interpret):
    assert interpret(2, compile_more_look_ups, timeout=200.0) == [[True] * 8] * 2


def look_up_in_all_modes_of_autograd():
    """Return what an output knows of gradients, mode by mode; and what may be done with it."""
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


def test_an_output_needs_gradients_as_its_tables_do_and_may_be_changed_in_place(interpret):
    interpret(2, look_up_in_all_modes_of_autograd)


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
            ops.embedding_all_to_all_update(grad, indices, offsets, [table], update=ops.TableUpdate("sgd", settings))
        outcomes.append((out.tolist(), table.grad.tolist(), table.tolist(), table._version - version))
    seen = [name for name in watch.seen if name.startswith("stretto")]

    class Model(torch.nn.Module):
        def forward(self, indices, offsets, table):
            return ops.embedding_all_to_all(indices, offsets, [table])

    exported = torch.export.export(Model(), (indices, offsets, torch.ones(2, 4)))
    called = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    return outcomes[0] == outcomes[1], outcomes[0][3], seen, called


def test_torch_sees_the_operators_where_it_watches_or_exports(interpret):
    name = "stretto.embedding_all_to_all"
    seen = [f"{name}.default", f"{name}_gradients.default", f"{name}_update.default"]
    assert interpret(2, watch_operators) == [(True, 1, seen, seen[:1])] * 2
