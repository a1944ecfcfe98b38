# SPDX-License-Identifier: Apache-2.0
"""Embedding look-ups that are refused: wrong arguments, indices out of range, ranks that disagree or do not come."""

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto import ops
from stretto.memory import PeerError
from stretto.ops.embedding.index_errors import BAD_OFFSETS, IndexErrors
from stretto.ops.embedding.output_ring import find_output_rings


def look_up_with_faults():
    """Return what each kind of bad input raises, on the rank that has it alone;
    and that the next call is right again.
    """
    rank = dist.get_rank()
    tables = [torch.ones(5, 4), torch.ones(3, 4)]
    indices = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
    offsets = torch.tensor([0, 2, 3, 4, 5, 6, 7, 7, 8])  # two tables, a global batch of 4
    bad_index, negative, falling, beyond = indices.clone(), indices.clone(), offsets.clone(), offsets.clone()
    bad_index[5], negative[1], falling[3], beyond[8] = 3, -7, 9, 12
    messages = []
    for wrong, bounds in ((bad_index, offsets), (negative, offsets), (indices, falling), (indices, beyond)):
        try:
            ops.embedding_all_to_all(wrong if rank == 1 else indices, bounds if rank == 1 else offsets, tables)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    out = ops.embedding_all_to_all(indices, offsets, tables)
    ops.check_indices()
    return messages, out[:, ::4].tolist()


def test_a_bad_index_or_offset_is_named_by_its_rank_and_does_not_affect_others(interpret):
    (silent, out), (messages, other) = interpret(2, look_up_with_faults)
    assert silent == [""] * 4
    assert out == [[2.0, 1.0] * 2, [1.0, 1.0] * 2]
    assert other == [[1.0, 0.0] * 2, [1.0, 1.0] * 2]
    index, negative, falling, beyond = messages
    assert "rank 1: indices[5] is 3, but table 1 of this rank has 3 rows: 0 to 2 will do" in index
    assert "rank 1: indices[1] is -7, but table 0 of this rank has 5 rows" in negative
    assert "rank 1: the offsets of bag" in falling
    assert "never fall" in falling
    assert "the offsets of bag 7 (table 1 of this rank) go from 7 to 12" in beyond


def read_rows_out_of_range_as_zeros():
    """An index that is out of range adds nothing to the others of its bag, and gets no gradient."""
    table = torch.ones(5, 4, requires_grad=True)
    indices, offsets = torch.tensor([4, 5, 0]), torch.tensor([0, 2, 3])
    with pytest.raises(ValueError, match=r"indices\[1\] is 5"):
        ops.embedding_all_to_all(indices, offsets, [table])
    operator = torch.ops.stretto.embedding_all_to_all_gradients
    grads = operator(torch.ones(2, 4), indices, offsets, None, "sum", 2, [5], [4], "", dist.group.WORLD.group_name)
    return grads[0][:, 0].tolist()


def test_an_index_out_of_range_is_read_as_zeros_and_gets_no_gradient(interpret):
    assert interpret(1, read_rows_out_of_range_as_zeros) == [[1.0, 0.0, 0.0, 0.0, 1.0]]


def look_up_other_tables_under_one_name():
    """Two sets of tables under one name, of which one rank has the same part; each rank's error."""
    rank = dist.get_rank()
    indices, offsets = torch.zeros(2, dtype=torch.int64), torch.arange(3)
    for dims in ((4, 8), (8, 4)):  # of rank 0's table and rank 1's
        ops.embedding_all_to_all(indices, offsets, [torch.ones(2, dims[rank])])
    with pytest.raises(ValueError, match=f"rank {1 - rank} has looked up other tables in this call.*: give each set"):
        ops.embedding_all_to_all(indices, offsets, [torch.ones(2, 4)])  # each has had it, beside another one
    return ops.embedding_all_to_all(indices, offsets, [torch.ones(2, 4)], name="narrow").tolist()


def test_ranks_with_different_tables_raise(interpret):
    assert interpret(2, look_up_other_tables_under_one_name) == [[[1.0] * 8]] * 2


def look_up_tables_of_two_sets():
    """Rank 2 looks up as it did in one set of tables, in which it has none, and the others as in another one."""
    rank, count = dist.get_rank(), 6
    parts = [[[4], [4, 4], []], [[8], [8], [4]]]
    found = []
    for number, own in enumerate((*(of_set[rank] for of_set in parts), parts[rank != 2][rank], parts[0][rank])):
        tables = [torch.full((2, dim), number + 1.0) for dim in own]
        indices, offsets = torch.zeros(count * len(own), dtype=torch.int64), torch.arange(count * len(own) + 1)
        (ring,) = find_output_rings(dist.group.WORLD.group_name) or [None]
        before = None if ring is None else ring.slots.clone()
        try:
            found.append(ops.embedding_all_to_all(indices, offsets, tables, batch=count).unique().tolist())
        except ValueError as error:
            found.append(str(error))
            assert torch.equal(ring.slots, before)
    return found


def test_tables_of_another_set_store_nothing_and_are_an_error_on_ranks_without_tables_too(interpret):
    for found in interpret(3, look_up_tables_of_two_sets):
        assert (found[0], found[1], found[3]) == ([1.0], [2.0], [4.0])
        assert "has looked up other tables in this call" in found[2]


def look_up_with_indices_of_two_dtypes():
    """Ranks with tables compare the dtypes of their indices; one without has none to look up. All compare schedules."""
    rank = dist.get_rank()
    tables = [torch.ones(2, 4)] * (rank != 1)
    offsets = torch.arange(3 * len(tables) + 1)

    def look_up(dtypes, name):
        indices = torch.zeros(3 * len(tables), dtype=dtypes[rank])
        return ops.embedding_all_to_all(indices, offsets, tables, batch=3, name=name).unique().tolist()

    with pytest.raises(ValueError, match=r"one dtype of indices: rank 0's is torch.int32, rank 2's torch.int64"):
        look_up((torch.int32, torch.int32, torch.int64), "two")
    same, schedule = torch.zeros(3 * len(tables), dtype=torch.int64), "direct-all-to-all" if rank == 1 else None
    with pytest.raises(ValueError, match=r"one schedule \(none: ''\): rank 0's is , rank 1's direct-all-to-all"):
        ops.embedding_all_to_all(same, offsets, tables, batch=3, name="scheduled", schedule=schedule)
    found = look_up((torch.int32, torch.int64, torch.int32), "one")
    return found, look_up((torch.int64, torch.int32, torch.int64), "one")


def test_ranks_whose_indices_have_different_dtypes_raise(interpret):
    assert interpret(3, look_up_with_indices_of_two_dtypes) == [([1.0], [1.0])] * 3


def look_up_after_a_bad_batch(optimizer):
    """As on GPUs, where a bad offset is seen by the host after its call: rank 1 raises its error in the next one.

    The others, which learn of it later still, go on with their step: gradients of zeros, and rows that stay.
    """
    rank = dist.get_rank()
    layer = ops.EmbeddingAllToAll([(2, 4)] * (rank < 2), optimizer=optimizer, sparse=optimizer is None and rank == 0)
    indices, offsets = torch.zeros(3 * (rank < 2), dtype=torch.int64), torch.arange(3 * (rank < 2) + 1)

    def step():
        layer(indices, offsets, batch=3).sum().backward()
        grads = [table.grad.to_dense().tolist() for table in layer.tables if table.grad is not None]
        layer.zero_grad()
        return grads

    step()
    before = [table.tolist() for table in layer.tables]
    (ring,) = find_output_rings(dist.group.WORLD.group_name)
    if rank == 1:
        ring.index_errors._words[:5] = torch.tensor([BAD_OFFSETS.value, 0, 2, 1, 9])
        with pytest.raises(ValueError, match=r"rank 1: the offsets of bag 2 .* go from 1 to 9"):
            step()
    else:
        with mock.patch.object(IndexErrors, "check"):
            assert step() == ([] if rank == 2 or optimizer else [[[0.0] * 4] * 2])
        with pytest.raises(ValueError, match="rank 1 had bad indices or offsets in an earlier call and raised"):
            ops.check_indices()
    assert [table.tolist() for table in layer.tables] == before
    grads = step()
    ops.check_indices()
    return grads, [table.tolist() for table in layer.tables] == before


@pytest.mark.parametrize("optimizer", [None, pytest.param("sgd", marks=pytest.mark.long)])
def test_no_rank_waits_for_one_that_raises_the_error_of_an_earlier_call(interpret, optimizer):
    first, second, third = interpret(3, look_up_after_a_bad_batch, optimizer)
    assert third == ([], True)
    assert first == second == (([], False) if optimizer else ([[[3.0] * 4, [0.0] * 4]], True))


def wait_for_nobody():
    """A rank that does not come to a call is named when the time has run out."""
    rank = dist.get_rank()
    indices, offsets, tables = torch.zeros(2, dtype=torch.int64), torch.arange(3), [torch.ones(2, 4)]
    ops.embedding_all_to_all(indices, offsets, tables)
    if rank == 1:
        time.sleep(2.5)
        return "late"
    for ring in find_output_rings(dist.group.WORLD.group_name):
        ring.channel.limit.seconds = 0.5
    with pytest.raises(PeerError, match="waited in vain for rank 1"):
        ops.embedding_all_to_all(indices, offsets, tables)
    with pytest.raises(PeerError, match=r"embedding_all_to_all, call 2: .* The channel is broken"):
        ops.embedding_all_to_all(indices, offsets, tables)
    return "named"


@pytest.mark.long
def test_a_missing_rank_is_named(interpret):
    assert interpret(2, wait_for_nobody) == ["named", "late"]


def ask_wrongly():
    indices, offsets, table = torch.zeros(3, dtype=torch.int64), torch.arange(5), torch.zeros(2, 8)
    for arguments, options, words in (
        ((indices, offsets, [table]), {"mode": "max"}, "mode is 'max', but must be one of sum, mean"),
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
        ((indices, offsets, [table]), {"batch": 6}, "offsets are for a global batch of 4, but batch is 6"),
        ((indices, offsets[:1], []), {}, "this rank has no tables, .*: pass batch="),
        ((indices, offsets, []), {"batch": 4}, "offsets for no tables have one element, not 5"),
        (
            (indices, offsets, [table]),
            {"weights": torch.ones(2)},
            r"one an index, must be \[3\] of .*, not \[2\]",
        ),
        (
            (indices, offsets, [table]),
            {"weights": torch.ones(6)[::2]},
            r"not \[3\] .* with strides \(2,\)",
        ),
        (
            (indices, offsets, [table]),
            {"weights": torch.ones(3).double()},
            "weights, .*, not .* of torch.float64",
        ),
        ((indices, offsets, [table]), {"weights": torch.ones(3).requires_grad_()}, "no gradient: detach"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.embedding_all_to_all(*arguments, **options)
    rank, grad = dist.get_rank(), torch.zeros(2, 16)
    settings = torch.zeros(2)
    for arguments, options, words in (
        ((grad[:1],), {"optimizer": "sgd", "settings": settings}, r"grad must be \[2, 16\] of torch.float32 on cpu"),
        (
            (grad,),
            {"optimizer": "adan", "settings": settings},
            "'adan', but must be one of sgd, adagrad, full-adagrad, adam",
        ),
        ((grad,), {"optimizer": "sgd", "settings": settings[:1]}, r"settings of sgd are \[2\] or \[1, 6\]"),
        (
            (grad,),
            {"optimizer": "sgd", "settings": torch.zeros(4)[::2]},
            r"contiguous, not .* with strides \(2,\)",
        ),
        (
            (grad,),
            {"optimizer": "sgd", "settings": settings.to("meta")},
            "settings must be .* on cpu, .* on meta",
        ),
        (
            (grad,),
            {"optimizer": "adagrad", "settings": settings, "states": [settings.to("meta")]},
            r"the state of table 0 must be \[2\] of torch.float32 on cpu, contiguous, not .* on meta",
        ),
        ((grad,), {"optimizer": "adagrad", "settings": settings}, "adagrad of 1 tables has 1 states, not 0"),
    ):
        update = ops.TableUpdate(**options)
        with pytest.raises(ValueError, match=words):
            ops.embedding_all_to_all_update(*arguments, indices, offsets, [table], update=update)
    with pytest.raises(ValueError, match="optimizer must be None or one of sgd, adagrad"):
        ops.EmbeddingAllToAll([(2, 4)], optimizer="adan")
    with pytest.raises(ValueError, match="seed is 1, but only a fused optimizer rounds, fp16 and bf16 tables"):
        ops.EmbeddingAllToAll([(2, 4)], optimizer="sgd", seed=1)
    for shape, options, words in (
        ((0, 4), {}, "table 0 has no rows"),
        ((2, 6), {}, "multiple of 4 up to 2048, and table 0 has 6: 8 will do"),
        ((2, 4), {"dtype": torch.float64}, "takes tables of .*, and table 0 is torch.float64"),
        ((2, 4), {"mode": "max"}, "mode is 'max', but must be one of sum, mean"),
        ((2, 4), {"optimizer": "sgd", "learning_rate": -0.1}, "learning_rate is -0.1, but must be at least 0"),
        ((2, 4), {"optimizer": "sgd", "learning_rate": float("nan")}, "learning_rate is nan"),
    ):
        with pytest.raises(ValueError, match=words):
            ops.EmbeddingAllToAll([shape], **options)
    with pytest.raises(ValueError, match="none can be sparse"):
        ops.EmbeddingAllToAll([(2, 4)], optimizer="sgd", sparse=True)
    for place, (own, words) in enumerate(
        (
            (([table], [table.half()]), "one tables' dtype: rank 0's is torch.float32, rank 1's torch.float16"),
            (([table], [table.clone().requires_grad_()]), "tables' requires_grad: rank 0's is False, rank 1's True"),
            (([table], [torch.zeros(2, 8), torch.zeros(2, 8)]), "one global batch: rank 0's is 4, rank 1's 2"),
            (([], []), "no rank of the group has a table"),
        )
    ):
        tables = own[rank]
        bounds = offsets if tables else offsets[:1]
        with pytest.raises(ValueError, match=words):
            ops.embedding_all_to_all(indices, bounds, tables, name=f"disagree {place}", batch=None if tables else 4)


def test_invalid_look_ups_raise_before_anything_runs(interpret):
    interpret(2, ask_wrongly)
