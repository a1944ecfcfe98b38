# SPDX-License-Identifier: Apache-2.0
"""The kernel of `bit_hash` for GPUs.

It reads each word once and writes 8 bytes for every `BLOCK` words, so it should be limited by the memory's bandwidth.
A model of 7e9 fp32 weights on one GPU is 28 GB: at the 3.35 TB/s of an H100's memory 8.4 ms, and 9 to 10 ms at the
nine tenths of that which a kernel that only reads can reach. With bf16 weights and fp32 masters it is 42 GB, 13 ms.
Shards are so much less: over x=2, z=4 an eighth.

Arithmetic per word of 4 bytes: the product i g (of 64 bits: 3 multiply-adds of 32 bits), a shift, an XOR and an OR, the
product with the word (2 multiply-adds of 32 bits, as the word has 32), and the sum of 64 bits (2): about a dozen
instructions. 132 SMs that issue 64 of these in a cycle of 1.7 GHz do 1.2e12 words in a second; memory delivers 0.84e12.

Synchronization: programs add their sums to one word by relaxed atomics, whose order does not matter to integers. The
word is zeroed before the launch and read by later work of the same stream.
"""

import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.launches import launch_kernel

BLOCK = 4096  # words that a program adds up: 16 for each of its 256 threads
WARPS = 8
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number of 64 bits


@triton.jit
def _multipliers(at, GOLDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The odd multipliers of the words at these positions (int64), as `bit_hash.multipliers` has them."""
    mixed = at * GOLDEN
    return (mixed ^ (mixed >> 32)) | 1


@triton.jit
def _add_hash(words, total, count, GOLDEN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add the hash of the program's BLOCK words to `total`.

    words: integers of 1, 2 or 4 bytes, which are widened as torch widens them: with their sign, if their dtype has one.
    count: words in all. total: int64 [1].

    A masked word is 0 and adds nothing.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, mask=at < count, other=0).to(tl.int64)
    tl.atomic_add(total, tl.sum(word * _multipliers(at, GOLDEN), 0), sem="relaxed")


def launch(words: Tensor, total: Tensor) -> None:
    """Add the hash of `words` (integers [n], contiguous, n > 0) to `total` (int64 [1]); both on one GPU."""
    launch_kernel(
        _add_hash,
        triton.cdiv(words.numel(), BLOCK),
        words,
        total,
        words.numel(),
        GOLDEN=GOLDEN,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
