"""The C++ part of the backend: compiled at first use, and kept in a file.

torch 2.11 to 2.14 have no constructor for a Python subclass of their Backend, so that one class has to be C++; later
ones have, with gaps (`python_backend`). It is compiled against the headers that torch brings along, by the compiler
that torch.utils.cpp_extension would take ($CXX, or c++), into $STRETTO_CACHE (or ~/.cache/stretto). One process of a
machine compiles and the others wait for its lock, which the kernel frees when a process ends, however it ends.
"""

import fcntl
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
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from stretto.tuning.store import cache_folder

logger = logging.getLogger("stretto.collectives")

MODULE = "stretto_c10d_backend"
_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-O1", "-fPIC", "-shared", "-std=c++20", "-fvisibility=hidden")
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_lock = threading.Lock()
_loaded: ModuleType | None = None


class CompilerError(RuntimeError):
    """The backend's C++ part could not be compiled; the message says what is missing."""


def load_extension() -> ModuleType:
    """The compiled module; compiles it if no process has yet, in about a minute. CompilerError where it cannot be."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _import(_find_or_build())
        return _loaded


def _find_or_build() -> Path:
    library = cache_folder() / f"{MODULE}-{_key()}.so"
    if library.exists():
        return library
    compiler = _find_compiler()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():  # another process may have made it meanwhile
                _build(compiler, library)
    except OSError as error:
        raise CompilerError(
            f"the backend stretto cannot keep its compiled part in {library.parent} ({error}): set STRETTO_CACHE to a "
            "folder that can be written"
        ) from error
    return library


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
    """Compile into a new file and give it its name once it is whole."""
    started = time.monotonic()
    logger.info("compiling the backend's C++ part with %s, which takes about a minute, once", compiler)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{MODULE}-") as folder:
        made = Path(folder, library.name)
        command = [compiler, *_FLAGS, *_definitions(), str(_SOURCES / "bindings.cpp"), "-o", str(made)]
        command += [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
        command += [f"-L{path}" for path in cpp_extension.library_paths()]
        command += [f"-l{name}" for name in _LIBRARIES]
        result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
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
    """What the compiled file depends on: torch, Python, and the sources."""
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
