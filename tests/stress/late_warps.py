# SPDX-License-Identifier: Apache-2.0
"""Inserts random sleeps into kernels, so that a missing barrier of the thread block shows often.

The warps of a program that has just multiplied, or loaded its rows, store within nanoseconds of each other, which is
less than the signal after the stores takes. A signal that does not wait for all warps is then right on nearly every
call, and wrong only if a warp is delayed. This module delays warps on purpose: before accesses to global memory, and at
the start of a kernel, a warp sometimes sleeps for 2 microseconds or, rarely, 50.

Triton kernels are changed in their PTX, with a sleep before each load, store and atomic of global memory; the threads
of a warp sleep together. CUDA C++ kernels are changed in their source, where each thread may sleep by itself.
"""

import os
import re
from typing import Any

SHORT, LONG = 2_000, 50_000  # nanoseconds
_ONE_IN_SHORT, _ONE_IN_LONG = 6, 12  # powers of 2

_ACCESS = re.compile(r"^\s*(?:@!?%?\w+\s+)?(?:ld|st|red|atom)\.(?:[\w:]+\.)*global\b")
_SLEEP = f"""
{{
.reg .pred late_p, late_q;
.reg .b32 late_a, late_b;
mov.u32 late_a, %clock;
mov.u32 late_b, %tid.x;
shr.u32 late_b, late_b, 5;
mul.lo.u32 late_b, late_b, 0x9E3779B9;
xor.b32 late_a, late_a, late_b;
mov.u32 late_b, %ctaid.x;
mul.lo.u32 late_b, late_b, 0x7F4A7C15;
xor.b32 late_a, late_a, late_b;
mul.lo.u32 late_a, late_a, 0x85EBCA6B;
shr.u32 late_b, late_a, 15;
xor.b32 late_a, late_a, late_b;
mul.lo.u32 late_a, late_a, 0xC2B2AE35;
shr.u32 late_b, late_a, {32 - _ONE_IN_SHORT};
setp.eq.u32 late_p, late_b, 0;
@late_p nanosleep.u32 {SHORT};
shr.u32 late_b, late_a, {32 - _ONE_IN_LONG};
setp.eq.u32 late_q, late_b, 0;
@late_q nanosleep.u32 {LONG};
}}
"""

_BE_LATE = f"""
__device__ __noinline__ void be_late() {{
  unsigned int drawn;
  asm volatile("mov.u32 %0, %clock;" : "=r"(drawn));
  drawn = (drawn ^ threadIdx.x * 0x9E3779B9u ^ blockIdx.x * 0x7F4A7C15u) * 0x85EBCA6Bu;
  drawn = (drawn ^ drawn >> 15) * 0xC2B2AE35u;
  if (drawn >> {32 - _ONE_IN_SHORT} == 0) __nanosleep({SHORT});
  if (drawn >> {32 - _ONE_IN_LONG} == 0) __nanosleep({LONG});
}}
"""
_BEGINNINGS = re.compile(
    r"((?:__device__ __forceinline__ (?:Pack load|void store|u32 next_epoch)\([^)]*\)|__global__ void [^{;]*?\)) \{)"
)


def delay_ptx(ptx: str) -> str:
    """Insert a sleep before each access to global memory of some PTX."""
    return "\n".join(_SLEEP + line if _ACCESS.match(line) else line for line in ptx.split("\n"))


def delay_source(source: str) -> str:
    """Insert sleeps into the CUDA C++ of a collective's kernel. Raises ValueError if it has no kernel."""
    changed, count = _BEGINNINGS.subn(r"\1 be_late();", source)
    if not count:
        raise ValueError("the source has no kernel whose threads could be late")
    after = "typedef unsigned long long u64;\n"
    if after not in changed:
        raise ValueError("the source does not begin as all kernels of collectives do")
    return changed.replace(after, after + _BE_LATE, 1)


def install() -> None:
    """Insert sleeps into all kernels that this process compiles from now on. Call it before Triton is imported."""
    # The cache key of Triton 3.6 does not include these changes.
    folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".triton", "cache")
    os.environ["TRITON_CACHE_DIR"] = folder.rstrip("/") + "-late-warps"
    from triton import knobs

    from stretto.collectives.executor.cuda import workspace

    knobs.runtime.add_stages_inspection_hook = _change_stages
    load_or_compile = workspace.load_or_compile
    workspace.load_or_compile = lambda source, arch: load_or_compile(delay_source(source), arch)


def _change_stages(*arguments: Any) -> tuple[str, str] | None:
    """Triton's hook: without arguments returns a part of the cache's key, else changes the stages of a compilation."""
    if not arguments:
        return "late warps", "late warps"
    stages = arguments[1]
    if make_ptx := stages.get("ptx"):
        stages["ptx"] = lambda source, metadata: delay_ptx(make_ptx(source, metadata))
    return None
