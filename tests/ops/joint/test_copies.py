# SPDX-License-Identifier: Apache-2.0
"""Joint schedules whose moves copy engines make, pushing or pulling, without atomic operations between ranks."""

import time

import pytest
import torch
import torch.distributed as dist
from tests.differences import largest
from tests.ops.operands import BLOCKS, random_operands, relative_error
from triton.runtime.interpreter import InterpreterBuilder

from stretto import ops
from stretto.ops import choices
from stretto.ops.joint import registry
from stretto.ops.operator import list_channels
from stretto.ops.tuning import tune
from stretto.tiles import host
from stretto.tuning import TuningStore, machine_key

CASES = {
    "all_gather_matmul": ("direct-all-gather", "ring-all-gather", "recursive-doubling-all-gather"),
    "matmul_reduce_scatter": ("direct-reduce-scatter", "ring-reduce-scatter", "recursive-halving-reduce-scatter"),
    "matmul_all_reduce": ("one-shot-all-reduce", "two-shot-all-reduce", "ring-all-reduce"),
}


def find_foreign_atomics(addresses):
    """The addresses that lie in another rank's memory, of any of the group's channels."""
    found = []
    for _, channel in list_channels(dist.group.WORLD.group_name):
        own = channel.signal_words(channel.rank).data_ptr()
        for peer, distance in enumerate(channel.distances):
            begin = own + distance
            if peer != channel.rank:
                found += [one for one in addresses if begin <= one < begin + channel.num_bytes]
    return found


def note_atomics(patch, addresses):
    """Have the interpreter note where atomic operations are done."""
    for name in ("create_atomic_rmw", "create_atomic_cas"):
        stock = getattr(InterpreterBuilder, name)

        def run(self, *arguments, stock=stock, place=name):
            addresses.update(arguments[place == "create_atomic_rmw"].data.ravel().tolist())
            return stock(self, *arguments)

        patch.setattr(InterpreterBuilder, name, run)


def multiply(operator, shape, implementation, schedule, dtype=torch.float32):
    """The error of a product, in units of its rounding."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    rows *= world if operator == "matmul_reduce_scatter" else 1
    inputs, weights, bias = random_operands(rows, n, k, dtype, True)
    if operator == "matmul_all_reduce":
        dist.broadcast(bias, 0)
    out = getattr(ops, operator)(
        inputs[rank], weights[rank], bias=bias, implementation=implementation, schedule=schedule
    )
    if operator == "all_gather_matmul":
        expected = torch.cat(inputs).double() @ weights[rank].double().T
    else:
        expected = sum(x.double() @ weight.double().T for x, weight in zip(inputs, weights, strict=True))
    if operator == "matmul_reduce_scatter":
        expected = expected.chunk(world)[rank]
    return relative_error(out, expected + bias.double()) / (1e-6 if dtype == torch.float32 else 2**-8)


def multiply_all():
    """The largest error of all cases, what ran where a kernel was asked for, and atomic operations at other ranks."""
    world, errors, addresses, ran = dist.get_world_size(), [], set(), []
    how = ops.KernelConfig(blocks=BLOCKS._replace(m=16), transfer="copies", movers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(choices.COPIES_VARIABLE, "1")
        note_atomics(patch, addresses)
        for operator, names in CASES.items():
            for name in names:
                for direction in ("push", "pull") if operator == "all_gather_matmul" else ("push",):
                    given = how._replace(direction=direction)
                    errors += [multiply(operator, (13, 24, 40), given, name) for _ in range(3)]
            errors.append(multiply(operator, (5, 24, 16), "kernel", None, torch.bfloat16))
            errors.append(multiply(operator, (24, 24, 16), ops.KernelConfig(transfer="programs"), names[0]))
            errors.append(multiply(operator, (24, 24, 16), "auto", None))
            ran.append(ops.counts()[operator, "library"])
        with pytest.raises(ValueError, match="no atomic operations"):
            ops.all_gather_matmul(torch.ones(4, 16), torch.ones(8, 16), implementation=how)
    return largest(errors) / (world + 1), ran, len(addresses) > 0, find_foreign_atomics(addresses)


def gather_late_rows():
    """Whether rows are returned whole, and multiplied by their factors, where one rank's pieces come long after each
    other."""
    rank, find = dist.get_rank(), host._find_copy
    inputs, weights, _ = random_operands(64, 24, 32, torch.float32, False)

    def find_slow(device):
        copy, stream = find(device)
        return lambda *ends: (time.sleep(0.02 * rank), copy(*ends)), stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_find_copy", find_slow)
        patch.setattr("stretto.ops.operator.MIN_WORKSPACE_BYTES", 1)  # rows of fp8 alone would fill a slot
        how = ops.KernelConfig(blocks=BLOCKS._replace(m=16), transfer="copies", piece_bytes=512)
        _, gathered = ops.all_gather_matmul_gathered(inputs[rank], weights[rank], implementation=how)
        rows, (weight, of_weight) = [ops.quantize_rows(x) for x in inputs], ops.quantize_rows(weights[rank])
        x, of_x = rows[rank]
        for _ in range(2):
            product = ops.all_gather_scaled_matmul(
                x, weight, of_x, of_weight, out_dtype=torch.float32, implementation=how._replace(piece_bytes=128)
            )
    expected = torch.cat([x.double() * of_x[:, None] for x, of_x in rows]) @ (weight.double() * of_weight[:, None]).T
    return torch.equal(gathered, torch.cat(inputs)), relative_error(product, expected) < 1e-5


def test_rows_are_returned_once_all_of_their_pieces_have_come_and_their_factors_come_before_them(interpret):
    assert interpret(2, gather_late_rows) == [(True, True)] * 2


def change_dtypes():
    """The largest error of products of the same sizes in dtypes whose rows are cut into other pieces, in turn."""
    how = ops.KernelConfig(blocks=BLOCKS._replace(m=16), transfer="copies", piece_bytes=2048)
    sizes = {
        "all_gather_matmul": (64, 24, 32),
        "matmul_reduce_scatter": (64, 32, 24),
        "matmul_all_reduce": (128, 32, 24),
    }
    dtypes = torch.bfloat16, torch.float32, torch.bfloat16
    return largest(multiply(each, shape, how, None, dtype) for each, shape in sizes.items() for dtype in dtypes)


def test_calls_of_the_same_sizes_and_other_dtypes_have_pieces_of_their_own(interpret):
    assert largest(interpret(2, change_dtypes)) <= 3


def tune_by_copies(folder):
    """The schedules and directions that a tuner measures, and what "auto" takes then, in another process's place."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(choices.COPIES_VARIABLE, "1")
        patch.setenv("STRETTO_CACHE", folder)
        for operator in CASES:
            times = tune(operator, 32, 32, 16, device="cpu", dtype=torch.float32)
            measured = sorted({(one.schedule.partition(" ")[0], one.direction) for one in times if one.schedule})
            (fastest, *_) = [one for one in times if one.schedule]
            if dist.get_rank() == 0:
                choices.autotuner(torch.device("cpu"), TuningStore()).keep(
                    next(key for key in TuningStore().read(machine_key(torch.device("cpu"))) if operator in key)
                    .removeprefix("ops ").partition(" by ")[0],
                    {one: 1e-9 if one == fastest else 1.0 for one in times},
                )  # fmt: skip
            dist.barrier()
            registry._schedules.clear()
            registry._names.clear()
            choices.clear_choices()
            before = ops.counts().get((operator, "kernel"), 0)
            error = multiply(operator, (32 if operator == "matmul_all_reduce" else 16, 32, 16), "auto", None)
            found.append((measured, ops.counts()[operator, "kernel"] - before, error <= 3))
    return found


def test_a_tuner_measures_schedules_by_copies_and_auto_takes_the_fastest(interpret, tmp_path):
    for found in interpret(2, tune_by_copies, str(tmp_path)):
        assert found[0] == (
            [(name, direction) for name in CASES["all_gather_matmul"][:2] for direction in ("pull", "push")], 1, True
        )  # fmt: skip
        for operator, (measured, ran, is_right) in zip(CASES, found, strict=True):
            assert all(name in CASES[operator] for name, _ in measured)
            assert (ran, is_right) == (1, True)


@pytest.mark.long
@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (2, 4))])
def test_products_by_copies_are_right_and_no_atomic_operation_leaves_a_rank(interpret, count):
    for error, ran, has_atomics, foreign in interpret(count, multiply_all):
        assert error <= 1
        assert ran == [1, 1, 1]  # of "auto", where nothing was measured
        assert has_atomics
        assert foreign == []
