# SPDX-License-Identifier: Apache-2.0
"""Numbers on command lines: what no number can be is refused by all commands."""

import dataclasses
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_origin

import pytest
from tests.cli.answers import walk_commands
from tests.cli.test_commands import stretto_command

import lab
import stretto.bench
from lab.harness import find_benches
from stretto.bench.settings import Option
from stretto.cli.commands import Command
from stretto.cli.settings_command import _read


@pytest.mark.long
def test_every_command_refuses_numbers_that_are_not_finite_or_beyond_64_bits() -> None:
    commands = {name: command for name, command in walk_commands().items() if not hasattr(command, "commands")}
    assert len(commands) > 30
    for name, command in commands.items():
        assert isinstance(command, Command), name
        for option in command.params:
            annotation = option.type_descriptor.annotation
            values = {float: ("nan", "inf", "-inf"), int: (str(10**30), str(-(10**30)))}.get(annotation, ())
            required = {each.name: "1" for each in command.params if each.required and each is not option}
            arguments = [
                word
                for each in command.params
                if each.name in required
                for word in ([each.opts[0], "1"] if each.opts[0].startswith("-") else ["1"])
            ]
            for value in values:
                given = [*name.split(), f"{option.opts[0]}={value}", *arguments]
                status, text = stretto_command(*given)
                assert status == 2, (given, text)
                assert "must" in text or "Input should" in text, (given, text)


def settings_of_benches() -> Iterator[type[Any]]:
    """All dataclasses of benches whose fields are options."""
    for package in (lab, stretto.bench):
        root = Path(package.__file__ or "").parent
        for path in [*root.rglob("*settings.py"), *root.glob("flips.py")]:
            name = ".".join((package.__name__, *path.relative_to(root).with_suffix("").parts))
            yield from settings_in(importlib.import_module(name))
    for bench in find_benches():
        yield getattr(importlib.import_module(bench.module), bench.settings)


def settings_in(module: ModuleType) -> Iterator[type[Any]]:
    for each in vars(module).values():
        if dataclasses.is_dataclass(each) and each.__module__ == module.__name__:
            yield each  # type: ignore[misc]


def test_benches_refuse_negative_numbers() -> None:
    checked = 0
    for setting in settings_of_benches():
        fields = {field.name: field for field in dataclasses.fields(setting)}
        if not all(isinstance(dict(enumerate(get_args(field.type))).get(1), Option) for field in fields.values()):
            continue
        for name, field in fields.items():
            kind = get_args(field.type)[0]
            kinds = {get_args(kind)[0]} if get_origin(kind) is tuple else set(get_args(kind) or (kind,))
            if not kinds & {int, float} or name == "seed":
                continue
            needed = {each.name: Path(__file__) for each in fields.values() if each.default is each.default_factory}
            with pytest.raises(ValueError):
                setting(**needed | _read(fields, {name: "-1" if get_origin(kind) is tuple else -1}))
            checked += 1
            if float in kinds and get_origin(kind) is tuple:
                with pytest.raises(ValueError, match="must be finite"):
                    _read(fields, {name: str(math.nan)})
    assert checked > 100


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan --model gpt-5b --cluster perlmutter --gpus 8 --batch 8 --seq-len 2048 --imbalance -3", "has no experts"),
        ("pipeline verify 1f1b --pipe 4 --micro-batches 8 --max-live 0", "greater than or equal to 1"),
        ("pipeline show 1f1b --pipe 999999999 --micro-batches 8", "5592405 stages and one micro-batch would do"),
        ("simulate message --cluster perlmutter --bytes 1MiB --src 0 --dst 6144", "6144 would do"),
        ("simulate collective all_reduce --cluster perlmutter --bytes 1MiB", "give --gpus"),
    ],
)
def test_what_cannot_be_is_refused(command: str, words: str) -> None:
    status, text = stretto_command(*command.split())
    assert status == 2
    assert words in text


def test_a_message_on_a_large_cluster_needs_no_number_of_gpus() -> None:
    message = "simulate message --cluster perlmutter --bytes 1MiB --src 0 --dst 63 --json"
    assert stretto_command(*message.split()) == stretto_command(*message.split(), "--gpus", "64")
