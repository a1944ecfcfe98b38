# SPDX-License-Identifier: Apache-2.0
"""Look-ups whose vectors move by a schedule, interpreted: the bits of the kernels' own exchange, on 1 to 4 ranks."""

import math
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.random_algorithms import random_all_to_all
from tests.ops.embedding.jagged import Kind, fill_case, look_up_case, make_case, own_rows

from stretto.collectives.algorithms import find
from stretto.ops.embedding import forward, output_ring, scheduled
from stretto.ops.joint.routed import MadeRows
from stretto.tiles.launches import Launches

SEED = random.randrange(10**6)


def make_schedule(which, seed):
    """A schedule of this session's ranks: an algorithm's name, a two-step one of two nodes, or a random one."""
    world = dist.get_world_size()
    match which:
        case "two-step":
            return find("two-step-all-to-all").compile(nodes=2, gpus=world // 2)
        case "random":
            return random_all_to_all(random.Random(seed), world, 2)
    return which


def signal_all_at_once(seed):
    """Whether vectors are right of which all for a rank have one signal, since parts would take more than there are."""
    found, make = [], scheduled.make_tables
    case, schedule = make_case(seed, 2), find("direct-all-to-all").compile(ranks=2, instances=3)

    def look(*arguments, **options):
        found.append(make(*arguments, **options))
        return found[-1]

    with mock.patch.multiple(scheduled, CHANNELS=4, make_tables=look), mock.patch.object(output_ring, "CHANNELS", 4):
        out = look_up_case(case, schedule=schedule)
    return found[0].made.channels.count, torch.equal(out, look_up_case(case))


def test_few_signals_suffice_for_vectors_that_are_being_pooled(interpret):
    print(f"seed {SEED}")
    assert interpret(2, signal_all_at_once, SEED) == [(1, True)] * 2


def compare_with_direct(first, which):
    """Seeds of look-ups by schedules that have other bits than without, or other gradients."""
    rank, wrong = dist.get_rank(), []
    for seed, name in enumerate(which, first):
        case, schedule = make_case(seed, dist.get_world_size()), make_schedule(name, seed)
        found = []
        for options in ({"schedule": schedule}, {"schedule": schedule}, {}):
            tables = [table.clone().requires_grad_() for table in case.owners[rank].tables]
            with mock.patch.object(forward, "pool_and_send", forward.pool_and_send if not options else None):
                out = look_up_case(case, tables, **options)
            grad = own_rows(case, case.grad).to(out.dtype)
            out.backward(grad)
            found.append([out.detach(), *(table.grad for table in tables)])
        with torch.no_grad():
            found.append([look_up_case(case, schedule=schedule), *found[0][1:]])
        if not all(torch.equal(one, right) for each in found for one, right in zip(each, found[2], strict=True)):
            wrong.append((seed, name))
    return wrong


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "which"),
    [
        (4, ["two-step"]),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (1, ["direct-all-to-all"]),
                (2, ["direct-all-to-all", "random"]),
                (3, ["random"]),
                (4, ["random"]),
            )
        ),
    ],
)
def test_vectors_that_move_by_a_schedule_have_the_bits_of_the_direct_exchange(interpret, ranks, which):
    print("seed", SEED)
    assert interpret(ranks, compare_with_direct, SEED, which) == [[]] * ranks


def refuse():
    """What wrong calls raise, on rank 1 with a bad index; and whether another call is right after that."""
    kind = Kind([[(5, 8)], [(7, 8)]], 4, torch.float32, torch.int64, "sum", False, 3)
    case, found = fill_case(kind, 1), []
    own = case.owners[dist.get_rank()]
    for schedule in ("ring-all-gather", "two-step-all-to-all", find("all-to-next").compile(nodes=1, gpus=2)):
        with pytest.raises(ValueError) as refusal:
            look_up_case(case, schedule=schedule)
        found.append(str(refusal.value))
    right, indices = look_up_case(case, schedule="direct-all-to-all"), own.indices
    if dist.get_rank() == 1:
        own.indices = indices.clone()
        own.indices[0] = 1000
        with pytest.raises(ValueError, match="is 1000, but table 0"):
            look_up_case(case, schedule="direct-all-to-all")
        own.indices = indices
    else:
        look_up_case(case, schedule="direct-all-to-all")
    return found, torch.equal(look_up_case(case, schedule="direct-all-to-all"), right)


def test_wrong_schedules_and_bad_indices_are_named(interpret):
    for messages, is_right in interpret(2, refuse):
        assert is_right
        for message, words in zip(
            messages, ("is one of 'allgather'", "it takes nodes, gpus", "one of 'alltonext'"), strict=True
        ):
            assert words in message
        assert "would do: direct-all-to-all, two-step-all-to-all" in messages[0]


def list_launches():
    """The kernels of a look-up in their order, if the pooling is not loaded yet, and if it is."""
    case, found = make_case(3, 1), []
    for is_loaded in (False, True):
        with (
            mock.patch.object(Launches, "knows", return_value=is_loaded),
            mock.patch.object(Launches, "__call__") as launch,
        ):
            look_up_case(case, schedule="direct-all-to-all")
        found.append([call.args[0].__name__ for call in launch.call_args_list])
    return found


def test_no_kernel_is_loaded_while_another_one_waits_for_it(interpret):
    """CUDA may have the loading of a kernel wait for all that run: the one would wait for the other for good."""
    first, *messages = "begin_pooling", "pool_alone", "move_rows"
    assert interpret(1, list_launches) == [[[first, *messages], [first, *reversed(messages)]]]


def test_a_channel_is_signalled_by_every_table_that_its_parts_have_numbers_of():
    """Else a part would be sent before it is pooled; and no channel waits for a table that its parts do not need."""
    print(f"seed {SEED}")
    chosen = random.Random(SEED)
    for _ in range(50):
        columns, rows = chosen.choice((1, 2, 8)), chosen.choice((1, 4))
        spans = [columns * chosen.randint(1, 40) for _ in range(chosen.randint(1, 6))]
        made = MadeRows(tuple(spans), 1, columns, rows)
        each, channels = chosen.randint(1, 3), chosen.randint(1, 8)
        # As the kernel cuts a pair's rows (`_find_size`).
        part_rows = math.ceil(math.ceil(sum(spans) // columns / (each * channels)) / rows) * rows
        owners = [table for table, span in enumerate(spans) for _ in range(span)]
        needed = [
            set(owners[channel * each * part_rows * columns : (channel + 1) * each * part_rows * columns])
            for channel in range(channels)
        ]
        signalled = [set() for _ in range(channels)]
        for table, (first, last) in enumerate(made.find_channels(each * channels, each)):
            for channel in range(first, last):
                signalled[channel].add(table)
        assert signalled == needed, made


def compile_look_up():
    """Whether a compiled look-up by a schedule, in one graph, has the bits and the gradients of an eager one."""
    case, found = make_case(5, 2, dtypes=[torch.float32]), []

    def run(*tables):
        return look_up_case(case, list(tables), schedule="direct-all-to-all")

    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        tables = [table.clone().requires_grad_() for table in case.owners[dist.get_rank()].tables]
        out = call(*tables)
        out.backward(own_rows(case, case.grad))
        found.append([out.detach(), *(table.grad for table in tables)])
    return [torch.equal(*pair) for pair in zip(*found, strict=True)]


@pytest.mark.long
def test_compiled_look_ups_have_one_graph(interpret):
    for same in interpret(2, compile_look_up):
        assert all(same)
