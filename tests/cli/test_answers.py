# SPDX-License-Identifier: Apache-2.0
"""Commands that only answer or refuse import neither torch nor Triton nor matplotlib, and say what they should.

A new interpreter imports `stretto.cli` and forks for each of the command lines of tests.cli.answers, and, with nothing
more imported, for each command of the tree.
"""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.answers import ANSWERS, Answer, environment, plain, walk_commands, write_files

HEAVY = {"torch", "triton", "matplotlib", "transformers"}
UNUSED = HEAVY | {"numpy", "rich", "networkx", "safetensors", "tokenizers"}  # typer itself imports pydantic
# Commands whose options another command has too.
SHARES = {"collective": {"simulate"}, "export": {"checkpoint"}, "simulate": {"plan"}}
SOURCE = Path(__file__).parents[2] / "src"
# What commands import of what is not heavy; none of it may import what is.
SHARED = (
    "numpy.typing",
    "pydantic.json_schema",
    "pydantic.type_adapter",
    "typer._adapters",
    "typer._click.decorators",
    "rich.table",
    "email.message",
    "importlib.readers",
    "concurrent.futures.thread",
    "defusedxml.ElementTree",
    "stretto.cli",
    "stretto.collectives.algorithms",
    "stretto.planner.search",
    "stretto.planner.experts.search",
    "stretto.planner.pipeline.search",
    "stretto.simulator.collectives",
    "stretto.simulator.graph",
    "stretto.simulator.network",
    "stretto.train.checkpoint.torch_format",
    "stretto.train.config",
)

FORK = """
import json, os, sys
from importlib import import_module
for name in {shared!r}:  # once, not in each fork
    import_module(name)
import gc
gc.freeze()
import stretto.cli
from pathlib import Path

heavy = set({heavy!r})
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
for number, arguments in enumerate({commands!r}):
    pid = os.fork()
    if pid == 0:
        output = open(f"output-{{number}}", "wb")
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.argv[1:] = arguments
        status = 0
        try:
            stretto.cli.main()
        except SystemExit as end:
            status = end.code or 0
        sys.stdout.flush()
        Path(f"imported-{{number}}").write_text(json.dumps([status, sorted(heavy & sys.modules.keys())]))
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str], str]]:
    """Of each command line its exit status, what it imported of HEAVY, and its output.

    pytest's processes share the commands' output: the first of them runs all commands while the others wait.
    """
    is_shared = "PYTEST_XDIST_WORKER" in os.environ
    folder = tmp_path_factory.getbasetemp() / (".." if is_shared else "") / "answers"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            write_files(folder)
            program = FORK.format(heavy=sorted(HEAVY), shared=SHARED, commands=[answer.arguments for answer in ANSWERS])
            variables = environment(SOURCE) | {"STRETTO_CACHE": str(folder / "cache")}
            command = [sys.executable, "-c", program]
            subprocess.run(command, cwd=folder, env=variables, check=True, stdin=subprocess.DEVNULL)
            (folder / "done").touch()
    found: dict[str, tuple[int, list[str], str]] = {}
    for number, answer in enumerate(ANSWERS):
        status, imported = json.loads((folder / f"imported-{number}").read_text())
        output = (folder / f"output-{number}").read_text(errors="replace")
        found[answer.command] = status, imported, plain(output)
    return found


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.command)
def test_an_answer_needs_no_heavy_imports(answered: dict[str, Any], answer: Answer) -> None:
    status, imported, output = answered[answer.command]
    assert (status, answer.words in output) == (answer.status, True), output
    assert imported == []
    assert "Traceback" not in output


def test_every_command_has_an_answer_in_the_table() -> None:
    """The words of `--help`, and of the groups' `--help`, that are commands."""
    asked = {" ".join(answer.arguments[:2]) for answer in ANSWERS} | {answer.arguments[0] for answer in ANSWERS}
    assert walk_commands().keys() - asked == {"cluster detect"}  # it reads the machine


REFUSE = """
import contextlib, gc, io, json, os, sys
import stretto.cli
import typer._adapters  # imports pydantic, as typer does for each command: once, not in each fork
gc.freeze()

def answer(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
        sys.argv[1:] = arguments
        try:
            stretto.cli.main()
        except SystemExit as end:
            return end.code, output.getvalue()

for command in {commands!r}:
    if os.fork() == 0:
        status, refusal = answer(*command.split(), "--no-such-option")
        assert (status, "no-such-option" in refusal) == (2, True), (command, refusal)
        status, text = answer(*command.split(), "--help")
        assert (status, text.startswith("Usage: ")) == (0, True), (command, text)
        print(json.dumps([command, sorted(sys.modules)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, command
"""


def test_help_and_an_unknown_option_import_the_command_alone() -> None:
    """Neither libraries, nor benches but the command's own settings, nor modules of other commands."""
    commands = walk_commands()
    done = subprocess.run(
        [sys.executable, "-c", REFUSE.format(commands=["", *commands])],
        env=environment(SOURCE),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    imported = {command: set(modules) for command, modules in map(json.loads, done.stdout.splitlines())}
    assert imported.keys() == {"", *commands}
    names = {command.partition(" ")[0] for command in commands}
    for command, modules in imported.items():
        name = command.partition(" ")[0]
        others = {f"stretto.cli.{each}" for each in names - {name} - SHARES.get(name, set())}
        benches = {each.split(".")[2] for each in modules if each.startswith("stretto.bench.")} - {"settings", "mps"}
        assert not UNUSED & modules, command
        assert command == "" or not others & modules, command  # `stretto --help` shows the first line of each
        assert not benches or name in ("bench", "tune"), command
        assert len(benches) < 2, command


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("stretto pl", ["plan"]), ("stretto bench coll", ["collectives"]), ("stretto plan --vi", ["--virtual-stages"])],
)
def test_completion_imports_no_library(typed: str, completed: list[str]) -> None:
    program = (
        "import atexit, sys, stretto.cli; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
        "stretto.cli.main()"
    )
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_STRETTO_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(SOURCE) | words, capture_output=True, text=True)
    assert done.stdout.split() == completed
    assert not UNUSED & set(done.stderr.split())


@pytest.mark.parametrize(
    ("use", "printed"),
    [
        ("stretto.planner.plan is stretto.plan", ["True", "False"]),
        pytest.param(
            "stretto.ops.all_gather_matmul.__name__", ["all_gather_matmul", "True"], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_importing_stretto_imports_nothing_heavy_and_finds_submodules_on_first_use(
    use: str, printed: list[str]
) -> None:
    program = (
        "import sys, stretto; names = dir(stretto); "
        f"assert not {HEAVY!r} & sys.modules.keys(); assert 'numpy' not in sys.modules; "
        f"print({use}, 'torch' in sys.modules, 'ops' in names, 'Grid' in names)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
    )
    assert done.stdout.split() == [*printed, "True", "True"], done.stderr
