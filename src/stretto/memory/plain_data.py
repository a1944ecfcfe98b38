# SPDX-License-Identifier: Apache-2.0
"""Exchanges of plain data between the ranks of a group, in the place of torch's exchanges of pickled objects.

Whoever unpickles what a peer sends runs the peer's code. A message here is JSON, and names no class: the receiver
passes the type that it expects (`kind`), and gets values of that type or PeerError, which names the sender.

JSON's null, booleans, numbers and strings stand for themselves. All else is an array that begins with its tag:

    ["list", ...]  ["tuple", ...]  ["dict", [key, value], ...]  ["bytes", base64]  ["dtype", "bfloat16"]

A NamedTuple or a dataclass is sent as the tuple of its fields.
"""

import base64
import dataclasses
import json
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.memory.symmetric import PeerError

T = TypeVar("T")
MAX_BYTES = 1 << 26
"""The longest message of one rank, 64 MiB: lists of a large model's tensors take a few."""
_FIRST_BYTES = 512  # of each message that are sent with its length: most are shorter
MAX_DEPTH = 64
"""The deepest that containers may lie in each other."""
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def all_gather_data(value: T, group: dist.ProcessGroup | None = None, kind: Any = Any) -> list[T]:
    """Return every rank's value, in rank order. Collective.

    value: plain data, of `kind`: None, bool, int, float, str, bytes, torch.dtype; tuples, lists and dicts of them;
    NamedTuples and dataclasses. kind: a type hint, such as tuple[str, int] | None; Any for plain data of any shape.

    Raises PeerError where a rank has sent something else, or more than `MAX_BYTES`; ValueError where this rank does.
    """
    packed, ranks = pack(value), dist.get_world_size(group)
    device = _device(group)

    def gather(own: Tensor, size: int) -> list[Tensor]:
        received = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
        dist.all_gather(received, torch.nn.functional.pad(own, (0, size - own.numel())).to(device), group=group)
        return [each.cpu() for each in received]

    length = torch.tensor([packed.numel()], device="cpu").view(torch.uint8)
    heads = gather(torch.cat((length, packed[:_FIRST_BYTES])), len(length) + _FIRST_BYTES)
    sizes = [_check_length(int(head[: len(length)].view(torch.int64)), rank) for rank, head in enumerate(heads)]
    texts = [head[len(length) :] for head in heads]
    if (rest := max(sizes) - _FIRST_BYTES) > 0:
        texts = [torch.cat(both) for both in zip(texts, gather(packed[_FIRST_BYTES:], rest), strict=True)]
    return [_read(text[:size], rank, kind) for rank, (text, size) in enumerate(zip(texts, sizes, strict=True))]


def broadcast_data(value: T, group: dist.ProcessGroup | None = None, kind: Any = Any) -> T:
    """Return the value of the group's rank 0, on all ranks. Otherwise as `all_gather_data`."""
    device, is_root = _device(group), dist.get_rank(group) == 0
    packed = pack(value).to(device) if is_root else torch.empty(0, dtype=torch.uint8, device=device)
    length = torch.tensor([packed.numel()], device=device)
    dist.broadcast(length, group=group, group_src=0)
    size = _check_length(int(length), 0)
    received = packed if is_root else torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(received, group=group, group_src=0)
    return _read(received, 0, kind)


def pack(value: Any) -> Tensor:
    """Plain data as uint8 [any]. ValueError for a value that is none, or too long."""
    text = json.dumps(_encode(value), separators=(",", ":")).encode()
    if len(text) > MAX_BYTES:
        raise ValueError(f"a message between ranks takes {len(text)} bytes, but may take {MAX_BYTES} at most")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def unpack(packed: Tensor, kind: Any = Any) -> Any:
    """The value of this kind that `pack` has made uint8 `packed` of. ValueError for anything else."""
    if packed.numel() > MAX_BYTES:
        raise ValueError(f"it has {packed.numel()} bytes, but may have {MAX_BYTES} at most")
    try:
        return _decode(json.loads(packed.cpu().numpy().tobytes()), kind, 0)
    except RecursionError as error:  # of the parser, before any depth is counted
        raise ValueError("its containers are nested too deeply") from error


def _read(packed: Tensor, rank: int, kind: Any) -> Any:
    try:
        return unpack(packed, kind)
    except ValueError as error:
        raise PeerError(f"rank {rank} has sent a message that is no plain data as expected: {error}") from error


def _check_length(length: int, rank: int) -> int:
    if not 0 < length <= MAX_BYTES:
        raise PeerError(f"rank {rank} announces a message of {length} bytes, but one may take 1 to {MAX_BYTES}")
    return length


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Choose where messages lie: in host memory, unless the group only reaches GPUs."""
    members = dist.group.WORLD if group is None else group
    assert isinstance(members, dist.ProcessGroup)
    kinds = {device.type for device in members._device_types}
    return torch.device("cuda", torch.cuda.current_device()) if kinds == {"cuda"} else torch.device("cpu")


def _encode(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return ["bytes", base64.b64encode(value).decode()]
        case torch.dtype():
            return ["dtype", str(value).removeprefix("torch.")]
        case tuple():
            return ["tuple", *map(_encode, value)]
        case list():
            return ["list", *map(_encode, value)]
        case dict():
            return ["dict", *([_encode(key), _encode(each)] for key, each in value.items())]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ["tuple", *(_encode(getattr(value, field.name)) for field in dataclasses.fields(value))]
    raise ValueError(f"ranks exchange plain data, and {type(value).__qualname__} is none: {value!r}"[:300])


def _decode(found: Any, kind: Any, depth: int) -> Any:
    """The value that `found` encodes. ValueError unless it is of this kind."""
    if depth > MAX_DEPTH:
        raise ValueError("its containers are nested too deeply")
    if kind is object:
        kind = Any
    if get_origin(kind) in (Union, types.UnionType):
        for each in get_args(kind)[:-1]:
            try:
                return _decode(found, each, depth)
            except ValueError:
                pass
        return _decode(found, get_args(kind)[-1], depth)
    if not isinstance(found, list):
        return _require(found, kind)
    tag, *parts = found if found else [None]
    match tag, parts:
        case "bytes", [str() as text]:
            return _require(base64.b64decode(text, validate=True), kind)
        case "dtype", [str() as name] if name in _DTYPES:
            return _require(_DTYPES[name], kind)
        case "list", _ if kind in (Any, list) or get_origin(kind) in (list, Sequence):
            (inner,) = get_args(kind) or (Any,)
            return [_decode(part, inner, depth + 1) for part in parts]
        case "dict", _ if kind in (Any, dict) or get_origin(kind) in (dict, Mapping):
            key_kind, value_kind = get_args(kind) or (Any, Any)
            return _decode_dict(parts, key_kind, value_kind, depth)
        case "tuple", _:
            return _decode_tuple(parts, kind, depth)
    raise ValueError(f"{_shorten(found)} is not of type {kind}")


def _decode_dict(parts: list[Any], key_kind: Any, value_kind: Any, depth: int) -> dict[Any, Any]:
    made = {}
    for part in parts:
        if not (isinstance(part, list) and len(part) == 2):
            raise ValueError(f"{_shorten(part)} is not a key and a value")
        key = _decode(part[0], key_kind, depth + 1)
        try:
            made[key] = _decode(part[1], value_kind, depth + 1)
        except TypeError as error:
            raise ValueError(f"{_shorten(part[0])} cannot be a key") from error
    return made


def _decode_tuple(parts: list[Any], kind: Any, depth: int) -> Any:
    """A tuple; or, where `kind` is a NamedTuple or a dataclass, one of these."""
    if kind is Any or kind is tuple:
        return tuple(_decode(part, Any, depth + 1) for part in parts)
    make: Callable[[list[Any]], Any] = tuple
    if get_origin(kind) in (tuple, Sequence):
        kinds = get_args(kind)
        if get_origin(kind) is Sequence or kinds[-1:] == (...,):
            kinds = kinds[:1] * len(parts)
    elif isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        hints = get_type_hints(kind)
        named = kind.__dataclass_fields__ if dataclasses.is_dataclass(kind) else kind._fields
        kinds, make = tuple(hints[name] for name in named), lambda values: kind(*values)
    else:
        raise ValueError(f"{_shorten(parts)} is not of type {kind}")
    if len(parts) != len(kinds):
        raise ValueError(f"{_shorten(parts)} has {len(parts)} parts, and {kind} has {len(kinds)}")
    return make([_decode(part, each, depth + 1) for part, each in zip(parts, kinds, strict=True)])


def _require(value: Any, kind: Any) -> Any:
    """The value, if it is of a kind without parts."""
    if get_origin(kind) is Literal:
        if any(type(value) is type(each) and value == each for each in get_args(kind)):
            return value
    elif kind is Any or type(value) is (type(None) if kind is None else kind):
        return value
    elif kind is float and type(value) is int:
        with suppress(OverflowError):  # no float is so large
            return float(value)
    raise ValueError(f"{_shorten(value)} is not of type {kind}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
