# SPDX-License-Identifier: Apache-2.0
"""Plain tensors in place of a module's parameters while its forward runs, and a check that nothing was written to them.

A forward that writes to its own parameters (an average of other weights, a codebook, weights that are initialized from
the first batch) would write to a copy: the parameter is a shard, and the tensor in its place was gathered or cast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class ParameterPlace(NamedTuple):
    """The place where a module holds a parameter: `owner._parameters[key]`. number: of the tensor that stands there."""

    owner: nn.Module
    key: str
    number: int


@contextmanager
def hold(places: Sequence[ParameterPlace], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put `tensors` in `places`, and what was there back at the end."""
    kept = put(places, [tensors[number] for _, _, number in places])
    try:
        yield
    finally:
        put(places, kept)


def _find_replaced(places: Sequence[ParameterPlace], tensors: Sequence[Tensor]) -> list[ParameterPlace]:
    """The places in which something else stands than their tensors."""
    return [place for place in places if place[0]._parameters.get(place[1]) is not tensors[place[2]]]


def check_places(name: str, places: Sequence[ParameterPlace], parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if something else stands in a place than its parameter, which the code would not read.

    name: of the module, for errors.
    """
    for place in _find_replaced(places, parameters):
        is_removed = place.owner._parameters.get(place.key) is None
        raise ValueError(
            f"the parameter {place.key!r} of a {type(place.owner).__name__} in {name} was "
            f"{'removed' if is_removed else 'replaced'} after stretto.parallelize, or is inside of "
            "full_parameters or functional_call. A rank holds a shard of it, which the model would still use: copy "
            "new values into it (load_state_dict, or `with stretto.full_parameters(model): ...`), and remove, tie "
            "or parametrize parameters before parallelize; functional_call takes a plain model"
        )


@contextmanager
def hold_and_check(
    name: str, places: Sequence[ParameterPlace], tensors: Sequence[Tensor], copies: Sequence[int], *, sums: bool
) -> Iterator[None]:
    """`hold`, and refuse a forward that writes to what it holds.

    name: of the module, for errors. copies: numbers of the tensors to which writes would be lost. sums: also compare
    their sums, which finds writes through `.data`, at the cost of waiting for the device: for a module's first forward.

    Raises ValueError if a parameter was replaced, or a copy was written to.
    """
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    if sums and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        sums = False
    watched = [number for number in copies if tensors[number].numel()] if sums else []
    before = _sums(tensors, watched) if watched else None
    replaced: list[ParameterPlace] = []
    kept = put(places, [tensors[number] for _, _, number in places])
    try:
        try:
            yield
        finally:
            for place in _find_replaced(places, tensors):
                # PEFT parametrizes experts' weights within their forward: torch.nn.utils.parametrize sets each to
                # itself (no write), and at its end makes a buffer of a tensor that is no parameter.
                if place.owner._buffers.get(place.key) is tensors[place.number]:
                    versions[place.number] = None
                else:
                    replaced.append(place)
            put(places, kept)
    except RuntimeError as error:  # autograd refuses some of the writes by itself
        if found := next((place for place in places if _was_written(tensors, versions, place.number)), None):
            raise ValueError(_describe_write(name, found)) from error
        raise
    changed = {number for number in copies if _was_written(tensors, versions, number)}
    if watched and before is not None:
        is_changed = (before != _sums(tensors, watched)) & ~before.isnan()
        changed |= {number for number, differs in zip(watched, is_changed.tolist(), strict=True) if differs}
    for place in replaced:
        raise ValueError(
            f"the forward pass of {name} replaces its parameter {place.key!r}, which would be lost: a rank holds a "
            "shard of it. Make it a buffer (register_buffer), or write to it outside of forward"
        )
    for place in places if changed else ():
        if place.number in changed:
            raise ValueError(_describe_write(name, place))


def _was_written(tensors: Sequence[Tensor], versions: Sequence[int | None], number: int) -> bool:
    return versions[number] is not None and tensors[number]._version != versions[number]


def _describe_write(name: str, place: ParameterPlace) -> str:
    return (
        f"the forward pass of {name} writes to its parameter {place.key!r} in place, which would be lost: its code "
        "reads a copy that was gathered or cast from this rank's shard. Make it a buffer (register_buffer), or write "
        "to the shard, parameter.to_local(), outside of forward"
    )


def put(places: Sequence[ParameterPlace], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Put a tensor in each place; returns what was there."""
    kept: list[Tensor | None] = [owner._parameters.get(key) for owner, key, _ in places]
    for (owner, key, _), tensor in zip(places, tensors, strict=True):
        if key in owner._buffers:
            del owner._buffers[key]
        owner._parameters[key] = tensor  # type: ignore[assignment]
        if "_flat_weights_names" in owner.__dict__:  # recurrent modules read their parameters from a list
            names: Any = owner._flat_weights_names
            owner._flat_weights = [owner._parameters.get(name) for name in names]  # type: ignore[assignment]
    return kept


@torch.no_grad()
def _sums(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """The sums of the tensors, weighted by row: a change of signs or of rows' order shows, too."""
    found = []
    for number in numbers:
        rows = tensors[number].detach().reshape(*(tensors[number].shape[:1] or (1,)), -1).sum(1, dtype=torch.float64)
        found.append(rows @ torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device))
    return torch.stack(found)
