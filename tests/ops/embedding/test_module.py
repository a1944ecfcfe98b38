# SPDX-License-Identifier: Apache-2.0
"""`EmbeddingAllToAll` inside of models that torch replicates, saves and loads."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from stretto import ops
from stretto.optim import RowWiseAdagrad

ROWS = {"user": 3, "item": 5, "place": 4}
DIM = 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(nn.Module):
    """Tables deep inside of a model, and a layer that all ranks have."""

    def __init__(self, names, **options):
        super().__init__()
        shapes = [(ROWS[name], DIM) for name in names]
        self.sparse = nn.ModuleDict({"features": nn.Sequential(ops.EmbeddingAllToAll(shapes, names=names, **options))})
        self.dense = nn.Linear(DIM * len(ROWS), 1)
        self.dense.weight.data.fill_(0.5)
        for place, name in enumerate(names):
            self.layer.tables[place].data.copy_(torch.arange(ROWS[name] * DIM).view(-1, DIM) + len(name))

    @property
    def layer(self):
        return self.sparse["features"][0]

    def forward(self):
        """Look up each row of each table once, two samples on each rank; the rows get different gradients."""
        batch = 2 * dist.get_world_size()
        bags = [torch.arange(table.shape[0]).tensor_split(batch) for table in self.layer.tables]
        lengths = torch.tensor([0] + [len(bag) for bags_of_table in bags for bag in bags_of_table])
        rows = torch.cat([torch.zeros(0, dtype=torch.int64), *(bag for of_table in bags for bag in of_table)])
        return self.dense(self.layer(rows, lengths.cumsum(0), batch=batch))


def train_replicated(optimizer):
    """The tables and states of a model after its construction and after a step, and the gradient of its dense layer."""
    names = (["user", "item"], ["place"], [])[dist.get_rank()]
    torch.manual_seed(dist.get_rank())  # DDP broadcasts the bias
    model = Model(names, optimizer=optimizer)
    for place, state in enumerate(model.layer.states):
        state.fill_(place + 1.0)
    replicated = DistributedDataParallel(model)
    before = find_own(model)
    replicated().sum().backward()
    after = find_own(model)
    grads = [table.grad.tolist() for table in model.layer.tables if table.grad is not None]
    return before, after, grads, model.dense.bias.tolist(), model.dense.weight.grad.tolist()


def find_own(model):
    return [tensor.tolist() for tensor in (*model.layer.tables, *model.layer.states)]


@pytest.mark.parametrize("optimizer", [pytest.param(None, marks=pytest.mark.long), "adagrad"])
def test_data_parallel_replicates_the_model_around_tables_and_leaves_the_tables_alone(interpret, optimizer):
    outcomes = interpret(3, train_replicated, optimizer)
    for (before, after, grads, *replicated), names in zip(outcomes, (["user", "item"], ["place"], []), strict=True):
        tables = [(torch.arange(ROWS[name] * DIM).view(-1, DIM) + len(name)).tolist() for name in names]
        states = [[place + 1.0] * ROWS[name] for place, name in enumerate(names)] if optimizer else []
        assert before == tables + states
        assert (after != before) == bool(optimizer and names)
        # Of a gradient that each row gets once, 0.5, nothing is divided by the number of ranks.
        assert grads == ([] if optimizer else [[[0.5] * DIM] * ROWS[name] for name in names])
        assert replicated == list(outcomes[0][3:])


def wrap_what_ddp_cannot_hold():
    """Groups of replicas and of tables that do not fit each other; and those that do."""
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    options = {"group": (first, second)[rank // 2], "names": ["user", "item"][rank % 2 : rank % 2 + 1]}
    options["shapes"] = [(ROWS[name], DIM) for name in options["names"]]
    fused = nn.Sequential(ops.EmbeddingAllToAll(**options, optimizer="sgd"), nn.Linear(1, 1))
    plain = nn.Sequential(ops.EmbeddingAllToAll(**options), nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"over ranks \[0, 1, 2, 3\] cannot hold an EmbeddingAllToAll over ranks"):
        DistributedDataParallel(plain)
    with pytest.raises(ValueError, match="optimizer='sgd' makes no gradients that it could average"):
        DistributedDataParallel(fused, process_group=across[rank % 2])
    with pytest.raises(ValueError, match="DistributedDataParallel is not needed: the module has no parameters"):
        DistributedDataParallel(nn.Sequential(plain[0]), process_group=options["group"])
    plain[0].tables[0].data.fill_(rank)
    DistributedDataParallel(plain, process_group=across[rank % 2])  # replicas: equal after it
    equal = plain[0].tables[0].unique().tolist()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        fused, [name for name, _ in (*fused.named_parameters(), *fused.named_buffers()) if name.startswith("0.")]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedDataParallel(fused)  # whose user takes care of the tables
    return equal


def test_data_parallel_over_another_group_holds_replicas_of_tables_or_is_refused(interpret):
    assert interpret(4, wrap_what_ddp_cannot_hold) == [[0.0], [1.0], [0.0], [1.0]]


PLACEMENTS = {1: [["place", "user", "item"]], 2: [["user", "item"], ["place"]], 3: [["item"], [], ["place", "user"]]}


def make_trainer(optimizer):
    """A model of this many ranks, and its torch optimizers: of the dense layer and, unless fused, of the tables."""
    model = Model(PLACEMENTS[dist.get_world_size()][dist.get_rank()], optimizer=optimizer)
    optimizers = [torch.optim.Adam(model.dense.parameters())]
    return model, optimizers if optimizer else [*optimizers, RowWiseAdagrad(model.layer.parameters(), lr=0.5)]


def collect_state(model, optimizers):
    """Return what docs/embedding.md has users save."""
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, fill(optimizers), options=FLAT)}


def fill(optimizers):
    """Those that have parameters; torch's functions fail at others."""
    return [optimizer for optimizer in optimizers if optimizer.param_groups[0]["params"]]


def step(model, optimizers):
    model().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def find_tables_and_states(model, optimizers):
    layer = model.layer
    states = [optimizers[1].sums(table) for table in layer.tables] if optimizers[1:] else layer.states
    return {
        name: (table.tolist(), state.tolist())
        for name, table, state in zip(layer.tables.names, layer.tables, states, strict=True)
    }


def save_after_a_step(path, optimizer):
    model, optimizers = make_trainer(optimizer)
    step(model, optimizers)
    dcp.save(collect_state(model, optimizers), checkpoint_id=path)
    saved = find_tables_and_states(model, optimizers)
    step(model, optimizers)
    return saved, find_tables_and_states(model, optimizers)


def load_and_step(path, optimizer):
    model, optimizers = make_trainer(optimizer)
    for table in model.layer.tables:
        table.data.zero_()
    state = collect_state(model, optimizers)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, fill(optimizers), state["optimizer"], options=FLAT)
    loaded = find_tables_and_states(model, optimizers)
    step(model, optimizers)
    return loaded, find_tables_and_states(model, optimizers)


def merge(of_ranks):
    """Return all ranks' tables by name, first as they were saved or loaded, then after another step."""
    return [{name: held for of_rank in of_ranks for name, held in of_rank[part].items()} for part in (0, 1)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", [None, "adagrad"])
def test_a_checkpoint_holds_the_tables_of_all_ranks_and_resumes_on_others(interpret, tmp_path, optimizer):
    saved = merge(interpret(2, save_after_a_step, str(tmp_path), optimizer))
    assert sorted(saved[0]) == sorted(ROWS)
    for ranks in (1, 3):
        assert merge(interpret(ranks, load_and_step, str(tmp_path), optimizer)) == saved


def name_tables_wrongly():
    """Names that no table can have, or that two tables have, and what becomes of a rank's error on the others."""
    rank = dist.get_rank()
    for names, words in (
        (["a", "b"], "names has one name for each table, 1, not"),
        ("a", "names has one name for each table, 1, not 'a'"),
        ([""], "a string without a dot, and not empty; not ''"),
        (["a.b"], "a string without a dot, and not empty; not 'a.b'"),
        (["type"], "no table can be named 'type'"),
        (["dict"], "no table can be named 'dict'"),
        (["user"], "rank 0 and rank 1 of the group both have a table named 'user'"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.EmbeddingAllToAll([(2, 4)], names=names)
    with pytest.raises(
        ValueError, match="table 0 has 6" if rank else "rank 1 of the group cannot make .* table 0 has 6"
    ):
        ops.EmbeddingAllToAll([(2, 6 if rank else 4)])
    layer = ops.EmbeddingAllToAll([(2, 4)] * (1 + rank), optimizer="adagrad")
    return list(layer.state_dict())


def test_names_of_tables_are_of_one_table_each(interpret):
    assert interpret(2, name_tables_wrongly) == [
        ["state_rank0_0", "tables.rank0_0"],
        ["state_rank1_0", "state_rank1_1", "tables.rank1_0", "tables.rank1_1"],
    ]
