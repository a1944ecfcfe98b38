# SPDX-License-Identifier: Apache-2.0
"""Cache of encoded TMA descriptors, so that Triton does not encode them again at every launch.

Triton inspects every argument of a launch for descriptors and encodes each one again: 3.5 us of the 15.8 us that a host
took to launch a kernel with three (H200, Triton 3.6). The encoding depends on the matrix's address, shape and strides,
and on how the descriptor pads and rounds; everything else belongs to the compiled kernel.
"""

from collections.abc import Hashable
from typing import Any

_MAX_KEPT = 256  # of one parameter
_NAMES = {"launcher", "tensordesc_indices", "tensordesc_meta"}


def remember_descriptors(compiled: Any) -> None:
    """Make a compiled kernel's launches encode each descriptor once; kernels without descriptors are not changed.

    This replaces the closure that Triton's `wrap_handle_tensordesc` made, by means of the closure's own cells. Where a
    version of Triton has another launcher, as 3.8 does, nothing changes.
    """
    run = getattr(compiled, "run", None)
    wrapped = getattr(run, "launch", None)
    if run is None or wrapped is None or not knows_launcher(wrapped):
        return
    cells = (cell.cell_contents for cell in wrapped.__closure__)
    known = dict(zip(wrapped.__code__.co_freevars, cells, strict=True))
    make = wrapped.__globals__.get("make_tensordesc_arg")
    metas, positions = known["tensordesc_meta"], sorted(known["tensordesc_indices"])
    if make is None or len(metas) != len(positions):
        return
    # Up to 3.6, the kernel's arguments follow this many others; later versions pass them as one tuple at the end.
    before = wrapped.__globals__.get("_BASE_ARGS_FORMAT_LEN")
    places = [
        (position + (before or 0), _Descriptors(make, meta)) for position, meta in zip(positions, metas, strict=True)
    ]
    places.reverse()  # replacing one moves those after it
    launcher = known["launcher"]

    def spread(arguments: Any) -> list[Any]:
        given = list(arguments)
        for place, descriptors in places:
            given[place : place + 1] = descriptors.find(given[place])
        return given

    if before is None:
        run.launch = lambda *arguments: launcher(*arguments[:-1], spread(arguments[-1]))
    else:
        run.launch = lambda *arguments: launcher(*spread(arguments))


def knows_launcher(launch: Any) -> bool:
    """Return whether a kernel's launch is the closure that `remember_descriptors` replaces (up to Triton 3.7)."""
    return set(getattr(getattr(launch, "__code__", None), "co_freevars", ())) == _NAMES


class _Descriptors:
    """The encoded descriptors of one kernel parameter, by what they encode."""

    def __init__(self, make: Any, meta: Any) -> None:
        self._make, self._meta = make, meta
        self._known: dict[Hashable, list[Any]] = {}

    def find(self, matrix: Any) -> list[Any]:
        if self._meta is None:  # the launcher takes the tensor itself and may use its address only while it is alive
            return list(self._make(matrix, None))
        rounds = getattr(matrix, "round_f32_to_tf32", False)  # since 3.7
        key = matrix.base.data_ptr(), tuple(matrix.shape), tuple(matrix.strides), matrix.padding, rounds
        made = self._known.get(key)
        if made is None:
            if len(self._known) == _MAX_KEPT:
                self._known.clear()
            made = self._known[key] = list(self._make(matrix, self._meta))
        return made
