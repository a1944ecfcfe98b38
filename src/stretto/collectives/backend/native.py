# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ classes that torch calls, once.

torch 2.11 to 2.14 have no constructor for a Python subclass of their Backend, and later versions forward only `wait`
and `get_future` of the Works that one returns, so that class has to be C++. It is compiled against the headers that
torch ships, by the compiler that torch.utils.cpp_extension would take ($CXX, or c++), into $STRETTO_CACHE (or
~/.cache/stretto), by `stretto doctor` or at first use. One process at a time compiles, and the others wait for its
lock, which the kernel releases when a process ends in any way. All that it writes is in a folder beside the library,
which is renamed into its place; the compiler ends with the process, and the next one that compiles removes the folder.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from stretto.memory import failures
from stretto.tuning.store import cache_folder

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Work


logger = logging.getLogger("stretto.collectives")


def make_backend(
    rank: int,
    size: int,
    cpu: "Backend",
    cuda: "Backend | None",
    dispatch: Callable[..., "Work | None"],
    split: Callable[..., "Backend | None"],
    milliseconds: int,
    fast: Any = None,
) -> "Backend":
    """Make the c10d backend over these inner ones: `StrettoBackend` in native/backend.hpp, with its arguments.

    fast: of `make_fast_calls`.

    CompilerError where it cannot be compiled.
    """
    module = find_extension()
    options = module.StrettoOptions(milliseconds)
    return module.StrettoBackend(rank, size, cpu, cuda, dispatch, split, options, fast or module.FastCalls())


def make_fast_calls() -> Any:
    """Make what runs repeated calls of one group without Python (native/fast_calls.hpp). CompilerError."""
    return find_extension().FastCalls()


def make_work(rank: int, operation: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor] = ()) -> Any:
    """Make a Work, to be ended by `succeed()` or `fail(error)`.

    operation: its name in profiles, which show it with the shapes of its inputs if it has any.
    """
    return find_extension().ScheduledWork(rank, operation, list(outputs), list(inputs))


def make_enqueued_work(rank: int, operation: str, outputs: Sequence[Tensor], tensors: Sequence[Tensor] = ()) -> Any:
    """Make a Work of kernels that were enqueued on the current stream: streams wait for it, the host may query it.

    tensors: the caller's tensors, if the stream is not the caller's: their memory is not used again before the kernels
    have ended, even if the caller frees it. The Work's attribute `end` has `wait`, `query` and `synchronize` as a
    torch.cuda.Event that was recorded after the kernels.
    """
    return find_extension().EnqueuedWork(rank, operation, list(outputs), list(tensors))


def profiled(operation: str, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[object]:
    """A context that profiles show as a range `stretto:operation` with these tensors' shapes, as c10d's ranges."""
    if not torch.autograd._profiler_enabled():
        return _NO_RANGE
    return find_extension().Range(f"stretto:{operation}", list(tensors))


_NO_RANGE = contextlib.nullcontext()


@functools.cache
def find_extension() -> ModuleType:
    """The compiled classes; compiles them first, if nobody has. CompilerError if that fails."""
    module = load_extension()
    failures.when_table_exists(lambda summary: module.set_failure_check(summary, failures.check))
    return module


MODULE = "stretto_c10d_backend"
_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O1", "-fPIC", "-shared", "-std=c++20", "-fvisibility=hidden")
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_WHAT = "the C++ part of the torch.distributed backend"
# The shell runs the compiler, and ends it with all that it has started when the pipe to us ends, as it does with us.
_END_WITH_US = 'exec 3<&0; { cat; kill -s KILL 0; } <&3 > /dev/null 2>&1 & exec 3<&-; "$@" < /dev/null'
_lock = threading.Lock()
_loaded: ModuleType | None = None


class CompilerError(RuntimeError):
    """The backend's C++ part could not be compiled; the message says what is missing."""


def load_extension() -> ModuleType:
    """Load the compiled module; compiles it first, as `find_library` does."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _import(find_library())
        return _loaded


def find_library() -> Path:
    """The compiled file; compiles it first, in about a minute, if none has. CompilerError if that fails."""
    library = cache_folder() / f"{MODULE}-{_key()}.so"
    if library.exists():
        return library
    compiler = _find_compiler()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _only_builder(library.parent):
            if not library.exists():  # another process may have compiled it meanwhile
                _build(compiler, library)
    except OSError as error:
        raise CompilerError(
            f"the backend stretto cannot keep its compiled part in {library.parent} ({error}): set STRETTO_CACHE to a "
            "folder that can be written"
        ) from error
    return library


@contextlib.contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into the folder, and keep others from it.

    By a lock of this process alone: unlike flock's, no process that is forked meanwhile has it too.
    """
    with (folder / f"{MODULE}.lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, as the system likes
            _say(f"process {os.getpid()} waits for another one that compiles {_WHAT} into {folder}")
            fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(f"stretto: {line}", file=sys.stderr, flush=True)


def _find_compiler() -> str:
    name = cpp_extension.get_cxx_compiler()
    found = shutil.which(name)
    if found is None:
        raise CompilerError(
            f"the backend stretto compiles a small C++ part at its first use with torch {torch.__version__}, and there "
            f"is no C++ compiler {name!r} on PATH: install g++ (10 or later) or clang, or name one by CXX; "
            "or use the backend gloo or nccl"
        )
    return found


def _build(compiler: str, library: Path) -> None:
    """Compile in a folder beside the library, and rename it once it is complete; removes what was cut off before."""
    for left in library.parent.glob(f"{MODULE}-*/"):
        shutil.rmtree(left, ignore_errors=True)
    _say(f"compiling {_WHAT} with {compiler} into {library.parent}, once: it takes a core about a minute")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{MODULE}-") as folder:
        made, said = Path(folder, library.name), Path(folder, "errors")
        command = [compiler, *_FLAGS, *_definitions(), str(_SOURCES / "bindings.cpp"), "-o", str(made)]
        command += [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
        command += [f"-L{path}" for path in cpp_extension.library_paths()]
        command += [f"-l{name}" for name in _LIBRARIES]
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
                f"the backend stretto's C++ part does not compile with {compiler} and torch {torch.__version__}: "
                + "; ".join(lines[:5])
                + " (it takes a C++20 compiler and Python's headers)"
            )
        os.replace(made, library)
    logger.info("compiled the backend's C++ part in %.0f s: %s", time.monotonic() - started, library)


def _definitions() -> list[str]:
    return [
        f"-DTORCH_EXTENSION_NAME={MODULE}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]


def _key() -> str:
    """Hash of the compiled file's dependencies: torch, Python, and the sources."""
    parts = [torch.__version__, sys.implementation.cache_tag or "", sysconfig.get_platform(), *_FLAGS]
    parts += [path.read_text(encoding="utf-8") for path in sorted(_SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _import(library: Path) -> ModuleType:
    loader = ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
