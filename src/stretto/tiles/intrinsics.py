"""What the primitives need and Triton has no word for: a clock, fences for TMA, and a zero that compilers cannot see.

Compiled kernels have them in inline assembly, interpreted ones in Python. Which a process has is decided when this
module is imported, as Triton decides it for every kernel that is decorated afterwards. The assembly stands in jitted
functions, whose text is part of the key under which Triton caches what it has compiled; a builtin's is not.
"""

import time
import weakref
from typing import Any, Protocol

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels of this process are interpreted: TRITON_INTERPRET, as it was at import."""

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
    """Make `owner` answer for the failure record at this address, as long as it lives."""
    _record_owners[address] = owner


def _read_clock() -> int:
    """Nanoseconds of this machine's clock, in an interpreted kernel."""
    return time.monotonic_ns()


def _raise_report(report: Any) -> None:
    """End an interpreted launch with the error that the report, a pointer to it, tells of."""
    _record_owners[int(report.handle.data.item())].check()
    raise AssertionError("a wait was given up and nothing was reported")


def _require_own(report: Any, pointer: Any) -> None:
    """ValueError if a pointer of an interpreted kernel is into other memory than that of the report's channel."""
    owner = _record_owners.get(int(report.handle.data.item()))
    if owner is not None:
        owner.require_own(int(pointer.handle.data.min()))


# Compiled kernels name these, in branches that are not compiled; Triton lets them name nothing else but builtins.
for _builtin in (_read_clock, _raise_report, _require_own):
    setattr(_builtin, "__triton_builtin__", True)  # noqa: B010  (a function has no such attribute, to mypy)


@tl.core.builtin
def _backend(_semantic: Any = None) -> tl.constexpr:
    """What the kernel is compiled for: "cuda" or "hip"."""
    return tl.constexpr(_semantic.builder.options.backend_name)


@tl.core.builtin
def count_threads(_semantic: Any = None) -> tl.constexpr:
    """How many threads a compiled program has."""
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
    """int64: nanoseconds of a clock. On GPUs it differs from thread to thread: branch on nothing made of it."""
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
    """int32: 0, made of `seen` (int32), which neither Triton nor LLVM knows.

    What is loaded from an address that it was added to is loaded after `seen` is there. before_tma: TMA may load it
    too; that goes through another proxy, which a fence makes wait.
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
def poll_before_tma(pointer, target, late, mark, limit):  # type: ignore[no-untyped-def]
    """int32: 0, made of what `pointer` holds once it has reached `target`: see `opaque_zero`, before TMA.

    It gives up where the word `late` is not 0, and sets it to `mark` when it has looked for `limit` nanoseconds. Each
    thread does all of this by itself, in one instruction that compilers may move, though not above what its operands
    are made of: said to be pure, since a loop with others is not pipelined.
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
    """Wait until this thread's TMA stores are done, not only read, and put them before what it does next.

    An interpreted store is done when it returns.
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
    """Each of a program's threads adds `times` to a counter, after its own stores (release at this GPU's scope).

    All `threads` of them together so add times * threads: whoever sees less has not seen all threads, so that no
    barrier is needed. after_tma: also after the thread's TMA stores, which it waits for, since none knows whose they
    are. times 0: nothing happens.
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
    """End an interpreted launch; a compiled kernel goes on to its end, and the host finds the report."""
    if INTERPRETED:
        _raise_report(report)


@triton.jit
def require_own(report, pointer):  # type: ignore[no-untyped-def]
    """End an interpreted launch whose pointer is not into this rank's memory of the channel; nothing when compiled."""
    if INTERPRETED:
        _require_own(report, pointer)


if INTERPRETED.value:
    from stretto.tiles.interpreter import install

    install()
