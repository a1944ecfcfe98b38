# SPDX-License-Identifier: Apache-2.0
"""The part of a GPU's memory that a plan may allocate, after the overhead of the allocator and the process."""

from collections.abc import Mapping

# By how much what torch's allocator reserves exceeds what is allocated at the peak: from 0 to 5% were measured
# (lab/results/memory).
RESERVED = 1.02
# The fraction of a GPU's memory that a plan may take: the rest covers errors of the prediction.
USABLE = 0.95
_OUTSIDE = 1.4e9  # bytes of a process outside of the allocator (lab/results/memory): CUDA's context and kernels' code
_MAX_OUTSIDE = 0.02  # of the GPU's memory; a core of a CPU takes less


def peak(components: Mapping[str, float]) -> float:
    """Bytes in all."""
    return sum(components.values())


def reserved(allocated: float) -> float:
    """Bytes that torch's allocator takes from the device if so many are allocated at the peak."""
    return RESERVED * allocated


def outside_of_allocator(capacity: float) -> float:
    """Bytes of a device with this capacity that a process takes outside of the allocator."""
    return min(_OUTSIDE, _MAX_OUTSIDE * capacity)


def max_allocated(capacity: float) -> float:
    """Bytes that may be allocated at the peak of a plan that fits a device of so many."""
    return (USABLE * capacity - outside_of_allocator(capacity)) / RESERVED
