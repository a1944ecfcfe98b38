# SPDX-License-Identifier: Apache-2.0
"""Programs of a rank that try the interpreter itself: kernels that need what stretto.tiles.interpreter mends."""

import threading

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from stretto.tiles import call_state, waits


@triton.jit
def compare_counters(seen, target, is_before, of_peer, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    counter, aim = tl.load(seen + at), tl.load(target + at)
    tl.store(is_before + at, waits._is_before(counter, aim, waits.OF_CONSUMER))
    tl.store(of_peer + at, waits._is_before(counter, aim, waits.OF_PEER))


@triton.jit
def add_counts(words, counts, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    call_state._add_to(words + at, tl.load(counts + at), at < SIZE - 1)


def let_counters_wrap_around():
    """Counters are compared and added modulo 2^32; only a peer's slot may not be far ahead."""
    last, first = 2**31 - 1, -(2**31)
    cases = [  # what is seen, the target, whether a counter is still below it, whether a peer's slot is
        (5, 6, True, True), (6, 6, False, False), (7, 6, False, False),
        (last, first, True, True), (first, first, False, False),
        (first, last, False, False), (first + 2, last, False, False), (last - 3, first + 4, True, True),
        (-1, 0, True, True), (0, -1, False, False),
        (2**30, 0, False, True), (first + 2**30, last, False, True), (-(2**30), 0, True, True),
        (first + 8, last - 8, False, False), (last, last, False, False), (0, 0, False, False),
    ]  # fmt: skip
    seen, target, *expected = (torch.tensor(column) for column in zip(*cases, strict=True))
    found = [torch.zeros(16, dtype=torch.bool) for _ in range(2)]
    compare_counters[(1,)](seen.int(), target.int(), *found, 16)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    words = torch.tensor([last, last - 1, first, 5], dtype=torch.int32)
    add_counts[(1,)](words, torch.tensor([1, 5, -1, 9], dtype=torch.int32), 4)
    assert words.tolist() == [first, first + 3, last, 5]  # the last is masked


@triton.jit
def wait_for_the_next(words, order, PROGRAMS: tl.constexpr):
    """Program p goes after program p + 1; order[p]: its place among all."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if program < PROGRAMS - 1:
        while tl.atomic_add(words + program + 1, 0, sem="acquire", scope="sys") == 0:
            pass
    tl.store(order + program, tl.atomic_add(words + PROGRAMS, 1))
    tl.atomic_xchg(words + program, 1, sem="release", scope="sys")


@triton.jit
def take_in_turn(word, count, PROGRAMS: tl.constexpr):
    """A lock that is taken by compare-and-swap, in the order of a counter that only its holder moves."""
    program = tl.program_id(0)
    for turn in range(3):
        while tl.atomic_cas(word, PROGRAMS * turn + (PROGRAMS - 1 - program), -1) != PROGRAMS * turn + (
            PROGRAMS - 1 - program
        ):
            pass
        tl.store(count, tl.load(count) + 1)
        tl.atomic_xchg(word, PROGRAMS * turn + (PROGRAMS - program))


@triton.jit
def wait_by_loads(words, SIZE: tl.constexpr):
    """Program 0 waits, by volatile loads of all of them, for what the others set."""
    at = tl.arange(0, SIZE)
    if tl.program_id(0) == 0:
        while tl.sum(tl.load(words + at, volatile=True)) < SIZE:
            pass
        while tl.load(words, volatile=True) == 0:
            pass
    else:
        tl.store(words + tl.program_id(0) - 1, 1)


@triton.jit
def compute(a, b, products, sums, parts, SIZE: tl.constexpr):
    """bf16 through a product, element by element, and reductions; all of it exact or rounded once an operation."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(products + at, tl.dot(x, y))
    tl.store(sums + at, x * y + x - (-y))
    row = tl.arange(0, SIZE)
    tl.store(parts + row, tl.sum(x, axis=1))
    tl.store(parts + SIZE + row, tl.max(tl.where(x < y, x, y), axis=1))
    tl.store(parts + 2 * SIZE + row, tl.abs(tl.load(a + row)) + 1.5)


@triton.jit
def multiply(a, b, product, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    rows, columns, depth = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], tl.arange(0, DEPTH)
    x, y = tl.load(a + rows * DEPTH + depth[None, :]), tl.load(b + depth[:, None] * COLUMNS + columns)
    tl.store(product + rows * COLUMNS + columns, tl.dot(x, y))


def give_a_row_of_a_product_the_same_bits_anywhere():
    """As on GPUs: a row's product does not depend on where in the block it lies."""
    a, b = (torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in ((32, 32), (32, 64)))
    product, moved = torch.empty(32, 64), torch.empty(32, 64)
    multiply[(1,)](a, b, product, 32, 64, 32)
    for places in range(1, 32):
        multiply[(1,)](a.roll(places, 0), b, moved, 32, 64, 32)
        assert torch.equal(moved, product.roll(places, 0))


@triton.jit
def convert(source, target, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def fail_or_wait(word):
    """The last program fails; the others wait for what never comes."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.device_assert(tl.load(word) == 1, "the last program fails")
    while tl.atomic_add(word, 0, sem="acquire", scope="sys") == 0:
        pass


@triton.jit
def add_half(x):
    tl.atomic_add(x, tl.load(x))


@triton.jit
def count_to(limit, out, STEP: tl.constexpr):
    """`range` over loaded scalars."""
    total = 0
    for index in range(tl.load(limit) * 0, tl.load(limit), STEP):
        total += index
    tl.store(out, total)


def let_programs_wait_for_each_other():
    words, order = torch.zeros(31, dtype=torch.int32), torch.zeros(30, dtype=torch.int32)
    wait_for_the_next[(10, 3)](words, order, 30)
    assert order.tolist() == list(reversed(range(30)))
    word, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    take_in_turn[(5,)](word, count, 5)
    assert count.item() == 15
    wait_by_loads[(5,)](torch.zeros(4, dtype=torch.int32), 4)
    threads = threading.active_count()
    convert[(50,)](torch.zeros(4), torch.zeros(4), 4)
    assert threading.active_count() <= threads  # nobody waited: no thread was needed


def compute_in_bf16():
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    products, sums, parts = torch.zeros(16, 16), torch.zeros(16, 16).bfloat16(), torch.zeros(3, 16)
    compute[(1,)](a, b, products, sums, parts, 16)
    torch.testing.assert_close(products, a.float() @ b.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(sums, a * b + a - (-b))
    assert torch.equal(parts[0], a.float().sum(1).bfloat16().float())
    assert torch.equal(parts[1], torch.minimum(a, b).max(1).values.float())
    assert torch.equal(parts[2], (a[0].abs() + 1.5).float())
    edges = [0.0, -0.0, 1.00390625, 1.01171875, 3.3e38, 3.4e38, float("inf"), float("-inf"), 1e-40, -2.5, 7.0, 0.1]
    numbers = torch.tensor([*edges, float("nan"), 65504.0, 1e-8, 12345.678])
    for dtype in (torch.float32, torch.float16, torch.int32):
        source = numbers.nan_to_num(0, 9, -9).clamp(-9e4, 9e4) if dtype == torch.int32 else numbers
        source, target = source.to(dtype), torch.zeros(16).bfloat16()
        convert[(1,)](source, target, 16)
        torch.testing.assert_close(target, source.bfloat16(), rtol=0, atol=0, equal_nan=True)
        back = torch.zeros(16, dtype=dtype)
        convert[(1,)](target, back, 16)
        torch.testing.assert_close(back, target.to(dtype), rtol=0, atol=0, equal_nan=True)


def end_all_when_one_fails():
    with pytest.raises(InterpreterError, match=r"program \(5, 0, 0\): .*the last program fails"):
        fail_or_wait[(6,)](torch.zeros(1, dtype=torch.int32))
    let_programs_wait_for_each_other()  # nothing of it stays behind


def launch_from_two_threads():
    def work(number):
        words, order = torch.zeros(7, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        for _ in range(10):
            words.zero_()
            wait_for_the_next[(6, 1)](words, order, 6)
            results[number] += order.tolist() == [5, 4, 3, 2, 1, 0]

    results = [0, 0]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [10, 10]


def refuse_what_is_wrong():
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(InterpreterError, match="loses updates between processes"):
            add_half[(1,)](torch.ones(1, dtype=dtype))


def count_with_scalars():
    out = torch.zeros(1, dtype=torch.int32)
    count_to[(1,)](torch.tensor([10], dtype=torch.int32), out, 3)
    assert out.item() == 0 + 3 + 6 + 9
