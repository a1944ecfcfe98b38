# SPDX-License-Identifier: Apache-2.0
"""Protocol buffers' wire format: varints, tagged fields and length-delimited messages.

A message is a row of fields, each a tag (field number x 8 + wire type, as a varint) and a value of one of four wire
types: a varint, 8 bytes, a varint length with so many bytes, or 4 bytes. A file of messages has before each message its
length as a varint. That is all of the format that a Chakra trace uses, so there is no library here: `wire` checks every
length against the file before it allocates, and names the byte at which a file is invalid.
"""

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum

MAX_VARINT_BYTES = 10  # of a 64-bit number
_BITS = 0xFFFF_FFFF_FFFF_FFFF


class WireType(IntEnum):
    """Encoding of a field's value. Groups (3 and 4) are not in proto3."""

    VARINT = 0
    EIGHT_BYTES = 1
    LENGTH_DELIMITED = 2
    FOUR_BYTES = 5


class WireError(ValueError):
    """Bytes that are no message; `offset` is where, from the start of the bytes that were read."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def encode_varint(value: int) -> bytes:
    """Encode a number of 64 bits, 7 bits a byte, the lowest first. A negative one is its two's complement, 10 bytes."""
    value &= _BITS
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at `at`; returns it as an unsigned number, and where the next byte is."""
    value = 0
    for place in range(MAX_VARINT_BYTES):
        if at + place >= len(data):
            raise WireError("a number is cut off", at)
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value > _BITS:
                raise WireError("a number has more than 64 bits", at)
            return value, at + place + 1
    raise WireError(f"a number has more than {MAX_VARINT_BYTES} bytes", at)


def to_signed(value: int, bits: int = 64) -> int:
    """Read the low `bits` of an unsigned number as two's complement, as int32, int64 and enumerations are stored."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def zigzag(value: int) -> int:
    """Map 0, -1, 1, -2, ... to 0, 1, 2, 3, ...: how sint32 and sint64 are stored."""
    return (value << 1) ^ (value >> 63)


def unzigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def encode_tag(number: int, wire_type: WireType) -> bytes:
    return encode_varint(number << 3 | wire_type)


def encode_bytes(number: int, value: bytes) -> bytes:
    """Encode a length-delimited field: a string, bytes, a message within the message, or packed numbers."""
    return encode_tag(number, WireType.LENGTH_DELIMITED) + encode_varint(len(value)) + value


def decode_fields(data: bytes) -> Iterator[tuple[int, WireType, int | bytes, int]]:
    """Yield a message's fields: number, wire type, value and offset.

    The value is an unsigned number for a varint, and the bytes for other wire types. Raises WireError.
    """
    at, end = 0, len(data)
    while at < end:
        start = at
        tag, at = decode_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if not 1 <= number < 1 << 29:
            raise WireError(f"field number {number} is none", start)
        if kind == WireType.VARINT:
            value, at = decode_varint(data, at)
            yield number, WireType.VARINT, value, start
            continue
        if kind == WireType.LENGTH_DELIMITED:
            length, at = decode_varint(data, at)
        elif kind == WireType.EIGHT_BYTES:
            length = 8
        elif kind == WireType.FOUR_BYTES:
            length = 4
        else:
            raise WireError(f"field {number} has wire type {kind}, which proto3 does not have", start)
        if length > end - at:
            raise WireError(f"field {number} has {length:,} bytes, and only {end - at:,} are left", start)
        yield number, WireType(kind), data[at : at + length], start
        at += length


def decode_packed(data: bytes, wire_type: WireType) -> Iterator[int | bytes]:
    """Yield the values of a packed field: unsigned numbers for varints, else 4 or 8 bytes each. Raises WireError."""
    if wire_type == WireType.VARINT:
        at = 0
        while at < len(data):
            value, at = decode_varint(data, at)
            yield value
        return
    size = 8 if wire_type == WireType.EIGHT_BYTES else 4
    if len(data) % size:
        raise WireError(f"{len(data)} bytes are no row of numbers of {size} bytes", 0)
    yield from (data[at : at + size] for at in range(0, len(data), size))


def unpack(format: str, data: bytes) -> int | float:
    """Decode a number of 4 or 8 bytes, little-endian; `format` as struct's, one letter."""
    return struct.unpack("<" + format, data)[0]


def pack(format: str, value: int | float) -> bytes:
    """Encode a number of 4 or 8 bytes, little-endian."""
    return struct.pack("<" + format, value)


def join_delimited(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each message after its length, as a file of messages holds them."""
    for message in messages:
        yield encode_varint(len(message)) + message


def split_delimited(data: bytes, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the messages of a file, each with the offset of its first byte. Raises WireError."""
    at = 0
    while at < len(data):
        start = at
        length, at = decode_varint(data, at)
        if length > max_bytes:
            raise WireError(f"a message of {length:,} bytes is longer than {max_bytes:,}", start)
        if length > len(data) - at:
            raise WireError(f"the file ends within a message: {len(data) - at:,} of {length:,} bytes are there", start)
        yield data[at : at + length], at
        at += length
