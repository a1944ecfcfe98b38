# SPDX-License-Identifier: Apache-2.0
"""Groups of commands, which are imported when they are used."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from stretto.cli.console import Command
from stretto.cli.help import write_help


class LazyCommand(Command):
    """A command or group that `make` makes when it is used; its group's help needs no more than `summary`, if given."""

    def __init__(self, name: str, make: Callable[[], Any], summary: str | None = None, panel: str | None = None):
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._make = make

    def load(self) -> Any:
        """Make the command."""
        return self._make()

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Make the context of the command itself, which then runs in this one's place."""
        return self.load().make_context(info_name, args, parent, **extra)

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence of the command's help."""
        return super().get_short_help_str(limit) if self.help else self.load().get_short_help_str(limit)


class Group(TyperGroup):
    """A group of commands, some of them lazy."""

    lazy: ClassVar[dict[str, LazyCommand]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands.update(self.lazy)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the group's help, with the first sentence of each command's."""
        write_help(self, ctx, formatter, self.commands)


class App(typer.Typer):
    """A typer application of these commands and groups."""

    def __init__(self, **options: Any) -> None:
        self.lazy: dict[str, LazyCommand] = {}
        given = {"add_completion": False, "no_args_is_help": True, "pretty_exceptions_enable": False} | options
        super().__init__(cls=type("Group", (Group,), {"lazy": self.lazy}), rich_markup_mode=None, **given)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Register a command, as typer does."""
        return super().command(name, cls=Command, **options)

    def add_lazy(self, name: str, home: str) -> None:
        """Register the function or application at `home` ("package.module:name"), imported when it is used."""

        def make() -> Any:
            module, _, attribute = home.partition(":")
            return make_command(name, getattr(import_module(module), attribute))

        self.lazy[name] = LazyCommand(name, make)


def make_command(name: str, made_of: Any) -> Any:
    """Make a command of a function, or a group of an application."""
    if isinstance(made_of, typer.Typer):
        return typer.main.get_group(made_of)
    alone = App()
    alone.command(name)(made_of)
    return typer.main.get_command(alone)
