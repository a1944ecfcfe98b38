# SPDX-License-Identifier: Apache-2.0
"""Quantities as people write them."""

import pytest

from stretto.quantities import (
    counted,
    read_bandwidth,
    read_bytes,
    read_seconds,
    read_switch,
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
