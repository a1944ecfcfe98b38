# SPDX-License-Identifier: Apache-2.0
"""Runs a script that was written for msccl-tools, and restores the interpreter's state after it."""

import io
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from stretto.collectives.msccl.modules import make_modules
from stretto.collectives.msccl.program import MSCCLProgram, ScriptRun, current_run
from stretto.collectives.msccl.values import OURS, ScriptError
from stretto.collectives.schedule import Schedule

_LIBRARIES = tuple(sysconfig.get_paths().values())


@dataclass(frozen=True)
class ImportedProgram:
    """One of a script's programs, compiled. notes: remarks on how it was interpreted."""

    schedule: Schedule
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ImportedScript:
    """A script's programs in the order in which it entered them, and its standard output."""

    programs: tuple[ImportedProgram, ...]
    printed: str


def import_msccl(script: str | Path, args: Sequence[str] = ()) -> ImportedScript:
    """Run a script for msccl-tools with these arguments, as `python SCRIPT ARGS` does, and compile its programs.

    The script is code and is run with the rights of the caller. While it runs, `msccl` and its modules are those of
    this package, whatever is installed; modules, arguments, import path, environment, working directory, logging and
    standard output are as before at the end, also after an error. A schedule's collective says what the script's
    program must do: for collectives of msccl-tools their postcondition; for the script's own, that each output chunk
    holds what it held at the end of the trace. ScriptError, in one line with the script's line, for a script that
    cannot be run, that makes no program, or whose program fails its collective's check or cannot be compiled.
    """
    script = Path(script)
    code = _read(script)
    run = ScriptRun()
    with _alone(script, args) as (main, printed):
        token = current_run.set(run)
        try:
            _execute(code, main, script)
            programs = _finish(run, script)
        except ScriptError as error:
            error.printed = printed.getvalue()
            raise
        finally:
            current_run.reset(token)
    return ImportedScript(programs, printed.getvalue())


def _read(script: Path) -> CodeType:
    try:
        return compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        raise ScriptError(f"{script}: cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ScriptError(f"{script}{line}: not Python: {_first_line(error)}") from error


def _execute(code: CodeType, main: ModuleType, script: Path) -> None:
    try:
        exec(code, main.__dict__)
    except SystemExit as exit:
        if exit.code not in (None, 0):
            status = f"status {exit.code}" if isinstance(exit.code, int) else _first_line(exit)
            raise ScriptError(f"{_place(exit, script)}: the script exited: {status}") from exit
    except Exception as error:
        raise _explained(error, script) from error


def _finish(run: ScriptRun, script: Path) -> tuple[ImportedProgram, ...]:
    """The script's programs, checked and compiled."""
    if run.current is not None:
        raise ScriptError(f"{run.current.line}: the program {run.current.name!r} never leaves its `with`")
    if not run.programs:
        raise ScriptError(f"{script}: the script makes no program: nothing was done in a `with MSCCLProgram(...)`")
    return tuple(_finish_program(program, script) for program in run.programs)


def _finish_program(program: MSCCLProgram, script: Path) -> ImportedProgram:
    # The script's own Check() may have been called too early, or not at all.
    complaints = io.StringIO()
    try:
        with redirect_stdout(complaints):
            verdict = program.check()
        if verdict is not None and not verdict:
            first = complaints.getvalue().partition("\n")[0] or "it says no more"
            raise ScriptError(f"{program.line}: {program.name}: its collective's check fails: {first}")
        schedule = program.compile()
    except Exception as error:
        raise _explained(error, script) from error
    notes = program.notes
    if verdict is None:
        notes += (
            f"{program.collective.name}: its check() says neither yes nor no: what the program does is taken as is",
        )
    return ImportedProgram(schedule, notes)


def _explained(error: Exception, script: Path) -> ScriptError:
    if isinstance(error, ScriptError):
        return error
    message = f"{_place(error, script)}: {type(error).__name__}: {_first_line(error)}"
    match error:
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] == "msccl":
            message = f"{_place(error, script)}: {name} is not supported: only msccl.language and msccl.topologies are"
        case AttributeError() if str(error).startswith("'NoneType'"):
            message += " (chunk() gives None for a place that holds nothing)"
    return ScriptError(message)


def _place(error: BaseException, script: Path) -> str:
    """The innermost line of the script's own, or the script itself."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(script)]
    return f"{script}:{frames[-1].lineno}" if frames else str(script)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


@contextmanager
def _alone(script: Path, args: Sequence[str]) -> Iterator[tuple[ModuleType, io.StringIO]]:
    """Provide a new `__main__` and captured output; restores everything that scripts are known to change."""
    modules, argv, path, errors = dict(sys.modules), sys.argv, list(sys.path), sys.stderr
    environment, directory = dict(os.environ), Path.cwd()
    handlers, level = list(logging.root.handlers), logging.root.level
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(script), __builtins__=__builtins__)
    fakes = make_modules()
    try:
        for name in modules:
            if name.partition(".")[0] == "msccl":
                del sys.modules[name]
        sys.modules.update(fakes, __main__=main)
        sys.argv = [str(script), *args]
        sys.path.insert(0, str(script.resolve().parent))
        with redirect_stdout(io.StringIO()) as printed:
            yield main, printed
    finally:
        sys.argv, sys.stderr = argv, errors
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if name not in modules and _is_of_run(module, script):
                del sys.modules[name]
        sys.modules.update(modules)
        os.chdir(directory)
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def _is_of_run(module: object, script: Path) -> bool:
    """Check whether a module that was first imported during a run must not outlive it.

    Modules beside the script belong to this run, and so do those that hold objects of this package. Others stay: a
    library's extension modules cannot be loaded twice.
    """
    if not isinstance(module, ModuleType):
        return False
    package = module.__name__.partition(".")[0]
    if package in ("msccl", "stretto"):
        return package == "msccl"
    if module.__dict__.get("__file__"):
        file = Path(module.__dict__["__file__"]).resolve()
        is_installed = any(file.is_relative_to(place) for place in _LIBRARIES)
        if file.is_relative_to(script.resolve().parent) and not is_installed:
            return True
    return any(
        isinstance(value, type | FunctionType) and (value.__module__ or "").startswith(OURS)
        for value in list(module.__dict__.values())
    )
