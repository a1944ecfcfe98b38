# SPDX-License-Identifier: Apache-2.0
"""Commands and groups of them, which are imported when they are used, and their help as plain text.

typer's own help is drawn by rich, which takes longer to import than most commands take to refuse an argument, and cuts
options' names on a terminal of 80 columns.
"""

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Annotated, Any, ClassVar, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from stretto.suggestions import similar_names

MAX_INTEGER = 2**62
LONGEST_NAME = 26  # characters of an option or command that has its help beside it, not below it

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of errors in a command line, which typer does not export."""


class Command(TyperCommand):
    """A command whose error names all missing options, and suggests an option for an unknown one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line as typer does, with these messages, and refuse numbers that nothing can be."""
        try:
            rest = super().parse_args(ctx, list(args))
            raw = self.make_parser(ctx).parse_args(list(args))[0]
            for parameter in self.get_params(ctx):
                if raw.get(parameter.name) == "":  # a shell's unset variable, of which a path would be "."
                    ctx.fail(f"{_shown_name(parameter)} is empty: give it a value, or leave it out.")
                given = ctx.params.get(parameter.name)
                for number in given if isinstance(given, list | tuple) else [given]:
                    if isinstance(number, float) and not math.isfinite(number):
                        ctx.fail(f"{_shown_name(parameter)} is {number}, but must be a finite number.")
                    if isinstance(number, int) and abs(number) > MAX_INTEGER:
                        ctx.fail(f"{_shown_name(parameter)} is {number}, but must lie between -2^62 and 2^62.")
            return rest
        except UsageError as error:
            missing = self._find_missing(ctx, args) if isinstance(error, typer.BadParameter) else []
            if len(missing) > 1:
                ctx.fail(f"Missing {' and '.join(missing)}.")
            if (unknown := getattr(error, "option_name", None)) is not None:
                options = [
                    name for parameter in self.get_params(ctx) for name in parameter.opts if name.startswith("--")
                ]
                if near := similar_names(unknown, options):
                    ctx.fail(f"No such option: {unknown}; did you mean {near[0]}?")
                error.possibilities = options  # type: ignore[attr-defined]
            raise

    def _find_missing(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        parameters: list[Any] = self.get_params(ctx)
        return [
            f"{parameter.param_type_name} {_shown_name(parameter)}"
            for parameter in parameters
            if parameter.required and given.get(parameter.name) is None
        ]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the command's help."""
        write_help(self, ctx, formatter)


def refuse_options(context: typer.Context, what: str, *names: str) -> None:
    """Raise ValueError for parameters with these Python names on the command line: they mean nothing to `what`."""
    sources = {name: context.get_parameter_source(name) for name in names}
    on_line = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    given = [_shown_name(each).strip("'") for each in context.command.params if each.name in on_line]
    if given:
        raise ValueError(f"{', '.join(given)} is no option of {what}; leave it out")


def allow_only(context: typer.Context, what: str, *names: str) -> None:
    """Raise ValueError for parameters on the command line without these Python names, and not --json."""
    refuse_options(context, what, *context.params.keys() - {*names, "as_json"})


def _shown_name(parameter: Any) -> str:
    return repr(parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar or parameter.name)


class LazyCommand(Command):
    """A command or group that `make` makes when it is used; its group's help needs no more than `summary`, if given."""

    def __init__(self, name: str, make: Callable[[], Any], summary: str | None = None, panel: str | None = None):
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._make = make

    def load(self) -> Any:
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
    if isinstance(made_of, typer.Typer):
        return typer.main.get_group(made_of)
    alone = App()
    alone.command(name)(made_of)
    return typer.main.get_command(alone)


def make_parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_options_of(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each annotated field of a dataclass that the command has no parameter of.

    The command gets one of these dataclasses as its parameter `given`, in whose place the options are in the help.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(run).parameters
        options = {
            each.name: make_parameter(each.name, each.type, each.default)
            for each in fields(kind)
            if get_origin(each.type) is Annotated and each.name not in own
        }

        @functools.wraps(run)
        def command(**values: Any) -> None:
            run(given=kind(**{name: values.pop(name) for name in options}), **values)

        parameters = [
            each
            for name, one in own.items()
            for each in (options.values() if name == "given" else [one.replace(kind=one.KEYWORD_ONLY)])
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def write_help(command: Any, ctx: Any, formatter: Any, commands: Mapping[str, Any] | None = None) -> None:
    """Write usage, text, and a section of options or commands for each of the panels that they name."""
    command.format_usage(ctx, formatter)
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        formatter.write("\n")
        items = paragraph.split("\n") if paragraph.startswith("- ") else [paragraph]
        for item in items:
            below = "    " if item.startswith("- ") else "  "
            formatter.write("\n".join(_wrap(item, formatter.width, "  ", below)) + "\n")
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        if (record := parameter.get_help_record(ctx)) is not None:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
    for name, each in (commands or {}).items():
        if not each.hidden:
            summary = each.get_short_help_str(limit=1000)
            sections.setdefault(each.rich_help_panel or "Commands", []).append((name, summary))
    for heading, rows in sections.items():
        formatter.write(f"\n{heading}:\n")
        for line in _list_rows(rows, formatter.width):
            formatter.write(f"{line}\n")


def _list_rows(rows: list[tuple[str, str]], width: int) -> Iterable[str]:
    """Lines of two columns: names, and what they mean."""
    column = 4 + max((len(name) for name, _ in rows if len(name) <= LONGEST_NAME), default=4)
    for name, text in rows:
        if len(name) > LONGEST_NAME:
            yield f"  {name}"
            name = ""
        yield from _wrap(text, width, f"  {name}".ljust(column), " " * column) or [f"  {name}"]


def _wrap(text: str, width: int, first: str, below: str) -> list[str]:
    """Lines of a text; names with hyphens stay whole."""
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=below, break_on_hyphens=False)
