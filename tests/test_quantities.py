# SPDX-License-Identifier: Apache-2.0
"""Quantities as people write them."""

import json
from collections.abc import Callable

import numpy
import pytest
import torch

from stretto.axes import check_sizes
from stretto.cluster import Cluster
from stretto.collectives import AllGather, chunk, compile_program, trace
from stretto.models import GPTConfig
from stretto.ops.moe import permute
from stretto.planner import plan
from stretto.quantities import (
    counted,
    read_bandwidth,
    read_bytes,
    read_seconds,
    read_switch,
    require_whole,
    show_nanoseconds,
    whole_nanoseconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4096B", 4096),
        ("64K", 65_536),
        ("64KiB", 65_536),
        ("64KB", 64_000),
        ("64kB", 64_000),
        ("1m", 1_048_576),
        ("1MB", 1_000_000),
        ("1.5MiB", 1_572_864),
    ],
)
def test_sizes_are_read(text, size):
    assert read_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "bandwidth"), [("50GiB/s", 50 * 2**30), ("50GB/s", 50e9), ("200Gb/s", 25e9), ("200Gbps", 25e9)]
)
def test_bandwidths_are_read_in_bytes_a_second(text, bandwidth):
    assert read_bandwidth(text) == bandwidth


@pytest.mark.parametrize(("text", "seconds"), [("700ns", 7e-7), ("1.5us", 1.5e-6), ("2 ms", 2e-3), ("0", 0), ("1s", 1)])
def test_times_are_read(text, seconds):
    assert read_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_bytes, "1X"),
        (read_bytes, "iB"),
        (read_bytes, "0.5"),
        (read_bytes, "1iB"),
        (read_bytes, "-1"),
        (read_bandwidth, "50"),
        (read_bandwidth, "50GB"),
        (read_bandwidth, "0GB/s"),
        (read_bandwidth, "nanGB/s"),
        (read_seconds, "700"),
        (read_seconds, "infs"),
        (read_seconds, "-1ns"),
    ],
)
def test_invalid_quantities_raise(read, text):
    with pytest.raises(ValueError, match=r"is no|not finite|must be more than 0|must be a whole number"):
        read(text)


def test_one_of_a_kind_is_no_plural():
    found = [counted(number, noun) for number in (0, 1, 1024) for noun in ("rank", "micro-batch")]
    assert found == ["0 ranks", "0 micro-batches", "1 rank", "1 micro-batch", "1,024 ranks", "1,024 micro-batches"]


def test_a_switch_is_on_for_1_alone_and_refuses_what_is_neither_on_nor_off(monkeypatch):
    for value, is_on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("STRETTO_DEBUG", value)
        assert read_switch("STRETTO_DEBUG") == is_on
    monkeypatch.setenv("STRETTO_DEBUG", "true")
    with pytest.raises(ValueError, match="STRETTO_DEBUG is 'true', but must be 0 or 1"):
        read_switch("STRETTO_DEBUG")


def test_times_are_shown_in_the_unit_that_suits():
    assert [show_nanoseconds(time) for time in (0, 41_180, 8_382_406, 2.5e9)] == [
        "0 ns",
        "41,180 ns",
        "8.382 ms",
        "2.5 s",
    ]
    assert whole_nanoseconds(41_179.6875e-9) == 41_180


def gather_by(count: Callable[[int], int]) -> str:
    with trace(AllGather(count(2), count(1))) as traced:
        for rank in range(2):
            for other in range(2):
                chunk(count(rank), "in", count(0)).copy(count(other), "out", count(rank))
    return repr(compile_program(traced.program, name="gather").ranks)


def what_takes_counts(count: Callable[[int], int]) -> list[str]:
    """What calls that take whole numbers make of them, as text that shows a number of another library."""
    config = GPTConfig(layers=count(2), hidden=count(64), heads=count(4))
    plans = plan(
        config, Cluster.preset("perlmutter"), gpus=count(4), batch=count(8), seq_len=count(64), context=count(1)
    )
    stages = plan("gpt2-small", "dgx-h100", gpus=4, batch=8, seq_len=512, pipe=count(2))
    packed = plan("gpt2-small", "dgx-h100", gpus=4, batch=8, seq_len=512, documents=[count(100), count(400)])
    experts = plan("qwen3-30b-a3b", "dgx-h100", gpus=8, batch=8, seq_len=512, expert=count(4))
    permuted = permute(torch.eye(4), torch.tensor([[0], [1], [2], [1]]), count(4))
    return [
        repr(check_sizes({"data": count(2), "x": count(3), "expert": count(2)})),
        json.dumps(vars(config)),
        repr(plans[0]),
        repr((stages, packed, experts)),
        repr(permuted.offsets.tolist()),
        gather_by(count),
        repr(require_whole("room", count(3))),
    ]


def test_whole_numbers_of_numpy_are_pythons():
    assert what_takes_counts(numpy.int64) == what_takes_counts(int)
    for wrong in (numpy.float64(2), numpy.bool_(True), True, 2.0, "2"):
        with pytest.raises(ValueError, match=r"room is .*, but must be a whole number, at least 1"):
            require_whole("room", wrong)
