# SPDX-License-Identifier: Apache-2.0
"""A hash of the bits of tensors, in one pass over them on their device: any single flipped bit changes it.

The hash of words w_0, w_1, ... is sum_i w_i m_i modulo 2^64, with odd multipliers m_i that depend on the position:

    m_i = x_i XOR (x_i >> 32), with its lowest bit set;   x_i = i g modulo 2^64,   g = 2^64 / golden ratio

- A change within one word, by d with 0 < |d| < 2^32, changes the hash by d m_i, which is not 0 modulo 2^64 since m_i is
  odd. So every flipped bit is found, and every change of one word.
- Changes of several words are overlooked only if the sum of d_i m_i is 0, one case in 2^64 for multipliers as unordered
  as these. Swapped words are found, since multipliers differ.
- The order of additions does not matter to integers: all devices of one kind, and all launches, find the same hash.

An XOR or a sum of the words alone would overlook two equal flips, and words in another order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed number of 64 bits
CPU_BLOCK = 1 << 18  # words whose multipliers are computed together on a CPU


def hash_bits(tensors: Sequence[Tensor]) -> Tensor:
    """Hash the bits of each tensor, of any dtype and on one device. Returns int64 [len(tensors)], on that device.

    It reads each tensor once, and the host does not wait.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    hashes = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for number, tensor in enumerate(tensors):
        words = _words_of(tensor)
        if not words.numel():
            continue
        if words.is_cuda:
            from stretto.train.bit_hash_kernel import launch  # imported here, since Triton comes with GPUs

            launch(words, hashes[number : number + 1])
        else:
            hashes[number] = _hash_on_cpu(words)
    return hashes


def _words_of(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, 1-dim: of 4 bytes if they divide it, or else of the widest that do."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for dtype in (torch.int32, torch.int16):
        if flat.numel() % dtype.itemsize == 0 and flat.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat


def _hash_on_cpu(words: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for first in range(0, words.numel(), CPU_BLOCK):
        part = words[first : first + CPU_BLOCK].long()
        total += (part * multipliers(first, first + len(part))).sum()
    return total


def multipliers(first: int, stop: int) -> Tensor:
    mixed = torch.arange(first, stop, device="cpu") * GOLDEN
    return (mixed ^ (mixed >> 32)) | 1
