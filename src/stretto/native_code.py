# SPDX-License-Identifier: Apache-2.0
"""Compiles C++ into the cache, once, at first use: whoever asks for it, and whatever is cut off.

One process at a time compiles, and the others wait for its lock, which the kernel releases when a process ends in any
way. All that it writes is in a folder beside the library, which is renamed into its place; the compiler ends with the
process, and the next one that compiles removes the folder. Needs no torch.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "STRETTO_CACHE"

logger = logging.getLogger("stretto")

# The shell runs the compiler, and ends it with all that it has started when the pipe to us ends, as it does with us.
_END_WITH_US = 'exec 3<&0; { cat; kill -s KILL 0; } <&3 > /dev/null 2>&1 & exec 3<&-; "$@" < /dev/null'


class CompilerError(RuntimeError):
    """C++ code could not be compiled; the message says what is missing."""


def cache_folder() -> Path:
    """Return the folder of what can be measured, compiled or computed again: $STRETTO_CACHE, or ~/.cache/stretto."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stretto"


@dataclass(frozen=True)
class NativeLibrary:
    """C++ that is compiled into one shared library.

    name: of the file; main: the source that is compiled, which lies in a folder with all that it includes; arguments:
    of the compiler; key: on what the library depends besides sources and arguments. For messages: owner, what needs
    it; what: what is compiled; seconds: how long it takes; needs: what the compiler must have; instead: what to use
    without it. paths: further arguments, of where things lie here that the key names, wherever they lie.
    """

    name: str
    main: Path
    arguments: Sequence[str]
    key: Sequence[str]
    owner: str
    what: str
    seconds: str
    needs: str
    instead: str
    paths: Sequence[str] = ()

    def find(self) -> Path:
        """The compiled file; compiles it first, if no process has. CompilerError if that fails."""
        library = cache_folder() / f"{self.name}-{self._hash()}.so"
        if library.exists():
            return library
        compiler = self._find_compiler()
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with self._only_builder(library.parent):
                if not library.exists():  # another process may have compiled it meanwhile
                    self._build(compiler, library)
        except OSError as error:
            raise CompilerError(
                f"{self.owner} cannot keep its compiled part in {library.parent} ({error}): set {FOLDER_VARIABLE} to a "
                "folder that can be written"
            ) from error
        return library

    def _hash(self) -> str:
        parts = [*self.key, *self.arguments]
        parts += [path.read_text(encoding="utf-8") for path in sorted(self.main.parent.iterdir())]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def _find_compiler(self) -> str:
        name = os.environ.get("CXX", "c++")
        found = shutil.which(name)
        if found is None:
            raise CompilerError(
                f"{self.owner} compiles a small C++ part at its first use, and there is no C++ compiler {name!r} on "
                f"PATH: install g++ (10 or later) or clang, or name one by CXX; {self.instead}"
            )
        return found

    @contextlib.contextmanager
    def _only_builder(self, folder: Path) -> Iterator[None]:
        """Wait until no other process compiles it into the folder, and keep others from it.

        By a lock of this process alone: unlike flock's, no process that is forked meanwhile has it too.
        """
        with (folder / f"{self.name}.lock").open("w") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as the system likes
                _say(f"process {os.getpid()} waits for another one that compiles {self.what} into {folder}")
                fcntl.lockf(file, fcntl.LOCK_EX)
            yield

    def _build(self, compiler: str, library: Path) -> None:
        """Compile in a folder beside the library, and rename it once it is complete; removes what was cut off."""
        for left in library.parent.glob(f"{self.name}-*/"):
            shutil.rmtree(left, ignore_errors=True)
        _say(f"compiling {self.what} with {compiler} into {library.parent}, once: it takes a core about {self.seconds}")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{self.name}-") as folder:
            made, said = Path(folder, library.name), Path(folder, "errors")
            command = [compiler, str(self.main), "-o", str(made), *self.arguments, *self.paths]
            with (
                said.open("w") as errors,
                subprocess.Popen(
                    ["/bin/sh", "-c", _END_WITH_US, "sh", *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=os.environ | {"TMPDIR": folder},
                    start_new_session=True,
                ) as process,
            ):
                status = process.wait()
            if status != 0:
                output = said.read_text(errors="replace").splitlines()
                lines = [line for line in output if "error" in line] or output
                raise CompilerError(
                    f"{self.owner}'s C++ part does not compile with {compiler}: {'; '.join(lines[:5])} (it takes "
                    f"{self.needs})"
                )
            os.replace(made, library)
        logger.info("compiled %s in %.0f s: %s", self.what, time.monotonic() - started, library)


def _say(line: str) -> None:
    print(f"stretto: {line}", file=sys.stderr, flush=True)
