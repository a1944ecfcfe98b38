"""TMA descriptors that Triton has made once, so that it does not make them at every launch.

Triton encodes each descriptor of a launch anew, with a look at every argument to find them: of 15.8 us that a host took
to launch a kernel with three, 3.5 (H200, Triton 3.6). What it encodes depends on the matrix's address, shape and
strides, and on how the descriptor fills and rounds; all else is the compiled kernel's.
"""

from collections.abc import Hashable
from typing import Any

_MOST_KEPT = 256  # of one parameter
_NAMES = {"launcher", "tensordesc_indices", "tensordesc_meta"}


def remember_descriptors(compiled: Any) -> None:
    """Have a compiled kernel's launches from now on encode a descriptor once. Nothing for a kernel without descriptors.

    It takes the place of a function inside Triton, `wrap_handle_tensordesc`, whose argument this looks up; where a
    version of Triton has it otherwise, as 3.8 does, everything stays as it was.
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
    # Up to 3.6 a kernel's arguments follow so many others; later ones are a tuple after them.
    before = wrapped.__globals__.get("_BASE_ARGS_FORMAT_LEN")
    places = [
        (position + (before or 0), _Descriptors(make, meta)) for position, meta in zip(positions, metas, strict=True)
    ]
    places.reverse()  # what one becomes moves those after it
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
    """Whether a compiled kernel's launch is what `remember_descriptors` takes the place of: up to Triton 3.7."""
    return set(getattr(getattr(launch, "__code__", None), "co_freevars", ())) == _NAMES


class _Descriptors:
    """Those that one parameter of a kernel has had, as the launcher takes them."""

    def __init__(self, make: Any, meta: Any) -> None:
        self._make, self._meta = make, meta
        self._known: dict[Hashable, list[Any]] = {}

    def find(self, matrix: Any) -> list[Any]:
        if self._meta is None:  # the launcher takes the tensor itself, whose address it may have only while it lives
            return list(self._make(matrix, None))
        rounds = getattr(matrix, "round_f32_to_tf32", False)  # since 3.7
        key = matrix.base.data_ptr(), tuple(matrix.shape), tuple(matrix.strides), matrix.padding, rounds
        made = self._known.get(key)
        if made is None:
            if len(self._known) == _MOST_KEPT:
                self._known.clear()
            made = self._known[key] = list(self._make(matrix, self._meta))
        return made
