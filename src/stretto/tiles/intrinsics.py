# SPDX-License-Identifier: Apache-2.0
"""Device intrinsics that Triton lacks: a clock, fences for TMA, and a zero that compilers cannot see through.

Compiled kernels have them as inline assembly, interpreted ones as Python. A process is one or the other from the import
of this module on, as Triton decides it for every kernel that is decorated afterwards. The assembly stands in jitted
functions, whose text is part of the key of Triton's compilation cache; a builtin's text is not.
"""

import time
import weakref
from typing import Any, Protocol

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True if the kernels of this process are interpreted: TRITON_INTERPRET, as it was at import."""

if INTERPRETED.value == isinstance(tl.zeros, triton.JITFunction):
    raise ImportError(
        "TRITON_INTERPRET was changed after triton had been imported, whose functions are of the other kind: set it "
        "before anything imports triton"
    )


class RecordOwner(Protocol):
    """The owner of a failure record: a kernel that is interpreted knows only at which address the record lies."""

    def check(self) -> None:
        """Raise the error that the record describes."""

    def require_own(self, address: int) -> None:
        """ValueError for an address that is outside of the owner's memory."""


_record_owners: weakref.WeakValueDictionary[int, RecordOwner] = weakref.WeakValueDictionary()


def register_record(address: int, owner: RecordOwner) -> None:
    """Register `owner` as the owner of the failure record at this address, while it lives."""
    _record_owners[address] = owner


def _read_clock() -> int:
    """Return nanoseconds of this machine's clock, in an interpreted kernel."""
    return time.monotonic_ns()


def _raise_report(report: Any) -> None:
    """End an interpreted launch with the error that a failure record describes; report: the pointer to the record."""
    _record_owners[int(report.handle.data.item())].check()
    raise AssertionError("a wait was given up and nothing was reported")


def _require_own(report: Any, pointer: Any) -> None:
    """ValueError if a pointer of an interpreted kernel is outside of the memory of the record's channel."""
    owner = _record_owners.get(int(report.handle.data.item()))
    if owner is not None:
        owner.require_own(int(pointer.handle.data.min()))


# Compiled kernels name these functions in branches that are not compiled; Triton lets kernels name only builtins.
for _builtin in (_read_clock, _raise_report, _require_own):
    setattr(_builtin, "__triton_builtin__", True)  # noqa: B010  (a function has no such attribute, to mypy)


@tl.core.builtin
def _backend(_semantic: Any = None) -> tl.constexpr:
    """Return the backend that the kernel is compiled for: "cuda" or "hip"."""
    return tl.constexpr(_semantic.builder.options.backend_name)


@triton.jit
def is_cuda():  # type: ignore[no-untyped-def]
    """True if the kernel is compiled for NVIDIA GPUs: a constant."""
    return not INTERPRETED and _backend() == "cuda"


@tl.core.builtin
def count_threads(_semantic: Any = None) -> tl.constexpr:
    """Return the number of threads of a compiled program."""
    options = _semantic.builder.options
    return tl.constexpr(options.num_warps * getattr(options, "warp_size", 32))


@tl.core.builtin
def _require_tma(_semantic: Any = None) -> None:
    options = _semantic.builder.options
    arch = str(options.arch)
    if options.backend_name != "cuda" or int(arch.removeprefix("sm").rstrip("af")) < 90:
        raise ValueError(f"TMA needs an NVIDIA GPU of sm_90 or newer, not {arch}: leave after_tma and before_tma False")


@triton.jit
def now():  # type: ignore[no-untyped-def]
    """Return nanoseconds of a clock, int64. On GPUs it differs from thread to thread: never branch on it."""
    if INTERPRETED:
        nanoseconds = _read_clock()
    elif _backend() == "hip":
        ticks = tl.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
        )
        nanoseconds = ticks * 10
    else:
        nanoseconds = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    return nanoseconds


@triton.jit
def opaque_zero(seen, before_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return an int32 0 computed from `seen` (int32), by assembly that neither Triton nor LLVM can simplify.

    A load from an address that includes the zero comes after `seen` was read. before_tma: loads by TMA, too, which go
    through another proxy; a proxy fence orders them.
    """
    if INTERPRETED:
        zero = 0
    elif before_tma:
        _require_tma()
        zero = tl.inline_asm_elementwise(
            "fence.proxy.async;\nand.b32 $0, $1, 0;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1
        )
    elif _backend() == "hip":
        zero = tl.inline_asm_elementwise("v_and_b32 $0, 0, $1", "=v,v", [seen], dtype=tl.int32, is_pure=False, pack=1)
    else:
        zero = tl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [seen], dtype=tl.int32, is_pure=False, pack=1)
    return zero


@triton.jit
def read_acquire(pointers):  # type: ignore[no-untyped-def]
    """Read int32 words, each thread its own, with acquire at system scope."""
    if _backend() == "hip":
        return tl.atomic_add(pointers, 0, sem="acquire", scope="sys")
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def poll_before_tma(pointer, target, late, mark, limit):  # type: ignore[no-untyped-def]
    """Spin until `pointer` has reached `target`; returns `opaque_zero` of the value, with the fence for TMA.

    It gives up when the word `late` is not 0, and sets it to `mark` after `limit` nanoseconds. Each thread polls by
    itself, in one block of assembly that compilers may move, though not above its operands. It is declared pure, since
    Triton does not pipeline a loop with impure assembly.
    """
    _require_tma()
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred yes;
        .reg .b32 left;
        .reg .b64 began, time;
        ld.acquire.sys.global.b32 $0, [$1];
        sub.s32 left, $0, $2;
        setp.ge.s32 yes, left, 0;
        @yes bra there;
        mov.u64 began, %globaltimer;
        look:
        ld.acquire.sys.global.b32 $0, [$1];
        sub.s32 left, $0, $2;
        setp.ge.s32 yes, left, 0;
        @yes bra there;
        ld.relaxed.gpu.global.b32 left, [$3];
        setp.ne.s32 yes, left, 0;
        @yes bra there;
        mov.u64 time, %globaltimer;
        sub.u64 time, time, began;
        setp.lt.u64 yes, time, $5;
        @yes bra look;
        st.relaxed.gpu.global.b32 [$3], $4;
        there:
        fence.proxy.async;
        and.b32 $0, $0, 0;
        }
        """,
        "=&r,l,r,l,r,l",
        [pointer.to(tl.int64), target, late.to(tl.int64), mark, limit],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def finish_tma_stores():  # type: ignore[no-untyped-def]
    """Wait until this thread's TMA stores are complete, not only read, and order them before what follows.

    In interpreted kernels a store is complete when it returns.
    """
    if not INTERPRETED:
        _require_tma()
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0;\nfence.proxy.async;\nmov.b32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def count_up_by_thread(counter, times, threads, after_tma: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add `times` to a counter from each of the program's threads, after its own stores (release at this GPU's scope).

    All `threads` together add times * threads: a smaller sum shows that some thread has not arrived, so no barrier is
    needed. after_tma: each thread first waits for its TMA stores, since it is not known which thread issued them.
    times 0: nothing happens.
    """
    if INTERPRETED:
        tl.atomic_add(counter, times * threads, sem="release", scope="gpu")
    elif _backend() == "hip":
        tl.debug_barrier()
        tl.atomic_add(counter, times * threads, sem="release", scope="gpu")
    elif after_tma:
        _require_tma()
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred yes;
            setp.ne.s32 yes, $2, 0;
            @yes cp.async.bulk.wait_group 0;
            @yes fence.proxy.async;
            @yes red.release.gpu.global.add.s32 [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [counter.to(tl.int64), times],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred yes;
            setp.ne.s32 yes, $2, 0;
            @yes red.release.gpu.global.add.s32 [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [counter.to(tl.int64), times],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def give_up(report):  # type: ignore[no-untyped-def]
    """End an interpreted launch with the recorded failure; a compiled kernel runs on, and the host finds the record."""
    if INTERPRETED:
        _raise_report(report)


@triton.jit
def require_own(report, pointer):  # type: ignore[no-untyped-def]
    """Refuse, in interpreted kernels, a pointer outside of this rank's memory of the channel; compiled, do nothing."""
    if INTERPRETED:
        _require_own(report, pointer)


if INTERPRETED.value:
    from stretto.tiles.interpreter import install

    install()
