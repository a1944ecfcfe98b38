"""Compiles CUDA C++ at first use and keeps what it made on disk."""

import hashlib
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

from stretto.tuning.store import cache_folder

logger = logging.getLogger(__name__)

OPTIONS = {"std": "c++17"}


def compile_source(source: str, arch: str) -> bytes:
    """The cubin of CUDA C++ for `arch` ("sm_90a", say); needs NVRTC but no GPU.

    ImportError, which says what to install, without cuda.core or NVRTC; RuntimeError with the compiler's words.
    """
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise ImportError(f"CUDA kernels are compiled by cuda.core: pip install 'stretto[cuda]' ({error})") from error
    program = Program(source, "c++", ProgramOptions(arch=arch, **OPTIONS))
    try:
        return bytes(program.compile("cubin").code)
    finally:
        program.close()


def load_or_compile(source: str, arch: str) -> bytes:
    """The cubin, from disk if this source was compiled before; a folder that cannot be written costs a warning."""
    key = hashlib.sha256(f"{_compiler()}\n{arch}\n{OPTIONS}\n{source}".encode()).hexdigest()
    path = cache_folder() / "kernels" / f"{key}.cubin"
    try:
        return path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error.strerror or error)
    cubin = compile_source(source, arch)
    _keep(path, cubin)
    return cubin


def _keep(path: Path, cubin: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".writing", delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)  # whole or not at all: other ranks may be reading
    except OSError as error:
        logger.warning("a compiled kernel is not kept: %s: %s", path, error.strerror or error)


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"
