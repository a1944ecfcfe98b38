# SPDX-License-Identifier: Apache-2.0
"""Compiles CUDA C++ with NVRTC at first use, caches the cubins on disk, and loads and launches the kernels."""

import ctypes
import hashlib
import logging
from functools import cache
from pathlib import Path

import torch

from stretto.atomic_files import write_atomically
from stretto.native_code import cache_folder

logger = logging.getLogger(__name__)

OPTIONS = {"std": "c++17"}


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


def compile_source(source: str, arch: str) -> bytes:
    """The cubin of CUDA C++ for `arch` ("sm_90a", say); needs NVRTC but no GPU.

    Raises ImportError, which says what to install, without cuda.core or NVRTC, and RuntimeError with the compiler's
    message.
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


def _keep(path: Path, cubin: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, cubin)  # other ranks may be reading
    except OSError as error:
        logger.warning("a compiled kernel is not kept: %s: %s", path, error.strerror or error)


@cache
def _compiler() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"nvrtc {major}.{minor}"


class LaunchError(RuntimeError):
    """CUDA refused a launch: nothing ran."""


class Function:
    """A loaded kernel. It keeps its parameters, all of 8 bytes, between launches: a call writes only what changes."""

    def __init__(self, cubin: bytes, names: list[str], entry: str = "run") -> None:
        from cuda.core import Device, ObjectCode

        Device(torch.cuda.current_device()).set_current()
        self._code = ObjectCode.from_cubin(cubin)
        self._kernel = self._code.get_kernel(entry)
        self._handle = int(self._kernel.handle)
        self._device = torch.cuda.current_device()
        # By ctypes: a launch through cuda.bindings takes the host three times as long.
        driver = ctypes.CDLL("libcuda.so.1")
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        self._launch, self._launch_cooperative = driver.cuLaunchKernel, driver.cuLaunchCooperativeKernel
        self._launch.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        self._launch_cooperative.argtypes = [pointer, *[number] * 7, pointer, pointer]
        self._at = {name: index for index, name in enumerate(names)}
        self._values = (ctypes.c_uint64 * len(names))()
        addresses = [ctypes.addressof(self._values) + 8 * index for index in range(len(names))]
        self._pointers = (ctypes.c_void_p * len(names))(*addresses)
        self._parameters = ctypes.addressof(self._pointers)

    @property
    def handle(self) -> int:
        return self._handle

    def parameters(self) -> tuple[int, ...]:
        """The values of all parameters, in order, for the next launch."""
        return tuple(self._values)

    def place(self, name: str) -> int:
        """Return a parameter's place among all."""
        return self._at[name]

    def set(self, name: str, value: int) -> None:
        self._values[self._at[name]] = value

    def launch(self, blocks: int, threads: int, *, is_cooperative: bool = False, stream: int | None = None) -> None:
        """Launch on the stream of that handle, or else on the current one. Raises LaunchError with CUDA's message.

        is_cooperative: all blocks are co-resident, or the launch fails.
        """
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
        if is_cooperative:
            result = self._launch_cooperative(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, self._parameters)
        else:
            result = self._launch(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, self._parameters, None)
        if result != 0:
            raise LaunchError(f"a kernel of {blocks} blocks of {threads} threads was not launched: {_describe(result)}")


def launch_addresses() -> tuple[int, int]:
    """The addresses of the driver's cuLaunchKernel and cuStreamIsCapturing."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = (ctypes.cast(each, ctypes.c_void_p).value for each in (driver.cuLaunchKernel, driver.cuStreamIsCapturing))
    launch, is_capturing = found
    assert launch is not None
    assert is_capturing is not None
    return launch, is_capturing


def _describe(result: int) -> str:
    """CUDA's message for an error."""
    from cuda.bindings import driver

    known, text = driver.cuGetErrorString(driver.CUresult(result))
    return text.decode() if known == driver.CUresult.CUDA_SUCCESS else f"error {result}"
