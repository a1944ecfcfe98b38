# SPDX-License-Identifier: Apache-2.0
"""Reads and writes quantities as people do: 64MiB, 50GiB/s, 200Gb/s, 700ns."""

import math
import operator
import os
import re
from numbers import Integral
from typing import Any

MAX_BYTES = 2.0**60
MAX_COUNT = 10**9  # of what a model has: products of a few stay exact and cheap
# Bounds of a model's shape: far above any model that was ever trained, and low enough that checking a configuration
# takes seconds.
MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
MAX_VOCAB = MAX_LENGTH = 1 << 24
MAX_LOCAL_RANKS = 1 << 10  # processes that a command starts on one machine
MAX_REPEATS = 10**6  # of what a bench times
_PREFIXES = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|inf|nan)"


def counted(number: int, noun: str) -> str:
    """A number and what there is of it: 1 rank, 1,024 ranks, 2 micro-batches."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def read_bytes(text: str) -> int:
    """Bytes: 4096, 1MiB or 1M (2^20), 1MB (10^6), in either case. ValueError for anything else."""
    match = re.fullmatch(rf"{_NUMBER}([KMGT]?)(i?)(B?)", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size: write 4096, 64KiB, 1MiB (2^20 bytes) or 1MB (10^6)")
    is_binary, prefix = match[3] or not match[4], match[2].upper()
    size = float(match[1]) * (_BINARY.get(prefix, 1) if is_binary else _PREFIXES[prefix])
    if _finite(text, size) > MAX_BYTES:
        raise ValueError(f"{text} is more than 2^60 bytes, the most; 1TiB would do")
    if size != int(size):
        raise ValueError(f"{text} is {size:g} bytes, which must be a whole number; {math.ceil(size)} would do")
    return int(size)


def read_bandwidth(text: str) -> float:
    """Bytes/s: 50GiB/s (2^30 bytes), 50GB/s (10^9 bytes), 200Gb/s (10^9 bits). ValueError for anything else.

    Zero is refused too: nothing would ever arrive.
    """
    match = re.fullmatch(rf"{_NUMBER}([KMGT]?)(i?)([bB])(?:/s|ps)", text.strip(), re.ASCII)
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no bandwidth: write 50GiB/s, 25GB/s or 200Gb/s")
    factor = _BINARY[match[2]] if match[3] else _PREFIXES[match[2]]
    value = _finite(text, float(match[1]) * factor / (8 if match[4] == "b" else 1))
    if value == 0:
        raise ValueError(f"a bandwidth of {text} lets nothing through; it must be more than 0, such as 1GB/s")
    return value


def read_seconds(text: str) -> float:
    """Seconds: 700ns, 1.5us, 2ms, 1s; 0 needs no unit. ValueError for anything else."""
    match = re.fullmatch(rf"{_NUMBER}\s*(s|ms|us|µs|ns)?", text.strip())
    if match is None or (match[2] is None and float(match[1]) != 0):
        raise ValueError(f"{text!r} is no time: write 700ns, 1.5us or 2ms")
    return _finite(text, float(match[1]) * _SECONDS[match[2] or "s"])


def whole_nanoseconds(seconds: float) -> int:
    """Seconds as nanoseconds, rounded to the nearest."""
    return round(seconds * 1e9)


def show_bytes(count: float) -> str:
    """Bytes for people, in the unit that suits: 98.31 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def show_nanoseconds(nanoseconds: float) -> str:
    """Nanoseconds for people, in the unit that suits: 21,031 ns, 4.12 ms."""
    for factor, unit in ((1e9, "s"), (1e6, "ms")):
        if nanoseconds >= factor:
            return f"{nanoseconds / factor:.4g} {unit}"
    return f"{nanoseconds:,.0f} ns"


def _finite(text: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not finite")
    return value


def to_whole(value: Any) -> Any:
    """A whole number of another library, such as numpy.int64, as Python's own; anything else as it is."""
    return value if isinstance(value, int) or not isinstance(value, Integral) else operator.index(value)


def require_whole(where: str, value: Any, least: int = 1, most: int | None = None, *, rest: str = "") -> int:
    """A whole number, as Python's own (`to_whole`). Raises ValueError for anything else, and out of these bounds.

    rest: what else would do, for the message.
    """
    value = to_whole(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f", at least {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{where} is {value!r}, but must be a whole number{bounds}{rest}")
    return value


def check_count(where: str, value: Any) -> None:
    """Raise ValueError unless a value is a whole number from 1 to MAX_COUNT."""
    require_whole(where, value, 1, MAX_COUNT)


def read_switch(variable: str, *, default: bool = False, text: str | None = None) -> bool:
    """Check whether an environment variable is 1, not 0; unset or empty it is the default. ValueError for others.

    text: what another rank has there.
    """
    value = (os.environ.get(variable) if text is None else text) or str(int(default))
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable {variable} is {value!r}, but must be 0 or 1")
    return value == "1"


def require_least(least: int, prefix: str = "", /, **numbers: float | None) -> None:
    """Raise ValueError for a number that is smaller, with its name and what comes before it."""
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"{prefix}{name} is {number}, but must be at least {least}")
