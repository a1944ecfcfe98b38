# SPDX-License-Identifier: Apache-2.0
"""Frames: the messages between two proxies, the same in Python and in C++ (native/proxy.cpp).

A frame is a header of 64 bytes, little endian, then the payload of a put:

    0 magic (4)     4 version (1)   5 kind (1)      6 zeros (2)     8 token (16)    24 source rank (4)
    28 region (4)   32 number (8)   40 received (8) 48 offset (8)   56 bytes (4)    60 signal (4)

The sender numbers the puts to a peer 1, 2, 3 and so on. `received` is how many of the peer's puts have arrived here
without a gap: it acknowledges them, and in a greeting it tells the peer which ones to send again. Payloads are bytes of
a registered region, never pickled. The token is the job's: a connection whose frames lack it is closed.
"""

import hmac
import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = 0x50545253
VERSION = 1
TOKEN_BYTES = 16
NO_SIGNAL = 0xFFFFFFFF
MAX_PUT_BYTES = 1 << 30
"""The most bytes of one put."""
_HEADER = struct.Struct("<IBBH16sIIQQQII")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    """Kinds of frames: greeting of a new connection, put, acknowledgement, and orderly end."""

    HELLO = 1
    PUT = 2
    ACK = 3
    BYE = 4


class PutFrame(NamedTuple):
    """The header of a frame, without magic, version and token."""

    kind: FrameKind
    source: int
    number: int = 0
    received: int = 0
    region: int = 0
    offset: int = 0
    size: int = 0
    signal: int = NO_SIGNAL


class FrameError(Exception):
    """Bytes from a peer that are no frame of this job, or that name memory outside of its regions."""


def pack_frame(frame: PutFrame, token: bytes) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        frame.kind,
        0,
        token,
        frame.source,
        frame.region,
        frame.number,
        frame.received,
        frame.offset,
        frame.size,
        frame.signal,
    )


def unpack_frame(header: bytes | memoryview, token: bytes) -> PutFrame:
    """Read a header. FrameError for another magic, version, kind or token, and for a size above the limit."""
    magic, version, kind, zeros, theirs, source, region, number, received, offset, size, signal = _HEADER.unpack(header)
    if magic != MAGIC or version != VERSION or zeros:
        raise FrameError("it is no frame of this version of Stretto")
    if not hmac.compare_digest(theirs, token):
        raise FrameError("it has not the job's token")
    if kind not in _KINDS:
        raise FrameError(f"there is no kind {kind} of frames")
    if size > MAX_PUT_BYTES or (size and kind != FrameKind.PUT):
        raise FrameError(f"a frame of kind {FrameKind(kind).name} with {size} bytes")
    return PutFrame(FrameKind(kind), source, number, received, region, offset, size, signal)


_KINDS = frozenset(FrameKind)
