# SPDX-License-Identifier: Apache-2.0
"""Patches to Triton's interpreter, so that it runs kernels whose programs and processes wait for each other.

With TRITON_INTERPRET=1, `@triton.jit` makes functions that Triton runs on NumPy arrays, with real atomics on real
memory, so that processes which share memory run the kernels that GPUs run. Stock Triton (3.6 to 3.9) needs six changes
for that, which `install` makes:

- Stock Triton runs the programs of a launch one after another, so a program that waits for a later one never ends. Here
  a program that polls a word yields to the others (`_InterpretedLaunch`).
- Stock Triton holds bf16 as 16-bit integers, and computes sums, products and conversions of those integers. Here they
  are computed in fp32 and rounded to the nearest, ties to even, after each operation.
- Stock Triton makes -64 of -126.57 in fp8 (e4m3), where it should be -128. Here fp32 is converted by torch.
- Stock Triton patches all of triton.language at every call of a device function. Here it is patched once a launch.
- `range` over a scalar fails with Triton 3.6 and NumPy 2.4. Here every scalar is an index.
- Stock Triton gives a comparison's result the dtype of what was compared, so a broadcast makes it int32, which 3.9 no
  longer takes for a mask. Here it is int1.

Integers wrap around, as in compiled kernels (the check for overflow took half of the time), and `tl.device_assert`
checks.

The patches change classes of Triton's interpreter for all kernels of the process, since nothing smaller reaches a
kernel's own `tl.sum`. They apply only where TRITON_INTERPRET is set; compiled kernels are untouched. The private names
of `triton.runtime.interpreter` are used only here.
"""

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from stretto.memory import Backoff, PeerError

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle
_LOOKS = 64  # a program yields at the latest after this many reads of words, even of different ones
_installed = False


def install() -> None:
    """Patch Triton's interpreter in this process; a second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _compute_bf16_in_fp32()
    _compare_to_int1()
    _run_programs_concurrently()
    _patch_language_once()
    _accept_any_scalar_as_index()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)


class _Abandoned(BaseException):
    """Raised in a program of a launch in which another program has failed, to end it."""


class _Program(threading.local):
    """The program that this thread runs, if any."""

    launch: "_InterpretedLaunch | None" = None
    index: tuple[int, int, int] = (0, 0, 0)
    looked_at: tuple[int, int] = (0, 0)
    looks: int = 0
    backoff: Backoff


_program = _Program()


class _InterpretedLaunch:
    """The programs of one launch, as cooperative threads: one runs at a time, and a waiting one passes the baton.

    A kernel without waits runs in one thread, as fast as before; there are only as many threads as programs wait at
    once. A program counts as waiting when it reads the same word again, or two words in turn: by a volatile load, an
    atomic addition of 0, or a compare-and-swap that did not swap.
    """

    def __init__(self, function: Callable[..., None], arguments: dict[str, Any], grid: tuple[int, int, int]) -> None:
        self.grid = grid
        self._run = lambda: function(**arguments)
        self._left = deque((x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2]))
        self._baton = threading.Lock()
        self._helpers: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._failed: tuple[int, int, int] = (0, 0, 0)

    def run(self) -> None:
        """Run all programs; raises the error of the first program that fails."""
        try:
            self._work()
            for helper in self._helpers:  # the list grows during the loop: each helper may have started another
                helper.join()
        except BaseException as error:
            self._error = self._error or error
            raise
        if isinstance(self._error, PeerError):
            raise self._error
        if self._error is not None:
            raise interpreter.InterpreterError(f"program {self._failed}: {self._error!r}") from self._error

    def _work(self) -> None:
        """Run programs until none is left to begin."""
        with self._baton:
            while self._left and self._error is None:
                _program.launch, _program.index = self, self._left.popleft()
                _program.looked_at, _program.looks = (0, 0), 0
                _program.backoff = Backoff()
                try:
                    self._run()
                except BaseException as error:  # noqa: BLE001  (it is raised again where the kernel was launched)
                    if self._error is None:
                        self._error, self._failed = error, _program.index
                finally:
                    _program.launch = None

    def look(self, address: int) -> None:
        """Note that the running program has read a word, perhaps in vain, and yield if it seems to wait."""
        last, before = _program.looked_at
        again = address in (last, before)
        _program.looks += 1
        if not again:
            _program.backoff.reset()
        if address != last:
            _program.looked_at = address, last
        if again or _program.looks % _LOOKS == 0:
            self._yield_turn()

    def _yield_turn(self) -> None:
        if self._left:
            self._helpers.append(threading.Thread(target=self._work, daemon=True))
            self._helpers[-1].start()
        self._baton.release()
        try:
            _program.backoff.pause()
        finally:
            self._baton.acquire()
        if self._error is not None:
            raise _Abandoned


def _run_programs_concurrently() -> None:
    stock_cas, stock_rmw = _Builder.create_atomic_cas, _Builder.create_atomic_rmw
    stock_load = _Builder.create_masked_load

    def create_get_program_id(self: Any, axis: int) -> Any:
        return _Handle(np.array([_program.index[axis]], dtype=np.int32), tl.int32)

    def create_get_num_programs(self: Any, axis: int) -> Any:
        assert _program.launch is not None
        return _Handle(np.array([_program.launch.grid[axis]], dtype=np.int32), tl.int32)

    def create_atomic_cas(self: Any, pointer: Any, compare: Any, value: Any, *order: Any) -> Any:
        seen = stock_cas(self, pointer, compare, value, *order)
        if _program.launch and pointer.data.size == 1 and not np.array_equal(seen.data, compare.data):
            _program.launch.look(int(pointer.data.flat[0]))
        return seen

    def create_atomic_rmw(self: Any, operation: Any, pointer: Any, value: Any, mask: Any, *order: Any) -> Any:
        if value.dtype.scalar in (tl.float16, tl.bfloat16):
            raise NotImplementedError(
                f"an atomic operation on {value.dtype.scalar}: Triton's interpreter loses updates between processes; "
                "fp32, int32 and int64 are atomic there"
            )
        seen = stock_rmw(self, operation, pointer, value, mask, *order)
        if _program.launch and pointer.data.size == 1 and not value.data.any():
            _program.launch.look(int(pointer.data.flat[0]))
        return seen

    def create_masked_load(self: Any, ptrs: Any, *options: Any, **named: Any) -> Any:
        found = stock_load(self, ptrs, *options, **named)
        # The last one. What caches are to do comes before it: one argument or two, as Triton's version has it.
        is_volatile = named["is_volatile"] if named else options[-1]
        if is_volatile and _program.launch:
            _program.launch.look(int(ptrs.data.flat[0]))
        return found

    def launch(self: Any, *arguments: Any, **named: Any) -> None:
        parameters = inspect.getfullargspec(self.fn).args
        named = {name: value for name, value in named.items() if name in parameters}  # not num_warps and its like
        for hook in getattr(self, "pre_run_hooks", ()):
            hook(*arguments, **named)
        bound = inspect.getcallargs(self.fn, *arguments, **named)
        _require_cpu_tensors(bound.values())
        with _language:
            converted = {name: value if name in self.constexprs else _convert(value) for name, value in bound.items()}
            grid = self.grid(converted) if callable(self.grid) else self.grid
            x, y, z = [int(extent) for extent in grid] + [1] * (3 - len(grid))
            _InterpretedLaunch(self.fn, converted, (x, y, z)).run()

    _Builder.create_get_program_id = create_get_program_id
    _Builder.create_get_num_programs = create_get_num_programs
    _Builder.create_atomic_cas = create_atomic_cas
    _Builder.create_atomic_rmw = create_atomic_rmw
    _Builder.create_masked_load = create_masked_load
    interpreter.GridExecutor.__call__ = launch


def _convert(value: Any) -> Any:
    """Convert an argument for the interpreter. Constants in a tuple become plain values, since Python code cannot
    subtract a constexpr from a tensor."""
    if isinstance(value, tuple):
        values = [item.value if isinstance(item, tl.constexpr) else _convert(item) for item in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return interpreter._implicit_cvt(value)


def _require_cpu_tensors(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, tuple):
            _require_cpu_tensors(value)
        device = getattr(getattr(value, "base", value), "device", None)
        if device is not None and device.type != "cpu":
            raise ValueError(f"an interpreted kernel takes tensors on the CPU, not on {device}")


class _Language:
    """Context in which triton.language has the interpreter's functions, while any thread runs a launch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launches = 0
        self._scope: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._launches == 0:
                # Triton finds the modules to patch in a function's globals: these are the two that it may be.
                self._scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            self._launches += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._launches -= 1
            if self._launches == 0:
                self._scope.restore()


_language = _Language()


def _patch_language_once() -> None:
    def call_device_function(self: Any, *arguments: Any, **named: Any) -> Any:
        return self.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call_device_function


def _accept_any_scalar_as_index() -> None:
    stock = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, _Handle) and handle.data.dtype == np.uint16 and handle.dtype.scalar == tl.bfloat16


def _widen(handle: Any) -> Any:
    """Convert a bf16 handle to fp32, exactly: bf16 is the upper half of fp32. Return other handles as they are."""
    if not _is_bf16(handle):
        return handle
    return _Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrow(data: np.ndarray, *, truncate: bool = False) -> Any:
    """Convert numbers to a bf16 handle, rounded to the nearest, ties to even."""
    numbers = np.ascontiguousarray(data, dtype=np.float32)
    bits = numbers.view(np.uint32)
    rounding = 0 if truncate else 0x7FFF + ((bits >> 16) & 1)
    upper = ((bits.astype(np.uint64) + rounding) >> 16).astype(np.uint16)
    return _Handle(np.where(np.isnan(numbers), np.uint16(0x7FC0), upper).reshape(data.shape), tl.bfloat16)


def _compare_to_int1() -> None:
    stock = _Builder.binary_op

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = stock(self, left, right, operation)
        return _Handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    _Builder.binary_op = binary_op


def _compute_bf16_in_fp32() -> None:
    def in_fp32(stock: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: Any, *arguments: Any) -> Any:
            if not any(_is_bf16(argument) for argument in arguments):
                return stock(self, *arguments)
            result = stock(self, *map(_widen, arguments))
            return _narrow(result.data) if result.data.dtype == np.float32 else result

        return compute

    for name in ("binary_op", "unary_op", "create_clampf", "create_fma", "create_erf", "create_rsqrt"):
        setattr(_Builder, name, in_fp32(getattr(_Builder, name)))

    stock_dot, stock_cast, stock_fp_to_fp = _Builder.create_dot, _Builder.cast_impl, _Builder.create_fp_to_fp

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        wide = _widen(d)
        if wide.data.dtype != np.float32:
            return stock_dot(self, _widen(a), _widen(b), wide, *rest)
        # Add in fp64: in fp32, BLAS makes a row's last bit depend on its place in the block, which no GPU does.
        zeros = _Handle(np.zeros(wide.data.shape), tl.float64)
        product = stock_dot(self, _widen(a), _widen(b), zeros, *rest).data.astype(np.float32) + wide.data
        return _narrow(product) if _is_bf16(d) else _Handle(product, d.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16:
            return source if _is_bf16(source) else _narrow(source.data.astype(np.float32))
        return stock_cast(self, _widen(source), target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        wide = _widen(source)
        if target.scalar == tl.bfloat16:
            if wide.dtype.scalar not in (tl.float16, tl.float32, tl.float64):
                wide = stock_fp_to_fp(self, wide, tl.float32, rounding)
            return _narrow(wide.data, truncate=rounding == interpreter._ir.ROUNDING_MODE.RTZ)
        if target.scalar == tl.float8e4nv and wide.dtype.scalar == tl.float32:
            numbers = torch.from_numpy(wide.data.clip(-448, 448)).to(torch.float8_e4m3fn)
            return _Handle(numbers.view(torch.uint8).numpy(), target.scalar)
        return wide if target.scalar == wide.dtype.scalar else stock_fp_to_fp(self, wide, target, rounding)

    _Builder.create_dot = create_dot
    _Builder.cast_impl = cast_impl
    _Builder.create_fp_to_fp = create_fp_to_fp
    _Builder.get_bf16 = lambda self, value: _narrow(np.array([value], dtype=np.float32))

    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        operation.apply_impl = _reduce_bf16_in_fp32(operation.apply_impl)


def _reduce_bf16_in_fp32(stock: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, inputs: Any) -> Any:
        was_bf16 = [_is_bf16(value.handle) for value in inputs]
        wide = tuple(
            _retype(value, _widen(value.handle)) if bf16 else value
            for value, bf16 in zip(inputs, was_bf16, strict=True)
        )
        results = stock(self, wide)
        many = results if isinstance(results, (list, tuple)) else [results]
        return tuple(
            _retype(value, _narrow(value.handle.data)) if any(was_bf16) and value.dtype == tl.float32 else value
            for value in many
        )

    return apply


def _retype(value: Any, handle: Any) -> Any:
    shape = value.type.shape if value.type.is_block() else None
    return tl.core.tensor(handle, tl.block_type(handle.dtype, shape) if shape else handle.dtype)
