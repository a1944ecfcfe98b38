# SPDX-License-Identifier: Apache-2.0
"""Finds the code blocks of the documentation's pages, and runs those of a page, one after another.

All Python blocks of a page share one namespace, and all blocks one folder, which has the repository's
examples/ and else is empty at first. A comment that readers do not see says more about the block below it:

    <!-- not run: needs two GPUs -->        the block is not run, and why
    <!-- file: ring.py -->                  the block becomes a file of the folder, and is not run
    <!-- append: ring.py -->                the block is added to a file of the folder, and is not run
    <!-- output -->                         every line of this text was printed by the block before

and these stand by themselves:

    <!-- ranks: 2 -->                       the page's Python blocks run on two ranks, with a process group
    <!-- ranks: 2, interpreted -->          the same, with Triton's interpreter
    <!-- python
    model = build_model()
    -->                                     code that runs here, but that would only distract a reader

`sh` blocks run in bash, on rank 0 alone; `stretto`, `python` and `torchrun` are functions there that call one of two
Pythons which the caller gives: one for kernels that are interpreted (TRITON_INTERPRET=1), one for all else. `toml` must
be TOML. `text` is for output and drawings.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
RUN = ("python", "sh")
KNOWN = (*RUN, "toml", "text")
PIECE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$|^<!--\s*(?P<comment>.*?)\s*-->",
    re.DOTALL | re.MULTILINE,
)
RANKS = re.compile(r"ranks: (\d+)(, interpreted)?")


@dataclass(frozen=True)
class Block:
    """A block of a page: its language, its code, the number of its first line, and the comment above it."""

    language: str
    code: str
    line: int
    mark: str = ""

    @property
    def reason(self) -> str | None:
        """Why the block is not run, or None."""
        return self.mark.removeprefix("not run:").strip() if self.mark.startswith("not run:") else None

    @property
    def file(self) -> tuple[str, str] | None:
        """The name of the file that the block becomes, or is added to, and the mode to open it with; or None."""
        kind, _, name = self.mark.partition(": ")
        return (name, {"file": "w", "append": "a"}[kind]) if kind in ("file", "append") else None


@dataclass(frozen=True)
class Page:
    """A page's blocks, and on how many ranks they run."""

    path: Path
    blocks: tuple[Block, ...]
    ranks: int = 1
    interpreted: bool = False

    @property
    def name(self) -> str:
        return os.path.relpath(self.path, ROOT)

    @property
    def runs(self) -> bool:
        """True if any block is run."""
        return any(block.language in (*RUN, "toml") and block.reason is None for block in self.blocks)


def read_page(path: Path) -> Page:
    """Find a page's blocks, hidden ones included. Raises ValueError for a comment that says nothing to this module."""
    text = path.read_text()
    blocks: list[Block] = []
    ranks, interpreted, mark, end = 1, False, "", 0
    for piece in PIECE.finditer(text):
        if text[end : piece.start()].strip():
            mark = ""
        end = piece.end()
        line = text.count("\n", 0, piece.start()) + 2
        comment = piece["comment"]
        if comment is None:
            indent = len(piece["indent"])
            code = "".join(part[indent:] if part.strip() else part for part in piece["code"].splitlines(keepends=True))
            blocks.append(Block(piece["language"], code, line, mark))
            mark = ""
        elif found := RANKS.fullmatch(comment):
            ranks, interpreted = int(found[1]), found[2] is not None
        elif comment.partition("\n")[0] in RUN:
            language, _, code = comment.partition("\n")
            blocks.append(Block(language, code + "\n", line))
        elif comment.startswith("Written by "):  # for who would edit the page
            pass
        elif comment == "output" or comment.startswith(("not run: ", "file: ", "append: ")):
            mark = comment
        else:
            raise ValueError(f"{path}:{line - 1}: <!-- {comment.splitlines()[0]} --> means nothing to tests/pages.py")
    return Page(path, tuple(blocks), ranks, interpreted)


@mock.patch.dict(os.environ)  # a block may set a variable, and the ranks of a pool go on
def run_page(path: Path, folder: Path, pythons: tuple[str, str]) -> int:
    """Run a page's blocks in `folder`, and return how many ran. pythons: for `sh` blocks, plain and interpreting.

    On ranks all call it. Raises AssertionError, or what a block raises, with the page's line in the traceback.
    """
    page = read_page(path)
    rank, barrier = _find_rank(page.ranks)
    module = types.ModuleType(f"page_{path.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    before, gradients = os.getcwd(), torch.is_grad_enabled()
    os.chdir(folder)
    if rank == 0:
        os.symlink(ROOT / "examples", "examples")
    barrier()
    printed, count = "", 0
    try:
        for block in page.blocks:
            if block.language == "toml":
                tomllib.loads(block.code)
            if block.file is not None and rank == 0:
                name, mode = block.file
                with open(name, mode) as file:
                    file.write(block.code)
            elif block.mark == "output" and rank == 0:
                for line in filter(None, map(str.strip, block.code.splitlines())):
                    assert line in printed, f"{page.name}:{block.line}: nothing printed {line!r}, but\n{printed}"
            elif block.language in RUN and block.reason is None and block.file is None:
                if block.language == "python":
                    printed = _run_python(block, path, module)
                elif rank == 0:
                    printed = _run_shell(block, page, pythons)
                count += 1
            barrier()
    finally:
        os.chdir(before)
        torch.set_grad_enabled(gradients)
        del sys.modules[module.__name__]
    return count


def _find_rank(ranks: int) -> tuple[int, Callable[[], object]]:
    """This process's rank, and a barrier of all."""
    if ranks == 1:
        return 0, lambda: None
    import torch.distributed as dist

    assert dist.get_world_size() == ranks
    return dist.get_rank(), dist.barrier


def _run_python(block: Block, path: Path, module: types.ModuleType) -> str:
    """Run the block, whose lines have the page's numbers (inspect and Triton read the source from the page)."""
    code = compile("\n" * (block.line - 1) + block.code, str(path), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, vars(module))
    return output.getvalue()


def _run_shell(block: Block, page: Page, pythons: tuple[str, str]) -> str:
    """Run the block in bash, which ends at the first command that fails."""
    plain, interpreting = map(shlex.quote, pythons)
    functions = (
        f'python() {{ if [ "${{TRITON_INTERPRET:-}}" = 1 ]; then {interpreting} "$@"; else {plain} "$@"; fi; }}\n'
    )
    functions += 'stretto() { python -m stretto "$@"; }\ntorchrun() { python -m torch.distributed.run "$@"; }\n'
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", functions + block.code],
        env=variables | {"COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}:{block.line}: exit status {done.returncode}\n{done.stdout}"
    return done.stdout


def iterate_unexplained(page: Page) -> Iterator[str]:
    """Return what is wrong with a page's blocks: no known language, no reason, or nothing that could check it."""
    for block in page.blocks:
        place = f"{page.name}:{block.line}"
        if block.language not in KNOWN:
            yield f"{place}: the block's language is {block.language!r}: {', '.join(KNOWN)} will do"
        if block.reason is not None and len(block.reason) < 5:
            yield f"{place}: say why the block is not run"
        if block.mark == "output" and block.language != "text":
            yield f"{place}: output is text"


if __name__ == "__main__":
    run_page(Path(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3], sys.argv[4]))
