# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ classes that torch calls, once.

torch 2.11 to 2.14 have no constructor for a Python subclass of their Backend, and later versions forward only `wait`
and `get_future` of the Works that one returns, so that class has to be C++. It is compiled against the headers that
torch ships, by `stretto.native_code`, by `stretto doctor` or at first use.
"""

import contextlib
import functools
import importlib.util
import sysconfig
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from stretto.memory import failures
from stretto.native_code import CompilerError, NativeLibrary

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Work


__all__ = ["CompilerError", "find_extension", "find_library", "load_extension", "make_backend"]


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

    fast: a FastCalls, which runs repeated calls without Python (native/fast_calls.hpp); None: one that nobody fills.
    CompilerError where it cannot be compiled.
    """
    module = find_extension()
    options = module.StrettoOptions(milliseconds)
    return module.StrettoBackend(rank, size, cpu, cuda, dispatch, split, options, fast or module.FastCalls())


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
_DEFINED = (f"-DTORCH_EXTENSION_NAME={MODULE}", "-DTORCH_API_INCLUDE_EXTENSION_H")
_FLAGS = ("-O1", "-fPIC", "-shared", "-std=c++20", "-fvisibility=hidden", *_DEFINED)
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_lock = threading.Lock()
_loaded: ModuleType | None = None


def load_extension() -> ModuleType:
    """Load the compiled module; compiles it first, as `find_library` does."""
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _import(find_library())
        return _loaded


def find_library() -> Path:
    """The compiled file; compiles it first, in about a minute, if none has. CompilerError if that fails."""
    return NativeLibrary(
        name=MODULE,
        main=Path(__file__).parent / "native" / "bindings.cpp",
        arguments=(*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"),
        key=(torch.__version__, str(torch.version.git_version), str(sysconfig.get_config_var("EXT_SUFFIX"))),
        paths=_paths(),
        owner="the backend stretto",
        what="the C++ part of the torch.distributed backend",
        seconds="a minute",
        needs=f"a C++20 compiler, Python's headers and those of torch {torch.__version__}",
        instead="or use the backend gloo or nccl",
    ).find()


def _paths() -> list[str]:
    folders = (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])
    return [
        *(f"-isystem{folder}" for folder in folders),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *(f"-l{name}" for name in _LIBRARIES),
    ]


def _import(library: Path) -> ModuleType:
    loader = ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
