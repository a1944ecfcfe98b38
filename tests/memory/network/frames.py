# SPDX-License-Identifier: Apache-2.0
"""Frames as a peer that plays a proxy writes them (native/proxy.cpp describes them)."""

import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = 0x50545253
VERSION = 1
NO_SIGNAL = 0xFFFFFFFF
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


def pack_frame(frame: PutFrame, token: bytes) -> bytes:
    """The frame's header."""
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
