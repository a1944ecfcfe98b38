# SPDX-License-Identifier: Apache-2.0
"""Every code block of the README and of docs/ runs, or says why it does not."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, iterate_unexplained, read_page, run_page
from tests.pool import Pool
from tests.processes import shared_server

FOUND = {page.name: page for page in map(read_page, PAGES)}
REASONS = (
    "a fragment",
    "needs a GPU",
    "needs a checkout",
    "needs two GPUs",
    "needs several machines",
    "needs the network",
    "needs vLLM",
    "takes minutes",
)


def pythons() -> tuple[str, str]:
    """The Pythons that fork: a plain one, and one whose kernels are interpreted."""
    return shared_server("commands").python, shared_server("interpreted commands").python


def test_every_block_has_a_language_and_is_run_or_has_a_reason() -> None:
    assert [problem for page in FOUND.values() for problem in iterate_unexplained(page)] == []


def test_few_blocks_are_not_run_and_for_known_reasons() -> None:
    reasons = [block.reason for page in FOUND.values() for block in page.blocks if block.reason is not None]
    assert [reason for reason in reasons if not reason.startswith(REASONS)] == []


def test_blocks_that_are_not_run_are_python_and_import_what_is_there() -> None:
    skipped = [block for page in FOUND.values() for block in page.blocks if block.reason and block.language == "python"]
    imports = [
        node for block in skipped for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.ImportFrom)
    ]
    names = [(node.module, alias.name) for node in imports for alias in node.names]
    assert ("stretto.collectives.executor.cuda", "CudaCommunicator") in names
    assert [name for name in names if not hasattr(import_module(name[0]), name[1])] == []


@pytest.mark.parametrize("name", [name for name, page in FOUND.items() if page.runs and page.ranks == 1])
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path) -> None:
    plain, interpreting = pythons()
    python = interpreting if FOUND[name].interpreted else plain
    command = [python, "-m", "tests.pages", str(FOUND[name].path), str(tmp_path), plain, interpreting]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [name for name, page in FOUND.items() if page.runs and page.ranks > 1])
def test_the_blocks_of_a_page_run_on_ranks(name: str, tmp_path: Path, pool: Pool, interpreted_pool: Pool) -> None:
    page = FOUND[name]
    ranks = interpreted_pool if page.interpreted else pool
    counts = ranks.run(page.ranks, run_page, page.path, tmp_path, pythons(), timeout=120.0)
    assert set(counts) == {counts[0]}
    assert counts[0] > 0


def write_page(folder: Path, *lines: str) -> Path:
    path = folder / "page.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_blocks_share_a_namespace_and_a_folder(tmp_path: Path) -> None:
    page = write_page(
        tmp_path,
        *("# A page", "", "<!-- python", "import os", "-->", "", "```python", "made = os.getcwd()", "```", ""),
        *("<!-- file: words.txt -->", "```text", "tile", "```", "", "```python", "print(made)", "print(2 * 21)", "```"),
        *("", "<!-- output -->", "```text", "42", "```", "", "```sh", "grep tile words.txt > found.txt", "```"),
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    assert run_page(page, folder, (sys.executable, sys.executable)) == 4
    assert (folder / "found.txt").read_text() == "tile\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("```python", "print(1)", "```", "", "<!-- output -->", "```text", "2", "```"), "nothing printed '2'"),
        (("text", "", "```sh", "false", "true", "```"), r"page.md:4: exit status 1"),
        (("```toml", "a = = 1", "```"), "Invalid value"),
        (("```python", "assert 1 == 2, 'wrong'", "```"), "wrong"),
    ],
)
def test_a_block_that_fails_fails_its_page(lines: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        run_page(write_page(tmp_path, *lines), tmp_path, (sys.executable, sys.executable))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("```", "make test", "```"), "language is ''"),
        (("```console", "$ make test", "```"), "language is 'console'"),
        (("<!-- not run: - -->", "```sh", "make test", "```"), "say why"),
        (("<!-- output -->", "```sh", "make test", "```"), "output is text"),
    ],
)
def test_a_block_that_is_neither_run_nor_explained_is_reported(
    lines: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (problem,) = iterate_unexplained(read_page(write_page(tmp_path, *lines)))
    assert message in problem


def test_a_reason_belongs_to_the_block_right_below_it(tmp_path: Path) -> None:
    page = read_page(write_page(tmp_path, "<!-- not run: needs a GPU -->", "Text.", "", "```sh", "true", "```"))
    assert page.runs


def test_an_unknown_comment_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not ran"):
        read_page(write_page(tmp_path, "<!-- not ran: needs a GPU -->", "", "```sh", "true", "```"))
