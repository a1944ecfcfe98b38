# SPDX-License-Identifier: Apache-2.0
"""Makes a command of a bench's settings, for `stretto bench` and the lab: an option for each field, `--out`, `--json`.

A command imports its settings when it is used, and its bench, and torch with it, when all that was given has been
checked.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from stretto.atomic_files import require_writable_folder
from stretto.bench.settings import Needs, Ranks, parse_number, require_most, split_words
from stretto.cli.commands import App, LazyCommand, make_command, make_parameter
from stretto.cli.console import BAD_INPUT, Json, fail, print_json, refusing_bad_input, stdout_on_stderr
from stretto.quantities import MAX_LOCAL_RANKS, require_least


class BenchApp:
    """A group of commands that measure. folder: where results go, each in a folder of its name (None: no files)."""

    def __init__(self, help: str, folder: str | None) -> None:
        self.app = App(help=help, no_args_is_help=False)
        self._folder = folder
        self._names: dict[Needs, list[str]] = {each: [] for each in Needs}
        self.app.callback(invoke_without_command=True)(self._about)

    def _about(self, context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            from stretto.cluster.detection import may_have_gpus

            print(context.get_help())
            if not may_have_gpus():
                print(f"This machine has no GPU. {self._describe()}")
            raise typer.Exit(BAD_INPUT)

    def _describe(self) -> str:
        """Say which commands run on a machine without GPUs."""
        said = {
            Needs.NO_GPU: "without GPUs these run: {}",
            Needs.RANKS: "with --ranks N, on N processes of the CPU: {}",
            Needs.ONE_GPU: "with --cpu: {}",
        }
        parts = [text.format(", ".join(sorted(names))) for need, text in said.items() if (names := self._names[need])]
        text = "; ".join(parts)
        return f"{text[:1].upper()}{text[1:]}."

    def command(
        self,
        name: str,
        settings: str | Callable[[], type[Any]],
        *,
        needs: Needs = Needs.NO_GPU,
        out: str | None = None,
        count: Callable[[int | None], int] | None = None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a command of a function that takes the settings and the output folder, and returns what `--json` prints.

        settings: a function that returns their class, or the module of the class that annotates the function's
        parameter `setting`. needs: what it needs of the machine. out: the folder's name (None: the command's). count:
        adds an option `--ranks`; the function gets the number of ranks that `count` makes of it as its first argument.
        A ValueError ends the command with status 2.
        """

        def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
            def make() -> Any:
                if isinstance(settings, str):
                    setting_type = getattr(import_module(settings), run.__annotations__["setting"])
                else:
                    setting_type = settings()
                folder = None if self._folder is None else Path(self._folder) / (out or name)
                return make_command(name, _make_function(run, setting_type, folder, count))

            self._names[needs].append(name)
            self.app.lazy[name] = LazyCommand(name, make, summary=inspect.getdoc(run), panel=needs.value)
            return run

        return decorate

    def count_ranks(self, ranks: int | None) -> int:
        """The number of ranks to start: as given, else the machine's GPUs. Raises ValueError if there are none."""
        require_least(1, **{"--ranks": ranks})
        require_most(MAX_LOCAL_RANKS, **{"--ranks": ranks or 1})
        from stretto.cluster.detection import count_gpus

        count = ranks or count_gpus()
        if not count:
            raise ValueError(f"this machine has no GPU: say how many CPU --ranks to use. {self._describe()}")
        return count

    def count_gpus(self, ranks: int | None) -> int:
        """The number of ranks of a bench that needs a GPU a rank. Raises ValueError for more ranks than GPUs."""
        from stretto.cluster.detection import count_gpus

        there = count_gpus()
        if not there:
            raise ValueError(f"this takes 2 GPUs or more, one a rank, and this machine has none. {self._describe()}")

        from stretto.memory import shared_gpus  # imports torch, as counting GPUs has

        if shared_gpus.is_enabled():
            there = max(there, ranks or 2)
        if there < 2 or (ranks is not None and not 2 <= ranks <= there):
            asked = "" if ranks is None else f", and --ranks is {ranks}"
            raise ValueError(f"this takes 2 GPUs or more, one a rank: this machine has {there}{asked}")
        return ranks or there

    def count_ranks_on_gpus(self, ranks: int | None) -> int:
        """The number of ranks of a bench on GPUs, which more ranks may share: as given, or the machine's GPUs."""
        from stretto.cluster.detection import count_gpus

        if not (there := count_gpus()):
            raise ValueError(f"this takes GPUs, and this machine has none. {self._describe()}")
        if (count := ranks or there) < 2:
            raise ValueError(f"this takes 2 ranks or more, not {count}; --ranks 2 would share the GPU")
        return count


def _make_function(
    run: Callable[..., Any], setting_type: type[Any], folder: Path | None, count: Callable[[int | None], int] | None
) -> Callable[..., None]:
    """Make the function that typer makes a command of: its parameters are the settings' fields, --out and --json."""

    def command(*, ranks: int | None = None, out: Path | None = None, as_json: bool, **given: Any) -> None:
        with refusing_bad_input(as_json=as_json):
            if count is None and "ranks" in options:
                given["ranks"] = ranks
            setting = setting_type(**_read(options, given))
            if out is not None:
                require_writable_folder(out, "--out")
            counted = () if count is None else (count(ranks),)
            with stdout_on_stderr() if as_json else nullcontext():
                result = run(*counted, setting, *(() if out is None else (out,)))
        if isinstance(result, dict) and result.get("failure") is not None:
            raise fail(result["failure"], 1, as_json=as_json)
        if as_json:
            print_json(result if isinstance(result, dict) else {"rows": result})

    options = {field.name: field for field in fields(setting_type)}
    parameters = [_make_parameter(field) for field in options.values()]
    if count is not None:
        help = get_args(Ranks)[1].help
        parameters.insert(0, make_parameter("ranks", Annotated[int | None, typer.Option(help=help)], None))
    if folder is not None:
        parameters.append(make_parameter("out", Annotated[Path, typer.Option(help="Folder for the results.")], folder))
    parameters.append(make_parameter("as_json", Json, False))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = run.__doc__
    return command


def _make_parameter(field: "Field[Any]") -> inspect.Parameter:
    """The parameter (option) of a field. Tuples are given as text; a default that a factory makes is shown as None."""
    type_, option = get_args(field.type)
    default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
    if get_origin(type_) is tuple and option.is_repeated:
        type_, default = list[str] | None, None
    elif get_origin(type_) is tuple:
        type_ = str if default else str | None
        default = option.separator.join(map(str, default)) if default else None
    elif field.default_factory is not MISSING:
        type_, default = type_ | None, None
    flags = (option.flags,) if option.flags else ()
    made = typer.Option(*flags, help=option.help, metavar=option.metavar, envvar=option.envvar)
    return make_parameter(field.name, Annotated[type_, made], default)


def _read(options: "Mapping[str, Field[Any]]", given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the command line's values into the fields' values. Raises ValueError for text that cannot be parsed."""
    values = {}
    for name, value in given.items():
        type_, option = get_args(options[name].type)
        if value is None and options[name].default_factory is not MISSING:
            continue
        if get_origin(type_) is tuple:
            flag = option.flags or "--" + name.replace("_", "-")
            words = (value or []) if option.is_repeated else split_words(value or "")
            if not words and options[name].default:
                raise ValueError(f"{flag} is empty, but takes one name or more")
            value = tuple(_read_items(words, get_args(type_)[0], flag))
        elif value is not None:
            named = {option.flags or "--" + name.replace("_", "-"): value}
            if option.least is not None:
                require_least(option.least, **named)
            if option.most is not None:
                require_most(option.most, **named)
        values[name] = value
    return values


def _read_items(words: list[str], kind: Any, flag: str) -> Iterator[Any]:
    for word in words:
        if kind is int:
            yield parse_number(word, flag)
        elif kind is float:
            yield _parse_float(word, flag)
        else:
            yield word if kind is str else kind.parse(word)


def _parse_float(word: str, flag: str) -> float:
    try:
        number = float(word)
    except ValueError:
        raise ValueError(f"{flag} has {word!r}, which is no number") from None
    if not 0 <= number < math.inf:  # refuses NaN, too
        raise ValueError(f"{flag} has {word!r}, but must be finite and at least 0")
    return number
