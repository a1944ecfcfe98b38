# SPDX-License-Identifier: Apache-2.0
"""Mutates nested options, files and schedules at random, and requires that what reads them succeeds or refuses them."""

import copy
import json
import math
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SEED = int(os.environ.get("STRETTO_TEST_SEED", random.randrange(2**32)))
HANGING = 60  # seconds; a case takes milliseconds


class Raw(str):
    """Text that a TOML file gets as it is, where no Python value is written like that."""


ODD_NUMBERS = (0, -1, 1, 2, 3, 7, 64, 1000, 2**31, 2**53, 2**63, 10**30, -(10**40))
ODD_NUMBERS += (0.0, -0.0, 0.5, 5e-324, 1e308, -1e308, math.nan, math.inf, -math.inf)
ODD_TEXTS = ("", " ", "none", "auto", "true", "1", "nan", "\x00", "\x7f\n", "ü\u202e\U0001d518", "../..", "a" * 3000)
ODD_VALUES = (*ODD_NUMBERS, *ODD_TEXTS, True, False, [], [1], [[]], [""], [math.nan], {}, {"": 1}, {"a": {"b": []}})
ODD_TOML = (Raw("1979-05-27T07:32:00Z"), Raw("07:32:00"), Raw("0x" + "f" * 60), Raw("9" * 5000), Raw("'''a\nb'''"))
ODD_TOML += (Raw("[" * 2000 + "]" * 2000), Raw("1e99999"), Raw('"\\ud800"'))


def fuzz(case: Callable[[random.Random], None], count: int, *refusals: type[Exception]) -> int:
    """Run `count` cases, each with a seed of its own, which may raise `refusals` with a message, and nothing else.

    Returns how many were not refused. STRETTO_TEST_SEED makes the first case that of a failure's message.
    """
    accepted = 0
    for seed in range(SEED, SEED + count):
        with _named(seed):
            try:
                case(random.Random(seed))
                accepted += 1
                continue
            except refusals as error:
                message = str(error)
            assert message.strip(), "refused without a message"
    return accepted


@contextmanager
def _named(seed: int) -> Iterator[None]:
    """Add the seed to whatever a case raises, and end a case that hangs."""
    try:
        with cpu_limit(HANGING):
            yield
    except BaseException as error:
        error.add_note(f"STRETTO_TEST_SEED={seed} runs this case first")
        raise


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise AssertionError once this process has computed for so long, however long that takes on a loaded machine."""

    def end(*_: object) -> None:
        raise AssertionError(f"hangs: not done after {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def mutate(rng: random.Random, tree: dict[str, Any], odd: tuple[Any, ...], times: int = 4) -> dict[str, Any]:
    """A copy of nested tables with up to `times` values, keys or sections changed, moved, added or removed."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(0, times)):
        tables = list(_tables(tree))
        table = rng.choice(tables)
        key = rng.choice(list(table)) if table else rng.choice(ODD_TEXTS)
        match rng.randrange(8):
            case 0 | 1:
                table[key] = copy.deepcopy(rng.choice(odd))
            case 2:
                table.pop(key, None)
            case 3:
                table[_misspell(rng, key)] = table.pop(key, 1)
            case 4:
                rng.choice(tables)[key] = copy.deepcopy(table.get(key))
            case 5:
                table[key] = {key: table.get(key)} if rng.random() < 0.5 else [table.get(key)] * rng.randint(1, 3)
            case 6:
                table[key] = _change(rng, table.get(key))
            case 7:
                other = rng.choice(tables)
                table[key] = copy.deepcopy(rng.choice(list(other.values()) or [1]))
    return tree


def _tables(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _tables(each)


def _misspell(rng: random.Random, key: str) -> str:
    at = rng.randrange(len(key) + 1)
    return rng.choice((key[:at] + key[at + 1 :], key[:at] + rng.choice("x.é \x00") + key[at:], *ODD_TEXTS))


def _change(rng: random.Random, value: Any) -> Any:
    """A value that is near the given one: of its type, mostly."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, -value, 2 * value, float(value), str(value), value * 2**40))
        case float():
            return rng.choice((-value, value * 1e-300, value * 1e300, value * 1.1, str(value)))
        case str() if not isinstance(value, Raw):
            return _misspell(rng, value)
        case _:
            return [value]


def to_toml(value: dict[str, Any]) -> str:
    """Write nested tables as TOML, each top-level table as a section."""
    plain = {key: each for key, each in value.items() if not isinstance(each, dict)}
    text = "".join(f"{_key(key)} = {_literal(each)}\n" for key, each in plain.items())
    for name, section in value.items():
        if isinstance(section, dict):
            text += f"\n[{_key(name)}]\n"
            text += "".join(f"{_key(key)} = {_literal(each)}\n" for key, each in section.items())
    return text


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key).replace("\x7f", "\\u007f")


def _literal(value: Any) -> str:
    match value:
        case Raw():
            return str(value)
        case bool():
            return str(value).lower()
        case dict():
            return "{ " + ", ".join(f"{_key(key)} = {_literal(each)}" for key, each in value.items()) + " }"
        case list():
            return "[" + ", ".join(map(_literal, value)) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case None:
            return '"none"'
        case _:
            return repr(value)


def damage(rng: random.Random, content: bytes) -> bytes:
    """Change, remove, repeat or insert some bytes, truncate the file, or write it in another encoding."""
    text = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(7):
            case 0:
                text[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del text[at : at + rng.randrange(40)]
            case 2:
                text[at:at] = text[at : at + rng.randrange(200)]
            case 3:
                text[at : at + 1] = rng.choice(
                    (b"9", b"-1", b"9" * 30, b"<", b"[", b"{", b'"', b"\n", b"=", b"\xff\xfe")
                )
            case 4 if rng.random() < 0.3:
                del text[at:]
            case 5 if rng.random() < 0.1:
                text = bytearray(bytes(text).decode("latin-1").encode(rng.choice(("utf-16", "utf-8-sig", "utf-32"))))
            case 6:
                text[at:at] = rng.choice((b"a." * 3000, b"[" * 3000, b"\r", b"\x00", b"#" * 5000))
    return bytes(text)


def mutate_schedule(rng: random.Random, xml: str) -> bytes:
    """Change attributes and steps of a schedule in MSCCL XML: mostly to what another step or block has there."""
    lines = xml.splitlines()
    for _ in range(rng.randint(0, 3)):
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(6):
            case 0 | 1 | 2:
                lines[at] = _mutate_attribute(rng, lines[at], xml)
            case 3:
                del lines[at]
            case 4:
                lines[at], lines[other] = lines[other], lines[at]
            case 5:
                lines.insert(other, lines[at])
    if rng.random() < 0.8:
        _number_steps(lines)
    text = "\n".join(lines).encode()
    return damage(rng, text) if rng.random() < 0.1 else text


def _mutate_attribute(rng: random.Random, line: str, xml: str) -> str:
    if not (found := list(re.finditer(r'(\w+)="([^"]*)"', line))):
        return line
    place = rng.choice(found)
    name, value = place.groups()
    elsewhere = re.findall(rf'\b{name}="([^"]*)"', xml)
    odd = ("", "-1", "x", "0", "1", "4096", str(2**20), "9" * 20, "&lt;", "Simple", "r", "s", "nop")
    near = [str(int(value) + 1), str(int(value) - 1)] if value.lstrip("-").isdigit() else [value.upper()]
    new = rng.choice((rng.choice(elsewhere), rng.choice(elsewhere), rng.choice(near), rng.choice(odd)))
    return line[: place.start(2)] + new + line[place.end(2) :]


def _number_steps(lines: list[str]) -> None:
    """Number the steps of each thread block anew, so that one added or removed is not refused for that alone."""
    number = 0
    for at, line in enumerate(lines):
        if "<tb" in line:
            number = 0
        elif "<step" in line:
            lines[at] = re.sub(r'\bs="[^"]*"', f's="{number}"', line, count=1)
            number += 1
