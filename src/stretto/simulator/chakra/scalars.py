# SPDX-License-Identifier: Apache-2.0
"""The scalar types of protocol buffers: which values they hold, and how each is stored in a field."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stretto.simulator.chakra.wire import (
    WireError,
    WireType,
    decode_packed,
    encode_bytes,
    encode_tag,
    encode_varint,
    pack,
    to_signed,
    unpack,
    unzigzag,
    zigzag,
)


@dataclass(frozen=True)
class ScalarType:
    """A type of value: its wire type, and how a value is checked, encoded and decoded."""

    wire_type: WireType
    check: Callable[[str, Any], Any]
    encode: Callable[[Any], bytes]  # what follows the tag (and the length)
    decode: Callable[[Any], Any]  # of the unsigned number, or of the bytes


def _integer(kind: str, low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"attribute {name!r} is {value!r}, but a {kind} is a whole number from {low} to {high}")
        return int(value)

    return check


def _instance(kind: str, of: type) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, of):
            raise ValueError(f"attribute {name!r} is {value!r}, but must be a {kind}")
        return value

    return check


def _real(kind: str, format: str) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"attribute {name!r} is {value!r}, but must be a {kind}")
        try:
            return float(unpack(format, pack(format, float(value))))
        except OverflowError as error:
            raise ValueError(f"attribute {name!r} is {value!r}, which a {kind} cannot hold") from error

    return check


def _varint(kind: str, low: int, high: int, decode: Callable[[int], int]) -> ScalarType:
    is_zigzag = kind.startswith("sint")
    return ScalarType(
        WireType.VARINT,
        _integer(kind, low, high),
        (lambda value: encode_varint(zigzag(value))) if is_zigzag else encode_varint,
        decode,
    )


def _fixed(kind: str, format: str) -> ScalarType:
    wire_type = WireType.EIGHT_BYTES if format in "Qqd" else WireType.FOUR_BYTES
    bits = 64 if wire_type == WireType.EIGHT_BYTES else 32
    low, high = (0, (1 << bits) - 1) if format in "IQ" else (-(1 << bits - 1), (1 << bits - 1) - 1)
    check: Callable[[str, Any], Any] = _real(kind, format) if format in "fd" else _integer(kind, low, high)
    return ScalarType(wire_type, check, lambda value: pack(format, value), lambda data: unpack(format, data))


SCALARS: dict[str, ScalarType] = {
    "double": _fixed("double", "d"),
    "float": _fixed("float", "f"),
    "int32": _varint("int32", -(1 << 31), (1 << 31) - 1, lambda value: to_signed(value, 32)),
    "int64": _varint("int64", -(1 << 63), (1 << 63) - 1, to_signed),
    "uint32": _varint("uint32", 0, (1 << 32) - 1, lambda value: value & 0xFFFF_FFFF),
    "uint64": _varint("uint64", 0, (1 << 64) - 1, lambda value: value),
    "sint32": _varint("sint32", -(1 << 31), (1 << 31) - 1, lambda value: unzigzag(value & 0xFFFF_FFFF)),
    "sint64": _varint("sint64", -(1 << 63), (1 << 63) - 1, unzigzag),
    "fixed32": _fixed("fixed32", "I"),
    "fixed64": _fixed("fixed64", "Q"),
    "sfixed32": _fixed("sfixed32", "i"),
    "sfixed64": _fixed("sfixed64", "q"),
    "bool": ScalarType(WireType.VARINT, _instance("bool", bool), encode_varint, bool),
    "string": ScalarType(
        WireType.LENGTH_DELIMITED, _instance("string", str), str.encode, lambda data: decode_text(data, 0)
    ),
    "bytes": ScalarType(WireType.LENGTH_DELIMITED, _instance("bytes value", bytes), bytes, bytes),
}


def encode_value(scalar: ScalarType, number: int, value: Any) -> bytes:
    data = scalar.encode(value)
    if scalar.wire_type == WireType.LENGTH_DELIMITED:
        return encode_bytes(number, data)
    return encode_tag(number, scalar.wire_type) + data


def decode_value(scalar: ScalarType, number: int, wire_type: WireType, value: int | bytes, offset: int) -> Any:
    """Decode a field of one value, as `decode_fields` yields it. Raises WireError."""
    if wire_type != scalar.wire_type:
        raise WireError(f"field {number} has wire type {wire_type}, and must have {scalar.wire_type}", offset)
    return scalar.decode(value)


def decode_repeated(
    scalar: ScalarType, number: int, wire_type: WireType, value: int | bytes, offset: int
) -> Iterable[Any]:
    """Decode a repeated field: packed, or a value alone, as older writers write."""
    if wire_type == WireType.LENGTH_DELIMITED and scalar.wire_type != WireType.LENGTH_DELIMITED:
        assert isinstance(value, bytes)
        return [scalar.decode(each) for each in decode_packed(value, scalar.wire_type)]
    return [decode_value(scalar, number, wire_type, value, offset)]


def expect_number(number: int, wire_type: WireType, value: int | bytes, offset: int) -> int:
    """Return a field's value, which must be a varint. Raises WireError."""
    if not isinstance(value, int):
        raise WireError(f"field {number} has wire type {wire_type}, and must be a number", offset)
    return value


def expect_bytes(number: int, wire_type: WireType, value: int | bytes, offset: int) -> bytes:
    """Return a field's value, which must have a length. Raises WireError."""
    if wire_type != WireType.LENGTH_DELIMITED or not isinstance(value, bytes):
        raise WireError(f"field {number} has wire type {wire_type}, and must have a length", offset)
    return value


def decode_text(data: bytes, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError("a text is not UTF-8", offset) from error
