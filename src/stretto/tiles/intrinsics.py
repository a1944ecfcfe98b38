"""What the primitives need and Triton has no word for: a clock, fences for TMA, and a zero that compilers cannot see.

Each has two forms, one for compiled kernels (inline assembly) and one for interpreted ones (Python). Which one holds is
decided when this module is imported, as Triton decides it for every kernel that is decorated afterwards.
"""

import time
from typing import Any

import triton
import triton.language as tl

from stretto.tiles import reports

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels of this process are interpreted: TRITON_INTERPRET, as it was at import."""

_CLOCK = {"cuda": ("mov.u64 $0, %globaltimer;", "=l"), "hip": ("s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s")}
_NANOSECONDS_A_TICK = {"cuda": 1, "hip": 10}
_ZERO = {"cuda": ("and.b32 $0, $1, 0;", "=r,r"), "hip": ("v_and_b32 $0, 0, $1", "=v,v")}
_STORES = "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.b32 $0, 0;"
_LOADS = "fence.proxy.async;\nand.b32 $0, $1, 0;"


if INTERPRETED.value == isinstance(tl.zeros, triton.JITFunction):
    raise ImportError(
        "TRITON_INTERPRET was changed after triton had been imported, whose functions are of the other kind: set it "
        "before anything imports triton"
    )

if INTERPRETED.value:
    from stretto.tiles.interpreter import install

    install()

    def now() -> int:
        """Nanoseconds of a clock of this machine."""
        return time.monotonic_ns()

    def opaque_zero(seen: Any, before_tma: Any) -> int:
        """0: the interpreter loads when it is told to."""
        return 0

    def finish_tma_stores() -> None:
        """Nothing: an interpreted store is done when it returns."""

    def give_up(report: Any) -> None:
        """End the launch with the error that the report, a pointer to it, tells of."""
        reports.raise_reported(int(report.handle.data.item()))

else:

    @tl.core.builtin
    def now(_semantic: Any = None) -> Any:
        """int64: nanoseconds of the GPU's clock. It differs from thread to thread: branch on nothing made of it."""
        backend = _semantic.builder.options.backend_name
        ticks = _assemble(*_CLOCK[backend], [], tl.int64, _semantic)
        return _semantic.mul(ticks, _NANOSECONDS_A_TICK[backend], False)

    @tl.core.builtin
    def opaque_zero(seen: Any, before_tma: Any, _semantic: Any = None) -> Any:
        """int32: 0, made of `seen` (int32), which neither Triton nor LLVM knows.

        What is loaded from an address that it was added to is loaded after `seen` is there. before_tma: TMA may load
        it too; that goes through another proxy, which a fence makes wait.
        """
        if tl.core._unwrap_if_constexpr(before_tma):
            _require_tma(_semantic)
            return _assemble(_LOADS, "=r,r", [seen], tl.int32, _semantic)
        return _assemble(*_ZERO[_semantic.builder.options.backend_name], [seen], tl.int32, _semantic)

    @tl.core.builtin
    def finish_tma_stores(_semantic: Any = None) -> None:
        """Wait until this thread's TMA stores are done, not only read, and put them before what it does next."""
        _require_tma(_semantic)
        _assemble(_STORES, "=r", [], tl.int32, _semantic)

    @tl.core.builtin
    def give_up(report: Any, _semantic: Any = None) -> None:
        """Nothing: the kernel goes on to its end, and the host finds the report."""


def _assemble(code: str, constraints: str, inputs: list[Any], dtype: tl.dtype, semantic: Any) -> Any:
    return tl.inline_asm_elementwise(code, constraints, inputs, dtype=dtype, is_pure=False, pack=1, _semantic=semantic)


def _require_tma(semantic: Any) -> None:
    options = semantic.builder.options
    arch = str(options.arch)
    if options.backend_name != "cuda" or int(arch.removeprefix("sm").rstrip("af")) < 90:
        raise ValueError(f"TMA needs an NVIDIA GPU of sm_90 or newer, not {arch}: leave after_tma and before_tma False")
