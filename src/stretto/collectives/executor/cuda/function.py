"""A compiled kernel and its parameters."""

import ctypes
from typing import Protocol

import torch


class Launchable(Protocol):
    """What a kernel is to those that launch it: parameters of 8 bytes by name, and launches."""

    def set(self, name: str, value: int) -> None:
        """Set a parameter for the launches from now on."""

    def launch(self, blocks: int, threads: int, *, is_cooperative: bool = False, stream: int | None = None) -> None:
        """Launch it on the stream of that handle, or else the current one.

        is_cooperative: all blocks are resident at once, or it is refused.
        """


class LaunchError(RuntimeError):
    """CUDA refused a launch: nothing ran."""


class Function:
    """A kernel whose parameters, all of 8 bytes, are kept between launches: only what changes is written."""

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

    def set(self, name: str, value: int) -> None:
        """Set a parameter for the launches from now on."""
        self._values[self._at[name]] = value

    def launch(self, blocks: int, threads: int, *, is_cooperative: bool = False, stream: int | None = None) -> None:
        """See `Launchable`. LaunchError with CUDA's words."""
        if stream is None:
            stream = torch._C._cuda_getCurrentRawStream(self._device)
        if is_cooperative:
            result = self._launch_cooperative(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, self._parameters)
        else:
            result = self._launch(self._handle, blocks, 1, 1, threads, 1, 1, 0, stream, self._parameters, None)
        if result != 0:
            raise LaunchError(f"a kernel of {blocks} blocks of {threads} threads was not launched: {_describe(result)}")


def _describe(result: int) -> str:
    """CUDA's words for an error."""
    from cuda.bindings import driver

    known, text = driver.cuGetErrorString(driver.CUresult(result))
    return text.decode() if known == driver.CUresult.CUDA_SUCCESS else f"error {result}"
