# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels: with fixed options, and again without Triton's inspection of every argument.

Nor are TMA descriptors encoded again at every launch, which Triton does: 3.5 us of the 15.8 us that a host took to
launch a kernel with three (H200, Triton 3.6). The encoding depends on the matrix's address, shape and strides, and on
how the descriptor pads and rounds; everything else belongs to the compiled kernel.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache, lru_cache
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from triton import JITFunction, knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto.memory.compilation import note_loaded_kernel

_MAX_KEPT = 1024
_MAX_REMEMBERED = 256
_MAX_DESCRIPTORS = 256  # of one parameter
_LAUNCHER_NAMES = {"launcher", "tensordesc_indices", "tensordesc_meta"}
_ALIGNMENT = 16  # bytes, and what Triton has numbers be multiples of

# Triton may round a * b + c once (fma) or twice. By default, which an environment variable can change, it rounds once,
# and 3.9 warns that a later version will round twice. Fixed here, so that results keep their bits with every version.
FIXED_OPTIONS = {"enable_fp_fusion": True}


_launch = threading.local()  # on_load: of the launch that this thread is in
_other_listener = knobs.compilation.listener


def _hear_of_loading(**described: Any) -> None:
    """Triton calls this when it has compiled a kernel, or read it from its cache, and before it launches it."""
    note_loaded_kernel()
    if (on_load := getattr(_launch, "on_load", None)) is not None:
        on_load()
    if _other_listener is not None:
        _other_listener(**described)


knobs.compilation.listener = _hear_of_loading


def launch_kernel(
    kernel: Any, programs: int, *arguments: Any, on_load: Callable[[], None] | None = None, **options: Any
) -> Any:
    """Launch a kernel on so many programs, as kernel[programs,](*arguments, **options) does, with `FIXED_OPTIONS`.

    on_load: called before the launch if Triton has just compiled the kernel, or read it from its cache on disk. Returns
    the compiled kernel, None if it is interpreted. All kernels of the library are launched here.
    """
    _launch.on_load = on_load
    try:
        return kernel[(programs,)](*arguments, **(FIXED_OPTIONS | options))
    finally:
        _launch.on_load = None


@lru_cache
def count_shared_bytes(device: Any) -> int:
    """The shared memory that a block may have on a torch.device; without end where kernels are interpreted."""
    if device.type == "cpu":
        return 1 << 40
    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


class Launches:
    """Launches kernels on one device and remembers the compiled kernel of each key.

    Triton inspects every argument of every launch to find the kernel that was compiled for their kinds. With the many
    arguments of these kernels that costs the host 10 to 30 microseconds; a remembered launch costs 1 or 2. on_load: as
    in `launch_kernel`.
    """

    def __init__(self, on_load: Callable[[], None] | None = None) -> None:
        self._on_load = on_load
        self._known: dict[Hashable, tuple[Any, object]] = {}
        self._addresses: dict[int, tuple[Any, Any]] = {}  # by an argument's id: it, and what a launch passes for it

    def __call__(
        self,
        kernel: Any,
        key: Hashable,
        programs: int,
        arguments: tuple[Any, ...],
        *,
        kept: object = None,
        **options: int,
    ) -> None:
        """Launch a kernel on so many programs.

        key: everything that Triton compiles the kernel for, since it is not inspected the second time: sizes, dtypes,
        what is None, constants, and `kind_of` each pointer and number that changes. arguments: one for each parameter,
        in order, constants as well. kept: objects whose id is in the key. options: num_warps, num_stages and others,
        beside `FIXED_OPTIONS`.
        """
        known = self._known.get((id(kernel), key))
        if known is not None:
            compiled, _ = known
            remembered = self._addresses
            given = [remembered[id(argument)][1] if id(argument) in remembered else argument for argument in arguments]
            launch_compiled(compiled, programs, given)
            return
        compiled = launch_kernel(kernel, programs, *arguments, on_load=self._on_load, **options)
        if compiled is not None:  # an interpreted kernel is not compiled
            if len(self._known) == _MAX_KEPT:
                self._known.clear()
            remember_descriptors(compiled)
            # Keep the kernel alive, too: another object could get the id of one that is freed.
            self._known[id(kernel), key] = compiled, (kernel, kept)

    def remember(self, argument: Any) -> None:
        """Cache the launch arguments of this object, a tuple whose tensors keep their addresses."""
        if len(self._addresses) == _MAX_REMEMBERED:
            self._addresses.clear()
        self._addresses[id(argument)] = argument, pass_addresses(argument)

    def knows(self, kernel: Any, key: Hashable) -> bool:
        """Return whether this kernel and key have been launched before."""
        return (id(kernel), key) in self._known

    def clear(self) -> None:
        """Forget all launches."""
        self._known.clear()
        self._addresses.clear()


@cache
def find_launches(device: Hashable) -> Launches:
    """Return what remembers the launches of kernels without a channel on a torch.device, or on that GPU by number."""
    return Launches()


def launch_cached(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch as `launch_kernel` on the current device, but fast where arguments of the same kinds were launched before.

    For kernels whose arguments are tensors, numbers, None and tuples of these, and which a training step launches
    often: a launch by Triton takes the host 20 to 150 microseconds, and one by this function a fraction of that.
    """
    if not isinstance(kernel, JITFunction):  # it is interpreted
        launch_kernel(kernel, programs, *arguments, **options)
        return
    names, is_constant = _parameters_of(kernel)
    arguments += tuple([options.pop(name) for name in names[len(arguments) :]])
    kinds = [
        argument if constant else kind_of(argument) for argument, constant in zip(arguments, is_constant, strict=True)
    ]
    launches = find_launches(driver.active.get_current_device())
    launches(kernel, (*kinds, *options.items()), programs, arguments, **options)


@lru_cache(maxsize=256)
def _parameters_of(kernel: Any) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """A kernel's parameters: their names, and which are constants that it is compiled for."""
    return tuple(one.name for one in kernel.params), tuple(one.is_constexpr for one in kernel.params)


def pass_addresses(argument: Any) -> Any:
    """Replace tensors by their addresses, in tuples as well, for a kernel that is compiled.

    For each tensor of a launch Triton calls a method by its name, and asks CUDA whether the GPU can read there, which
    takes the host 0.3 us together, as long as this function: it pays where its result is used again.
    """
    kind = type(argument)
    if kind is Tensor or kind is Parameter:
        return argument.data_ptr()
    if isinstance(argument, tuple):
        return tuple([pass_addresses(part) for part in argument])
    return argument


def launch_compiled(compiled: Any, programs: int, arguments: Sequence[Any]) -> None:
    """Launch a compiled kernel on the current stream; without hooks, skip what Triton gathers for them."""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if getattr(before, "calls", before) or getattr(after, "calls", after):
        compiled[(programs, 1, 1)](*arguments)
        return
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)


def kind_of(argument: Tensor | TensorDescriptor | tuple[Any, ...] | float | None) -> Hashable:
    """Return the properties of an argument that Triton compiles a kernel for, as a part of a launch's key."""
    if type(argument) is Tensor:  # most are, so test it first, and without isinstance, which calls into torch
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if isinstance(argument, float):
        return float
    if argument is None or isinstance(argument, bool):
        return argument
    if isinstance(argument, int):
        bits = 32 if -(1 << 31) <= argument < 1 << 31 else 63 if argument < 1 << 63 else 64
        return argument == 1, argument % _ALIGNMENT == 0, bits
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, tuple):
        return tuple(map(kind_of, argument))
    return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0


def remember_descriptors(compiled: Any) -> None:
    """Make a compiled kernel's launches encode each descriptor once; kernels without descriptors are not changed.

    This replaces the closure that Triton's `wrap_handle_tensordesc` made, by means of the closure's own cells. Where a
    version of Triton has another launcher, as 3.8 does, nothing changes.
    """
    run = getattr(compiled, "run", None)
    wrapped = getattr(run, "launch", None)
    if run is None or wrapped is None or not knows_launcher(wrapped):
        return
    cells = (cell.cell_contents for cell in wrapped.__closure__)
    known = dict(zip(wrapped.__code__.co_freevars, cells, strict=True))
    make = wrapped.__globals__.get("make_tensordesc_arg")
    metas, positions = known["tensordesc_meta"], sorted(known["tensordesc_indices"])
    if make is None or len(metas) != len(positions):
        return
    # Up to 3.6, the kernel's arguments follow this many others; later versions pass them as one tuple at the end.
    before = wrapped.__globals__.get("_BASE_ARGS_FORMAT_LEN")
    places = [
        (position + (before or 0), _Descriptors(make, meta)) for position, meta in zip(positions, metas, strict=True)
    ]
    places.reverse()  # replacing one moves those after it
    launcher = known["launcher"]

    def spread(arguments: Any) -> list[Any]:
        given = list(arguments)
        for place, descriptors in places:
            given[place : place + 1] = descriptors.find(given[place])
        return given

    if before is None:
        run.launch = lambda *arguments: launcher(*arguments[:-1], spread(arguments[-1]))
    else:
        run.launch = lambda *arguments: launcher(*spread(arguments))


def knows_launcher(launch: Any) -> bool:
    """Return whether a kernel's launch is the closure that `remember_descriptors` replaces (up to Triton 3.7)."""
    return set(getattr(getattr(launch, "__code__", None), "co_freevars", ())) == _LAUNCHER_NAMES


class _Descriptors:
    """The encoded descriptors of one kernel parameter, by what they encode."""

    def __init__(self, make: Any, meta: Any) -> None:
        self._make, self._meta = make, meta
        self._known: dict[Hashable, list[Any]] = {}

    def find(self, matrix: Any) -> list[Any]:
        if self._meta is None:  # the launcher takes the tensor itself and may use its address only while it is alive
            return list(self._make(matrix, None))
        rounds = getattr(matrix, "round_f32_to_tf32", False)  # since 3.7
        key = matrix.base.data_ptr(), tuple(matrix.shape), tuple(matrix.strides), matrix.padding, rounds
        made = self._known.get(key)
        if made is None:
            if len(self._known) == _MAX_DESCRIPTORS:
                self._known.clear()
            made = self._known[key] = list(self._make(matrix, self._meta))
        return made
