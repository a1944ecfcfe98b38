"""The kernels' own source on a CPU: lane programs and the interpreter, every protocol, any size and place."""

import random

import pytest
import torch

from stretto.collectives.algorithms import ALGORITHMS
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.kernel import LaneKernel
from stretto.collectives.executor.cuda.source import Variant
from tests.collectives.executor.cuda.emulated import COMPILER, make_workspaces, run_all

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")
PROTOCOLS = ("LL", "LL128", "Simple")
SEED = random.randrange(2**31)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


def expected(collective, inputs, rank, block_chunks, reduction):
    """The output's blocks, None where they may be anything."""
    blocks = [one.view(max(collective.input_chunks // block_chunks, 1), -1) for one in inputs]
    found = []
    for block in range(collective.output_chunks // block_chunks):
        terms = collective.expected(rank, block * block_chunks)
        if terms is None:
            found.append(None)
            continue
        parts = torch.stack([blocks[giver][index // block_chunks] for giver, index in terms]).double()
        combined = {"sum": parts.sum(0), "max": parts.amax(0), "avg": parts.sum(0) / len(terms)}
        found.append(parts[0] if len(terms) == 1 else combined[reduction])
    return found


def check(kernels, dtype, reduction, in_place, elements, offset, rng):
    collective, chunks = kernels[0].collective, kernels[0].block_chunks
    ranks = range(collective.ranks)
    elements *= chunks if kernels[0].needs_even else 1
    in_blocks, out_blocks = collective.input_chunks // chunks, collective.output_chunks // chunks
    inputs = [torch.tensor([rng.randrange(64) for _ in range(in_blocks * elements)], dtype=dtype) for _ in ranks]
    length = (max(in_blocks, out_blocks) if in_place else out_blocks) * elements
    memories = [torch.full((offset + length + 9,), 77, dtype=dtype) for _ in ranks]
    targets = [memory[offset : offset + length] for memory in memories]
    given = [one.clone() for one in inputs]
    if in_place:
        starts = [[start // chunks * elements for start in collective.starts(rank)] for rank in ranks]
        for target, one, (start, _) in zip(targets, inputs, starts, strict=True):
            target[start : start + len(one)] = one
        run_all(kernels, [(target,) for target in targets])
        results = [t[start : start + out_blocks * elements] for t, (_, start) in zip(targets, starts, strict=True)]
    else:
        run_all(kernels, list(zip(given, targets, strict=True)))
        results = targets
        for one, kept in zip(inputs, given, strict=True):
            assert torch.equal(one, kept), "the input was changed"
    for rank, (memory, result) in enumerate(zip(memories, results, strict=True)):
        assert (memory[:offset] == 77).all()
        assert (memory[offset + length :] == 77).all()
        right = expected(collective, inputs, rank, chunks, reduction)
        for block, (found, wanted) in enumerate(zip(result.view(out_blocks, -1), right, strict=True)):
            assert wanted is None or torch.equal(found.double(), wanted.to(dtype).double()), (rank, block, SEED)


def make(kind, name, size, workspaces, variant, in_place, instances=1):
    options = size if name == "all-to-next" else {**size, "in_place": in_place}
    schedule = ALGORITHMS[name].compile(instances=instances, **options)
    tiles = {"tile_bytes": 480} if kind is InterpretedSchedule else {}
    return [kind(schedule, workspace, variant, in_place=in_place, **tiles) for workspace in workspaces]


CASES = [
    ("one-shot-all-reduce", {"ranks": 3}, "bfloat16", "avg"),
    ("two-shot-all-reduce", {"ranks": 2}, "int32", "sum"),
    ("ring-all-reduce", {"ranks": 3}, "float32", "max"),
    ("hierarchical-all-reduce", {"nodes": 2, "gpus": 2}, "int64", "sum"),
    ("recursive-halving-reduce-scatter", {"ranks": 4}, "float16", "sum"),
    ("two-step-all-to-all", {"nodes": 2, "gpus": 2}, "uint8", "sum"),
    ("binomial-broadcast", {"ranks": 4}, "int16", "sum"),
    ("hierarchical-all-gather", {"nodes": 2, "gpus": 2}, "float64", "sum"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_the_interpreter_gives_the_right_numbers(case, protocol, folder):
    name, size, dtype, reduction = case
    rng = random.Random(SEED)
    workspaces, _ = make_workspaces(size.get("ranks") or 4, folder)
    in_place = rng.random() < 0.5
    kernels = make(InterpretedSchedule, name, size, workspaces, Variant(dtype, reduction, protocol), in_place)
    for elements in (1, 7, 1000):
        check(kernels, getattr(torch, dtype), reduction, in_place, elements, rng.choice([0, 1, 3]), rng)
