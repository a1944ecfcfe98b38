# SPDX-License-Identifier: Apache-2.0
"""Optimizers of the fused update, by interpreted kernels: those of `optim.row_update`, which are torch.optim's."""

import importlib
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest

from stretto import ops
from stretto.optim import RowWiseAdagrad
from stretto.optim.row_update import STATE_NAMES, draw_bits, round_at_random, update_rows

KINDS = {"sgd": "sgd", "adagrad": "rowwise-adagrad", "full-adagrad": "full-adagrad", "adam": "adam"}
ROWS, DIM = 6, 8


def make_settings(dtype=torch.float64, **changed):
    values = {"lr": 0.1, "eps": 1e-8, "decay": 0.0, "max_norm": math.inf, "first": 0.1, "second": 0.001} | changed
    return torch.tensor(list(values.values()), dtype=dtype)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("kind", STATE_NAMES)
def test_rows_are_updated_as_torch_optimizers_update_whole_tables(kind, decay):
    table = torch.nn.Parameter(torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    optimizer = {
        "sgd": lambda: torch.optim.SGD([table], lr=0.1, weight_decay=decay),
        "rowwise-adagrad": lambda: RowWiseAdagrad([table], lr=0.1),
        "full-adagrad": lambda: torch.optim.Adagrad([table], lr=0.1, eps=1e-8, weight_decay=decay),
        "adam": lambda: torch.optim.Adam([table], lr=0.1, eps=1e-8, weight_decay=decay),
    }[kind]()
    held = table.detach().clone()
    states = [
        torch.zeros(ROWS if kind == "rowwise-adagrad" else (ROWS, DIM), dtype=torch.float64) for _ in STATE_NAMES[kind]
    ]
    for step in range(4):
        gradient = torch.randn(ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + step))
        table.grad = gradient + (decay * table.detach() if kind == "rowwise-adagrad" else 0)
        optimizer.step()
        held, states = update_rows(kind, held, gradient, states, make_settings(decay=decay), torch.tensor(step))
        torch.testing.assert_close(held, table.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("sgd", "EXACT_SGD"), ("rowwise-adagrad", "EXACT_ROWWISE_ADAGRAD"), ("full-adagrad", "EXACT_ADAGRAD")],
)
def test_rows_are_updated_as_fbgemm_updates_them(kind, name, pooling):
    """By its table-batched embeddings on a CPU, which have no Adam."""
    pytest.importorskip("fbgemm_gpu", reason="the peer")
    training = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    peer = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=training.OptimType[name],
        pooling_mode=common.PoolingMode[pooling],
        learning_rate=0.1,
        eps=1e-8,
    )
    generator = torch.Generator().manual_seed(1)
    (theirs,) = peer.split_embedding_weights()
    theirs.copy_(torch.randn(ROWS, DIM, generator=generator))
    held = theirs.clone()
    states = [torch.zeros(ROWS if kind == "rowwise-adagrad" else (ROWS, DIM)) for _ in STATE_NAMES[kind]]
    for step in range(4):
        indices = torch.randint(0, ROWS - 1, (11,), generator=generator)
        offsets = torch.tensor([0, 3, 3, 4, 9, 11])
        table = held.clone().requires_grad_()
        out = torch.nn.functional.embedding_bag(indices, table, offsets[:-1], mode=pooling.lower())
        found = peer(indices, offsets)
        torch.testing.assert_close(found, out)
        towards = torch.randn(out.shape, generator=generator)
        out.backward(towards)
        found.backward(towards)
        rows = indices.unique()
        settings = make_settings(dtype=torch.float32)
        updated, changed = update_rows(
            kind, held[rows], table.grad[rows], [one[rows] for one in states], settings, torch.tensor(step)
        )
        held[rows] = updated
        for one, new in zip(states, changed, strict=True):
            one[rows] = new
    torch.testing.assert_close(held, theirs)
    for state, (sums, *_) in zip(states, peer.split_optimizer_states(), strict=False):
        torch.testing.assert_close(state, sums)


def test_a_gradient_is_clipped_to_a_norm_before_decay_is_added():
    gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    held = torch.ones(3, 2, dtype=torch.float64)
    settings = make_settings(lr=1.0, decay=0.5, max_norm=1.0)
    updated, _ = update_rows("sgd", held, gradient, [], settings, torch.tensor(0))
    torch.testing.assert_close(held - updated - 0.5, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0, 0]]).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1234567, -3.3e-6, 2e-7, 1.0, math.inf, math.nan, 0.0])
def test_stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(dtype, value):
    values = torch.full((256, 1024), value)
    bits = draw_bits(torch.tensor([3, 7]), 5, torch.arange(256) + 2**33, 0, 1024)
    found = round_at_random(values, bits, dtype).float()
    nearest = torch.tensor(value).to(dtype).float()
    if not math.isfinite(value) or nearest == torch.tensor(value):
        assert torch.equal(found, nearest.expand_as(found)) or found.isnan().all()
        return
    below, above = found.min(), found.max()
    assert below < value < above
    assert set(found.unique().tolist()) == {below.item(), above.item()}
    assert nearest in (below, above)
    spread = (above - below).item()
    assert abs(found.double().mean().item() - torch.tensor(value).item()) < 4 * spread / 2 / math.sqrt(values.numel())


def test_random_bits_depend_on_seed_step_table_row_and_column():
    drawn = [draw_bits(torch.tensor([0, 0]), 0, torch.arange(64), 0, 64)]
    drawn += [draw_bits(torch.tensor(clock), 0, torch.arange(64), 0, 64) for clock in ([1, 0], [0, 1])]
    drawn += [draw_bits(torch.tensor([0, 0]), 1, torch.arange(64), 0, 64)]
    drawn += [draw_bits(torch.tensor([0, 0]), 0, torch.arange(64) + (1 << 32), 0, 64)]
    assert len(torch.cat([one.flatten() for one in drawn]).unique()) > 5 * 64 * 64 - 20
    assert torch.equal(draw_bits(torch.tensor([0, 0]), 0, torch.arange(32, 64), 16, 8), drawn[0][32:, 16:24])
    ones = torch.stack([(drawn[0] >> bit) & 1 for bit in range(32)]).double().mean((1, 2))
    assert ((ones - 0.5).abs() < 0.05).all()


CASES = [
    (optimizer, dtype, is_plain)
    for optimizer, (dtype, is_plain) in itertools.product(
        KINDS, [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False), (torch.float16, False)]
    )
    if not (is_plain and optimizer in ("sgd", "adagrad"))  # those have tests of their own
]


def update_by_kernels(cases, steps, device="cpu"):
    """The largest difference of a table or state from `update_rows`, of each case, and how many numbers differ."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shapes, first_rows = [(9, 8), (5, 12)], [rank * 9, rank * 5]
    generator = torch.Generator().manual_seed(rank)
    batch = 4 * world
    lengths = torch.randint(0, 6, (len(shapes) * batch,), generator=generator)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    ends = offsets[::batch].tolist()
    offsets_there = offsets.to(device)
    rows = [rows for rows, _ in shapes]
    found = []
    for number, (optimizer, dtype, is_plain) in enumerate(cases):
        tables = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        count = len(STATE_NAMES[KINDS[optimizer]])
        states = [
            torch.zeros(shape[0] if optimizer == "adagrad" else shape, device=device)
            for shape in shapes
            for _ in range(count)
        ]
        options = {} if is_plain else {"weight_decay": 0.125, "max_norm": 2.0}
        settings = ops.table_settings(2, learning_rate=[0.25, 0.5], **options, device=device)
        clock = torch.tensor([4, 99], device=device)
        blocks = [ops.TableBlock(2 * table, first_rows[table], 4) for table in range(2)]
        is_stochastic = dtype != torch.float32
        theirs, their_states = [table.cpu().clone() for table in tables], [state.cpu().clone() for state in states]
        for step in range(steps):
            indices = torch.cat(
                [torch.randint(0, rows[t], (ends[t + 1] - ends[t],), generator=generator) for t in range(2)]
            )
            out = ops.embedding_all_to_all(indices.to(device), offsets_there, tables, name=str(number))
            # Multiples of 1/4: sums are exact, whatever the order.
            grad = (torch.randint(-4, 5, out.shape, generator=generator) / 4).to(dtype)
            ops.embedding_all_to_all_update(
                grad.to(device), indices.to(device), offsets_there, tables, name=str(number),
                update=ops.TableUpdate(optimizer, settings, states, clock, blocks, is_stochastic),
            )  # fmt: skip
            every = [torch.empty_like(grad, device=device) for _ in range(world)]
            dist.all_gather(every, grad.to(device))
            column = sum(dim for _, dim in shapes) * rank
            for table, (_, dim) in enumerate(shapes):
                of_table = indices[ends[table] : ends[table + 1]]
                samples = torch.arange(batch).repeat_interleave(lengths[table * batch : (table + 1) * batch])
                total = torch.zeros(rows[table], dim)
                total.index_add_(0, of_table, torch.cat(every).cpu()[samples, column : column + dim].float())
                touched = of_table.unique()
                own = their_states[table * count : (table + 1) * count]
                now = torch.tensor([4 + step, 99])
                updated, changed = update_rows(
                    KINDS[optimizer], theirs[table][touched].float(), total[touched], [one[touched] for one in own],
                    settings[table].cpu(), now[0],
                )  # fmt: skip
                if is_stochastic:
                    bits = draw_bits(now, 2 * table, touched + first_rows[table], 4, dim)
                    updated = round_at_random(updated, bits, dtype)
                theirs[table][touched] = updated.to(dtype)
                for one, new in zip(own, changed, strict=True):
                    one[touched] = new
                column += dim
        assert clock.tolist() == [4 + steps, 99]
        pairs = zip([*tables, *states], [*theirs, *their_states], strict=True)
        apart = [((a.cpu().float() - b.float()).abs() / b.float().abs().clamp(min=1.0)) for a, b in pairs]
        worst = largest(one.max().item() for one in apart)
        found.append((worst, sum((one > 1e-6).sum().item() for one in apart)))
    return found


@pytest.mark.parametrize(
    ("ranks", "cases", "steps"),
    [(1, [("adam", torch.bfloat16, False)], 1), pytest.param(2, CASES, 2, marks=pytest.mark.exhaustive)],
)
def test_every_optimizer_of_the_kernel_is_that_of_rows_with_the_same_random_bits(interpret, ranks, cases, steps):
    for of_rank in interpret(ranks, update_by_kernels, cases, steps):
        for (optimizer, dtype, _), (worst, wrong) in zip(cases, of_rank, strict=True):
            if dtype == torch.float32:
                assert worst < 2e-6, optimizer
            else:  # a last bit of fp32 may decide which neighbour is taken
                assert worst <= 2**-7, optimizer
                assert wrong <= 2, optimizer


def refuse():
    """Messages of invalid steps."""
    world = dist.get_world_size()
    table, indices, offsets = torch.zeros(4, 8), torch.zeros(world, dtype=torch.int64), torch.arange(world + 1)
    found = []
    for changed in (
        {"optimizer": "adam"},
        {"optimizer": "adamw"},
        {"optimizer": "adam", "settings": ops.table_settings(1), "states": [torch.zeros(4, 8)]},
        {"optimizer": "adam", "settings": ops.table_settings(1), "states": [torch.zeros(4, 8)] * 2},
        {"optimizer": "full-adagrad", "states": [torch.zeros(4)]},
        {"optimizer": "sgd", "is_stochastic": True},
        {"optimizer": "sgd", "is_stochastic": True, "clock": torch.zeros(2, dtype=torch.int64)},
        {"optimizer": "sgd", "clock": torch.zeros(1, dtype=torch.int64)},
        {"optimizer": "sgd", "blocks": [ops.TableBlock(0)] * 2},
    ):
        grad = torch.zeros(1, 8 * world)
        update = ops.TableUpdate(**({"settings": torch.tensor([1.0, 0.0])} | changed))
        with pytest.raises(ValueError) as error:
            ops.embedding_all_to_all_update(grad, indices, offsets, [table], update=update)
        found.append(str(error.value).removeprefix("embedding_all_to_all_update: "))
    return found


def test_a_step_whose_tensors_do_not_fit_is_refused(interpret):
    (found,) = interpret(1, refuse)
    for message, words in zip(
        found,
        [
            "settings of adam are [1, 6]: learning rate and epsilon",
            "optimizer is 'adamw', but must be one of sgd, adagrad, full-adagrad, adam",
            "adam of 1 tables has 2 states, not 1",
            "adam and stochastic rounding count steps: pass clock=",
            "the state of table 0 must be [4, 8] of torch.float32",
            "adam and stochastic rounding count steps",
            "fp32 tables are not rounded: leave is_stochastic out",
            "clock (steps and seed) must be [2] of torch.int64",
            "there are 2 blocks of 1 tables",
        ],
        strict=True,
    ):
        assert message.startswith(words)
    with pytest.raises(ValueError, match="learning_rate has 2 numbers, but there are 3 tables"):
        ops.table_settings(3, learning_rate=[0.1, 0.2])
    with pytest.raises(ValueError, match="weight_decay is -1, but must be at least 0"):
        ops.table_settings(1, weight_decay=-1)


def train_modules():
    """A module with Adam, bf16 tables and a seed goes on as one that has loaded its state dict."""
    world = dist.get_world_size()
    indices, offsets = torch.arange(2 * world) % 3, torch.arange(2 * world + 1)
    options = {
        "optimizer": "adam",
        "learning_rate": [0.5, 0.25],
        "weight_decay": 0.1,
        "dtype": torch.bfloat16,
        "seed": 5,
    }
    names = [f"{place} of {dist.get_rank()}" for place in ("a", "b")]
    shapes = [(3, 4), (4, 8)]
    first = ops.EmbeddingAllToAll(shapes, names=names, **options)
    assert first.settings.shape == (2, 6)
    assert [tuple(state.shape) for state in first.states] == [(3, 4), (3, 4), (4, 8), (4, 8)]

    def train(module):
        module(indices, offsets).square().sum().backward()

    train(first)
    second = ops.EmbeddingAllToAll(shapes, names=names, **options)
    second.load_state_dict(first.state_dict())
    for module in (first, second):
        train(module)
    assert second.clock.tolist() == [2, 5]
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    second.set_learning_rate(0.0)
    assert second.settings[:, 0].tolist() == [0.0, 0.0]
    assert ops.EmbeddingAllToAll([(3, 4)], optimizer="full-adagrad").settings.shape == (2,)
    empty = ops.EmbeddingAllToAll([(3, 4)] * (dist.get_rank() == 0), optimizer="adam")
    own = indices[: world * (dist.get_rank() == 0)]
    empty(own, torch.arange(len(own) + 1), batch=world).sum().backward()
    assert empty.clock[0] == 1


@pytest.mark.long
def test_a_module_with_adam_and_stochastic_rounding_goes_on_from_its_state_dict(interpret):
    interpret(2, train_modules)
