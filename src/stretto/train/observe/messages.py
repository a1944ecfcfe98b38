# SPDX-License-Identifier: Apache-2.0
"""Finds in a profiler's trace what each collective sends: NCCL's kernels say it, gloo's calls have shapes."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Collectives. Names in traces, of torch's calls, NCCL's records and gloo's, have these as parts, with or without "_";
# the first that fits counts.
_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_GLOO = {"reduce_scatter": ("reduce_scatter", "all_reduce")}  # torch's gloo scatters the result of an all-reduce
# Parts of the names of dtypes; the first that fits counts.
_BYTES = {
    "float8": 1,
    "bfloat16": 2,
    "half": 2,
    "double": 8,
    "float": 4,
    "long": 8,
    "int": 4,
    "byte": 1,
    "char": 1,
    "bool": 1,
}
_UNKNOWN_BYTES = 4  # the trace of a call with a list of tensors does not say their dtype


@dataclass(frozen=True)
class SentMessage:
    """A collective's name, and the bytes of a rank's input."""

    collective: str
    num_bytes: int


def read_kernel(about: Mapping[str, Any]) -> SentMessage | None:
    """Read what a kernel of NCCL sends from the arguments of its record; None where they do not say it."""
    name = _name(str(about.get("Collective name", "")))
    count = about.get("In msg nelems")
    if name is None or type(count) is not int:
        return None
    return SentMessage(name, count * _bytes(str(about.get("dtype", ""))))


def match_gloo(
    events: Iterable[Mapping[str, Any]], work: Iterable[Mapping[str, Any]], axes: Mapping[Any, str]
) -> dict[int, SentMessage]:
    """Find the message of each gloo work, by id() of its event, from the calls' shapes.

    axes: of gloo's threads. An axis works on its calls in order; a call is matched with the next work of its kind that
    begins after it, of whichever axis begins first, since calls do not name their axis.
    """
    queues: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted(work, key=lambda event: event["ts"]):
        queues[axes.get(event["tid"], "")].append(event)
    found: dict[int, SentMessage] = {}
    busy_until: dict[Any, float] = {}
    calls = sorted((event for event in events if event["name"].startswith("c10d::")), key=lambda event: event["ts"])
    for call in calls:
        if call["ts"] < busy_until.get(call["tid"], call["ts"]):
            continue  # within another call
        busy_until[call["tid"]] = call["ts"] + call.get("dur", 0)
        name = _name(call["name"])
        shapes = call.get("args", {}).get("Input Dims")
        if name is None:
            continue
        for queue in queues.values():
            while queue and queue[0]["ts"] < call["ts"]:
                queue.pop(0)  # of no call of the trace
        kinds = _GLOO.get(name, (name,))
        heads = [queue for queue in queues.values() if queue and _name(queue[0]["name"]) in kinds]
        if heads:
            first = min(heads, key=lambda queue: queue[0]["ts"]).pop(0)
            if shapes:
                found[id(first)] = SentMessage(name, _input_bytes(name, shapes, call["args"].get("Input type", ())))
    return found


def _name(text: str) -> str | None:
    text = text.lower().replace("_", "")
    return next((name for name in _NAMES if name.replace("_", "") in text), None)


def _bytes(dtype: str) -> int:
    return next((size for name, size in _BYTES.items() if name in dtype.lower()), _UNKNOWN_BYTES)


def _input_bytes(name: str, shapes: Any, types: Any) -> int:
    """The bytes of a call's input: its second tensor, or its list of tensors where it works in place."""
    place = 0 if name in ("all_reduce", "broadcast") else 1
    if not isinstance(shapes, list) or len(shapes) <= place:
        return 0
    dtype = str(types[place]) if isinstance(types, list) and len(types) > place else ""
    return _elements(shapes[place]) * (_UNKNOWN_BYTES if "List" in dtype else _bytes(dtype))


def _elements(shape: Any) -> int:
    if not isinstance(shape, list):
        return 0
    if shape and isinstance(shape[0], list):
        return sum(map(_elements, shape))
    return math.prod(shape) if all(type(size) is int for size in shape) else 0
