# SPDX-License-Identifier: Apache-2.0
"""Commands that only answer or refuse import neither torch nor Triton nor matplotlib, and say what they should.

A new interpreter imports `stretto.cli` and forks for each of the command lines of tests.cli.answers.
"""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.answers import ANSWERS, Answer, environment, plain, write_files

HEAVY = {"torch", "triton", "matplotlib", "transformers"}
SOURCE = Path(__file__).parents[2] / "src"
# What commands import of what is not heavy; none of it may import what is.
SHARED = (
    "numpy.typing",
    "pydantic.json_schema",
    "pydantic.type_adapter",
    "typer._adapters",
    "typer._click.decorators",
    "typer.rich_utils",
    "rich.markdown",
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
import functools
import stretto.cli
import typer.main
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(stretto.cli.app)  # to make it takes longer than most answers
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


def test_every_command_has_an_answer_in_the_table(answered: dict[str, Any]) -> None:
    """The words of `--help`, and of the groups' `--help`, that are commands."""
    from stretto.cli import app, bench, checkpoint, cluster, collective, pipeline, simulate

    names = {name_of(each) for each in app.registered_commands}
    groups = {
        "bench": bench,
        "checkpoint": checkpoint,
        "cluster": cluster,
        "collective": collective,
        "pipeline": pipeline,
        "simulate": simulate,
    }
    for prefix, group in groups.items():
        names |= {f"{prefix} {name_of(each)}" for each in group.registered_commands}
    asked = {" ".join(answer.arguments[:2]) for answer in ANSWERS} | {answer.arguments[0] for answer in ANSWERS}
    assert names - asked == {"cluster detect"}  # it reads the machine


def name_of(command: Any) -> str:
    return command.name or command.callback.__name__.rstrip("_").replace("_", "-")


@pytest.mark.parametrize(
    ("use", "printed"),
    [
        ("stretto.planner.plan is stretto.plan", ["True", "False"]),
        pytest.param("stretto.ops.all_gather_matmul.__name__", ["all_gather_matmul", "True"], marks=pytest.mark.long),
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
