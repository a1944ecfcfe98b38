# SPDX-License-Identifier: Apache-2.0
"""Hashes of 64-bit words, and counter-based random numbers: a number is a function of a key and its position."""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def mix(values: Words) -> Words:
    """Apply one step of SplitMix64: a bijection of 64-bit words in which every bit depends on every bit.

    Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014, with David Stafford's Mix13.
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_of(*numbers: int) -> Words:
    """Hash several numbers, in their order, to one word, uint64 [1]."""
    key = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        key = mix(key ^ np.uint64(number % (1 << 64)))
    return key


def uniform(words: Words) -> NDArray[np.float64]:
    """Convert hashed words to floats in [0, 1)."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
