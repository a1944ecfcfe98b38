# SPDX-License-Identifier: Apache-2.0
"""GEMMs whose exchange is a schedule, between real processes with interpreted kernels, against fp64."""

import random
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.collectives.joint.named_algorithms import make_schedule
from tests.collectives.joint.random_algorithms import random_schedule
from tests.differences import largest
from tests.ops.operands import BLOCKS, lie, random_operands, relative_error

from stretto import ops
from stretto.collectives import read_schedule, write_schedule
from stretto.collectives.algorithms import find
from stretto.ops import operator as operator_module
from stretto.ops.config import decode
from stretto.ops.joint import launch
from stretto.ops.joint.registry import encode_schedule, name_schedule

OPERATORS = {
    "all_gather_matmul": ("direct-all-gather", "ring-all-gather", "recursive-doubling-all-gather"),
    "matmul_reduce_scatter": ("direct-reduce-scatter", "ring-reduce-scatter", "recursive-halving-reduce-scatter"),
    "matmul_all_reduce": ("one-shot-all-reduce", "two-shot-all-reduce", "ring-all-reduce"),
}
CASES = [
    (2, (64, 64, 64), torch.bfloat16, False, True),
    (4, (37, 41, 33), torch.float32, True, False),
    (3, (5, 72, 40), torch.bfloat16, False, True),
]
"""(ranks, (rows, n, k), dtype, whether the weight is a transpose, whether there is a bias)."""
SEED = random.randrange(2**31)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def multiply(operator, schedule, shape, dtype, by_columns, has_bias):
    """(error, whether another call has the same bits, and whether all ranks have them; what ran by a kernel)."""
    rank, world, (rows, n, k) = dist.get_rank(), dist.get_world_size(), shape
    if callable(schedule):
        schedule = schedule()
    rows *= world if operator == "matmul_reduce_scatter" else 1
    inputs, weights, bias = random_operands(rows, n, k, dtype, has_bias)
    if operator == "matmul_all_reduce" and has_bias:  # of which all ranks have the same
        dist.broadcast(bias, 0)
    transfer = "copies" if dtype == torch.float32 else "programs"  # of gathered rows
    blocks, shifts = BLOCKS._replace(m=16), rows % 2 == 0
    how = ops.KernelConfig(blocks=blocks, transfer=transfer, movers=1 + world % 2, piece_bytes=1024, is_shifted=shifts)
    run, before = getattr(ops, operator), ops.counts().get((operator, "kernel"), 0)
    weight = lie(weights[rank], by_columns)
    out, again = (run(inputs[rank], weight, bias=bias, implementation=how, schedule=schedule) for _ in range(2))
    if operator == "all_gather_matmul":
        expected = torch.cat(inputs).double() @ weight.double().T
    else:
        expected = sum(x.double() @ weight.double().T for x, weight in zip(inputs, weights, strict=True))
    if operator == "matmul_reduce_scatter":
        expected = expected.chunk(world)[rank]
    if has_bias:
        expected = expected + bias.double()
    ran = ops.counts()[operator, "kernel"] - before
    return relative_error(out, expected), torch.equal(out, again), out.double().sum().item(), ran


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("operator", "schedule"), [(one, name) for one, names in OPERATORS.items() for name in names])
@pytest.mark.parametrize("case", CASES)
def test_products_with_a_schedule_are_right(interpret, operator, schedule, case):
    ranks, shape, dtype, *rest = case
    results = interpret(ranks, multiply, operator, schedule, shape, dtype, *rest)
    for error, is_same, total, ran in results:
        assert error <= (1 if operator == "all_gather_matmul" else ranks + 1) * ROUNDING[dtype]
        assert is_same
        assert ran == 2
        if operator == "matmul_all_reduce":
            assert total == results[0][2]


def add_in_order(m):
    """The ways whose sums are not partial sums, rounded and then added in fp32 in rank order, and a bias."""
    rank = dist.get_rank()
    inputs, weights, _ = random_operands(m, 40, 32, torch.float32, False)
    inputs = [(one * factor).round().bfloat16() for one, factor in zip(inputs, (2**25, 3, -(2**25), 3), strict=False)]
    weights = [one.round().bfloat16() for one in weights]  # of rank 0, which the first numbers nearly cancel
    partial = [(x.double() @ weights[peer % 2].double().T).bfloat16() for peer, x in enumerate(inputs)]
    expected = torch.zeros(m, 40)
    for one in partial:
        expected += one.float()
    wrong, bias = [], 9 * random_operands(1, 1, 40, torch.bfloat16, False)[0][0][0]
    for transfer, added in (("copies", bias), ("copies", None), ("programs", None)):
        how = ops.KernelConfig(blocks=BLOCKS._replace(m=16), transfer=transfer, movers=2, piece_bytes=512)
        out = torch.empty(m, 40, dtype=torch.bfloat16)
        ops.matmul_all_reduce(inputs[rank], weights[rank % 2], bias=added, implementation=how, out=out)
        if not torch.equal(out, (expected if added is None else expected + bias.float()).bfloat16()):
            wrong.append((transfer, added is not None))
    return wrong


@pytest.mark.parametrize(("ranks", "m"), [(2, 70), (3, 96), pytest.param(4, 37, marks=pytest.mark.exhaustive)])
def test_an_all_reduce_of_many_rows_adds_rounded_sums_in_the_order_of_ranks(interpret, ranks, m):
    """A sum of two large numbers that cancel shows the order."""
    assert interpret(ranks, add_in_order, m) == [[]] * ranks


def test_tiles_that_are_not_shifted_are_in_the_order_of_rows():
    ring = name_schedule("matmul_reduce_scatter", "ring-reduce-scatter", "kernel", 3)
    joint = launch.find_joint("matmul_reduce_scatter", ring, 3, 48, 16, is_shifted=False)
    assert [[tile.start for tile in plan.tiles] for plan in joint.ranks] == [[0, 16, 32]] * 3


def run_random(seed, operator, count):
    """The largest error of products with random schedules, on rows of all lengths, and whether their bits are kept."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        schedule = random_schedule(rng, operator, dist.get_world_size(), rng.choice([1, 2, 3]))
        shape = rng.randint(1, 40), rng.choice([16, 24]), rng.choice([16, 40])
        found.append(multiply(operator, schedule, shape, torch.float32, False, True)[:2])
    return largest(error for error, _ in found), all(is_same for _, is_same in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("operator", list(OPERATORS))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_products_with_random_schedules_are_right(interpret, operator, ranks):
    print(f"seed {SEED}")
    for error, is_same in interpret(ranks, run_random, SEED, operator, 3):
        assert error <= 1e-5
        assert is_same


@pytest.mark.exhaustive
@pytest.mark.parametrize("operator", list(OPERATORS))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_500_products_with_random_schedules_are_right(interpret, operator, ranks):
    print(f"seed {SEED}")
    for error, is_same in interpret(ranks, run_random, SEED, operator, 56, timeout=3600.0):
        assert error <= 1e-5
        assert is_same


def run_named():
    """The algorithms whose products are wrong, or ran in no kernel, or not twice alike."""
    found = []
    for operator in OPERATORS:
        for name in ("double ring", "tree", "a user's", "an XML"):
            schedule = make_schedule(name, operator, dist.get_world_size())
            error, is_same, _, ran = multiply(operator, schedule, (7, 24, 16), torch.float32, False, True)
            if not error <= 1e-5 or not is_same or ran != 2:
                found.append((operator, name, error, is_same, ran))
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_products_with_named_algorithms_are_right(interpret, ranks):
    assert interpret(ranks, run_named) == [[]] * ranks


def make_two_level():
    return find("hierarchical-all-reduce").compile(nodes=2, gpus=2)


def read_from_file():
    """A schedule as another library's file has it."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        write_schedule(find("hierarchical-reduce-scatter").compile(nodes=2, gpus=2), Path(file.name))
        return read_schedule(Path(file.name))


@pytest.mark.parametrize(
    ("operator", "schedule"), [("matmul_all_reduce", make_two_level), ("matmul_reduce_scatter", read_from_file)]
)
def test_schedules_of_two_levels_and_of_files_run(interpret, operator, schedule):
    for error, is_same, _, ran in interpret(4, multiply, operator, schedule, (24, 24, 16), torch.float32, False, True):
        assert error <= 1e-5
        assert is_same
        assert ran == 2


def refuse():
    """What each wrong schedule is refused with."""
    x, weight = torch.ones(4, 16), torch.ones(8, 16)
    ring = find("ring-all-gather").compile(ranks=2)
    found = []
    for operator, schedule, options in (
        ("all_gather_matmul", "ring-reduce-scatter", {}),
        ("all_gather_matmul", find("ring-all-gather").compile(ranks=3), {}),
        ("all_gather_matmul", "hierarchical-all-gather", {}),
        ("all_gather_matmul", "ring-all-gathr", {}),
        ("all_gather_matmul", ring, {"implementation": "library"}),
        ("matmul_all_reduce", 3, {}),
        ("matmul_all_reduce", find("ring-all-reduce"), {}),
    ):
        with pytest.raises(ValueError) as refusal:
            getattr(ops, operator)(x, weight, schedule=schedule, **options)
        found.append(str(refusal.value))
    return found


def test_schedules_that_an_operator_cannot_have_are_refused(interpret):
    for found in interpret(2, refuse):
        for message, words in zip(
            found,
            (
                "takes a schedule of an allgather",
                "a schedule of 3 ranks, and the group has 2",
                "it takes nodes, gpus",
                "ring-all-gather",
                "leave out",
                "algorithm's name or a Schedule",
                ": its .compile(ranks=2, ...)",
            ),
            strict=True,
        ):
            assert words in message


def refuse_configurations():
    """What calls are refused with whose configuration has a schedule of another group or operator, or no use for it."""
    x, weight, scales = torch.ones(4, 16), torch.ones(8, 16), (torch.ones(4), torch.ones(8))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True).group_name
    how, fp8 = decode(encode_schedule("all_gather_matmul", "ring-all-gather", "kernel", alone)), torch.float8_e4m3fn
    found = []

    def note(run, *operands, **options):
        with pytest.raises(ValueError) as refusal:
            run(*operands, **options)
        found.append(str(refusal.value))

    note(ops.all_gather_matmul, x, weight, implementation=how)
    note(ops.matmul_all_reduce, x, weight, implementation=how._replace(schedule="nonsense"))
    note(ops.all_gather_scaled_matmul, x.to(fp8), weight.to(fp8), *scales, implementation=how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_MOST_MOVED", 12)
        note(ops.matmul_all_reduce, x, weight, schedule="ring-all-reduce")
    ops.matmul_all_reduce(x, weight, schedule="ring-all-reduce")
    return found


def test_configurations_with_a_schedule_of_no_use_are_refused(interpret):
    for found in interpret(2, refuse_configurations):
        for message, words in zip(
            found,
            ("a schedule of 1 ranks", "no schedule 'nonsense'", "fp8 takes no schedule", "2 times as many instances"),
            strict=True,
        ):
            assert words in message


def multiply_again():
    """How many tables calls of one kind keep, whose joint schedule was forgotten, as that of many sizes is."""
    x, weight, counts = torch.ones(4, 16), torch.ones(8, 16), []
    for _ in range(2):
        launch.find_joint.cache_clear()
        launch.join.cache_clear()
        ops.all_gather_matmul(x, weight, schedule="ring-all-gather")
        counts.append(len(operator_module._find_cache(dist.group.WORLD.group_name).kept))
    return counts


def test_calls_of_one_kind_keep_one_set_of_tables(interpret):
    for first, second in interpret(2, multiply_again):
        assert first == second


def alternate():
    """Sums by the operator's own copies and by a schedule, and experts over x, in turn, in one group."""
    x, weight, own = torch.ones(8, 16), torch.ones(8, 16), ops.KernelConfig(blocks=BLOCKS, piece_bytes=512)
    ids, experts, found = torch.zeros(8, 1, dtype=torch.int64), torch.ones(2, 16, 16).bfloat16(), []
    for options in [{"implementation": own}, {"schedule": "ring-reduce-scatter"}] * 2:
        found.append(ops.matmul_reduce_scatter(x, weight, **options).sum().item())
        ops.moe.all_gather_moe(x.bfloat16(), experts, ids, dist.group.WORLD, implementation="kernel")
    return found


def test_calls_that_share_a_group_alternate(interpret):
    assert interpret(2, alternate, timeout=20.0) == [[1024.0] * 4] * 2


def differentiate():
    """Gradients of a product with a schedule, compiled with another, and without any: whether they are the same."""
    found, ring = [], find("ring-all-gather").compile(ranks=2)
    for schedule, is_compiled in (("ring-all-gather", False), (ring, True), (None, False)):
        generator = torch.Generator().manual_seed(dist.get_rank())
        x, weight = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((6, 16), (8, 16)))

        def run(x, weight):
            return ops.all_gather_matmul(x, weight, schedule=schedule).square().sum()  # noqa: B023

        (torch.compile(run, backend="aot_eager", fullgraph=True) if is_compiled else run)(x, weight).backward()
        found.append(torch.cat([x.grad.flatten(), weight.grad.flatten()]))
    return [torch.allclose(one, found[-1], atol=1e-4) for one in found]


@pytest.mark.long
def test_gradients_are_those_without_a_schedule_and_compiled_calls_have_one_graph(interpret):
    assert interpret(2, differentiate) == [[True, True, True]] * 2


def exchange_products():
    """Errors of `matmul_all_to_all` and its gradients by schedules and the library, and whether two calls are equal."""
    rank, world, errors = dist.get_rank(), dist.get_world_size(), []
    two_step = find("two-step-all-to-all").compile(nodes=2, gpus=world // 2) if world % 2 == 0 else None
    cases = [
        ("kernel", None, torch.float32, (4, 7, 8)),
        ("kernel", two_step, torch.bfloat16, (24, 48, 64)),
        ("library", None, torch.float32, (4, 7, 8)),
        ("auto", "direct-all-to-all", torch.float32, (0, 7, 8)),
    ]
    for number, (how, schedule, dtype, (rows, n, k)) in enumerate(cases):
        inputs, weights, bias = random_operands(rows * world, n, k, dtype, number % 2 == 0)
        x, weight = inputs[rank].requires_grad_(), weights[rank].requires_grad_()
        bias = None if bias is None else bias.requires_grad_()
        out, again = (
            ops.matmul_all_to_all(x, weight, bias=bias, implementation=how, schedule=schedule) for _ in range(2)
        )
        biases = [None] * world
        dist.all_gather_object(biases, None if bias is None else bias.detach())
        exact = [a.detach().double() @ b.detach().double().T for a, b in zip(inputs, weights, strict=True)]
        exact = [one if own is None else one + own.double() for one, own in zip(exact, biases, strict=True)]
        expected = torch.cat([one.chunk(world)[rank] if rows else one for one in exact])
        towards = [torch.randn(rows * world, n, generator=torch.Generator().manual_seed(peer)) for peer in range(world)]
        out.backward(towards[rank].to(dtype))
        of_product = torch.cat([one.chunk(world)[rank] if rows else one for one in towards]).to(dtype).double()
        found = [(out, expected), (x.grad, of_product @ weight.detach().double()),
                 (weight.grad, of_product.T @ x.detach().double())]  # fmt: skip
        found += [] if bias is None else [(bias.grad, of_product.sum(0))]
        errors += [
            relative_error(one.detach(), right) / ROUNDING[dtype] if one.numel() else 0.0 for one, right in found
        ]
        assert torch.equal(out, again)
    for words, options in (
        ("ranks do not divide x's first dim, 5", {}),
        ("takes a schedule of an alltoall", {"schedule": "ring-all-gather"}),
    ):
        with pytest.raises(ValueError, match=words):
            ops.matmul_all_to_all(torch.zeros(5, 4), torch.zeros(3, 4), **options)
    return errors, ops.counts()["matmul_all_to_all", "kernel"]


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_a_product_whose_rows_are_exchanged_is_that_of_a_gemm_and_an_all_to_all(interpret, ranks):
    for errors, by_kernel in interpret(ranks, exchange_products):
        assert largest(errors) < 20
        assert by_kernel >= 4
