# SPDX-License-Identifier: Apache-2.0
"""How much of a GPU's memory a plan may allocate: what the allocator and the process take besides."""

from collections.abc import Mapping

# By how much what torch's allocator reserves exceeds what is allocated at the peak: from 0 to 5% were measured
# (results/memory).
RESERVED = 1.02
# Of a GPU's memory, what a plan that fits may take: the rest is for what these factors are off by.
USABLE = 0.95
_OUTSIDE = 1.4e9  # bytes that a process takes beside the allocator (results/memory): CUDA's context and kernels' code
_MOST_OUTSIDE = 0.02  # of the GPU's memory; a core of a CPU takes less


def peak(components: Mapping[str, float]) -> float:
    """Bytes in all."""
    return sum(components.values())


def reserved(allocated: float) -> float:
    """Bytes that torch's allocator takes from the device if so many are allocated at the peak."""
    return RESERVED * allocated


def outside_of_allocator(capacity: float) -> float:
    """Bytes of a device of so many that a process takes beside the allocator."""
    return min(_OUTSIDE, _MOST_OUTSIDE * capacity)


def most_allocated(capacity: float) -> float:
    """Bytes that may be allocated at the peak of a plan that fits a device of so many."""
    return (USABLE * capacity - outside_of_allocator(capacity)) / RESERVED
