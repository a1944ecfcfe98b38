# SPDX-License-Identifier: Apache-2.0
"""The messages of a Chakra execution trace (MLCommons' schema of a rank's operations), and their encoding.

The field numbers are those of MLCommons' et_def.proto, package ChakraProtoMsg. Fields that it has and this table does
not (a storage node's details) are skipped.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from stretto.simulator.chakra.scalars import (
    SCALARS,
    decode_repeated,
    decode_text,
    decode_value,
    encode_value,
    expect_bytes,
    expect_number,
)
from stretto.simulator.chakra.wire import WireType, decode_fields, encode_bytes, encode_tag, encode_varint, to_signed

VERSION = "0.0.4"  # as the schema's own generator writes

Value = bool | int | float | str | bytes | tuple[bool | int | float | str | bytes, ...]


class NodeType(IntEnum):
    """Kind of a node's work."""

    INVALID_NODE = 0
    METADATA_NODE = 1
    MEM_LOAD_NODE = 2
    MEM_STORE_NODE = 3
    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7
    STORAGE_NODE = 8
    BATCH_NODE = 9
    CHECKPOINT_NODE = 10


class CollectiveType(IntEnum):
    """The attribute comm_type of a COMM_COLL_NODE."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(frozen=True, slots=True)
class Attribute:
    """A named value of a node or of a trace.

    kind: the type of the value in protocol buffers (double, float, int32, int64, uint32, uint64, sint32, sint64,
    fixed32, fixed64, sfixed32, sfixed64, bool, string, bytes), or it with "_list" for a tuple of such values. Raises
    ValueError for an unknown kind and for a value that it cannot hold. A float is rounded to 32 bits.
    """

    name: str
    kind: str
    value: Value
    doc: str = ""

    def __post_init__(self) -> None:
        kind = self.kind.removesuffix("_list")
        if kind not in SCALARS:
            raise ValueError(f"attribute {self.name!r}: kind {self.kind!r} is none of {', '.join(SCALARS)}, or _list")
        if self.kind == kind:
            object.__setattr__(self, "value", SCALARS[kind].check(self.name, self.value))
        elif isinstance(self.value, tuple | list):
            checked = tuple(SCALARS[kind].check(self.name, value) for value in self.value)
            object.__setattr__(self, "value", checked)
        else:
            raise ValueError(f"attribute {self.name!r} is {self.value!r}, but a {self.kind} is a tuple")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A node's inputs or outputs as text: values, shapes and types."""

    values: str = ""
    shapes: str = ""
    types: str = ""


@dataclass(frozen=True, slots=True)
class ChakraNode:
    """A node of a rank's trace. It begins when the nodes in both kinds of dependencies have ended."""

    id: int
    name: str = ""
    type: int = NodeType.INVALID_NODE  # a NodeType, or a number that this schema does not know
    control_dependencies: tuple[int, ...] = ()
    data_dependencies: tuple[int, ...] = ()
    start_micros: int = 0
    duration_micros: int = 0
    inputs: TensorInfo = TensorInfo()
    outputs: TensorInfo = TensorInfo()
    attributes: tuple[Attribute, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, the last of that name; `default` where there is none."""
        for attribute in reversed(self.attributes):
            if attribute.name == name:
                return attribute.value
        return default

    def describe(self, rank: int) -> str:
        """Name the node in messages for users."""
        return f"rank {rank}'s node {self.id} {self.name!r}"


@dataclass(frozen=True, slots=True)
class Metadata:
    """The first message of a file."""

    version: str = VERSION
    attributes: tuple[Attribute, ...] = ()


def encode_node(node: ChakraNode) -> bytes:
    """Encode a node as a protobuf message. Zeros and empty texts are left out, as proto3 does."""
    out = bytearray(_encode_number(1, node.id))
    if node.name:
        out += encode_bytes(2, node.name.encode())
    out += _encode_number(3, node.type)
    for number, dependencies in ((4, node.control_dependencies), (5, node.data_dependencies)):
        if dependencies:
            out += encode_bytes(number, b"".join(map(encode_varint, dependencies)))
    out += _encode_number(6, node.start_micros) + _encode_number(7, node.duration_micros)
    for number, info in ((8, node.inputs), (9, node.outputs)):
        if info != TensorInfo():
            texts = ((1, info.values), (2, info.shapes), (3, info.types))
            out += encode_bytes(number, b"".join(encode_bytes(place, text.encode()) for place, text in texts if text))
    out += b"".join(encode_bytes(10, encode_attribute(attribute)) for attribute in node.attributes)
    return bytes(out)


def decode_node(data: bytes) -> ChakraNode:
    """Decode a node. Raises WireError for bytes that are none."""
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    name, dependencies = "", {4: [], 5: []}  # type: tuple[str, dict[int, list[int]]]
    infos, attributes = {8: TensorInfo(), 9: TensorInfo()}, []
    for number, wire_type, value, offset in decode_fields(data):
        if number in numbers:
            numbers[number] = expect_number(number, wire_type, value, offset)
        elif number == 2:
            name = decode_text(expect_bytes(number, wire_type, value, offset), offset)
        elif number in dependencies:
            dependencies[number] += decode_repeated(SCALARS["uint64"], number, wire_type, value, offset)
        elif number in infos:
            infos[number] = _decode_info(expect_bytes(number, wire_type, value, offset), infos[number])
        elif number == 10:
            attributes.append(decode_attribute(expect_bytes(number, wire_type, value, offset)))
    kind = to_signed(numbers[3], 32)
    return ChakraNode(
        id=numbers[1],
        name=name,
        type=NodeType(kind) if kind in NodeType._value2member_map_ else kind,
        control_dependencies=tuple(dependencies[4]),
        data_dependencies=tuple(dependencies[5]),
        start_micros=numbers[6],
        duration_micros=numbers[7],
        inputs=infos[8],
        outputs=infos[9],
        attributes=tuple(attribute for attribute in attributes if attribute is not None),
    )


def encode_metadata(metadata: Metadata) -> bytes:
    version = encode_bytes(1, metadata.version.encode()) if metadata.version else b""
    return version + b"".join(encode_bytes(2, encode_attribute(attribute)) for attribute in metadata.attributes)


def decode_metadata(data: bytes) -> Metadata:
    """Decode the message with which a file begins. Raises WireError."""
    version, attributes = "", []
    for number, wire_type, value, offset in decode_fields(data):
        if number == 1:
            version = decode_text(expect_bytes(number, wire_type, value, offset), offset)
        elif number == 2:
            attributes.append(decode_attribute(expect_bytes(number, wire_type, value, offset)))
    return Metadata(version, tuple(attribute for attribute in attributes if attribute is not None))


def encode_attribute(attribute: Attribute) -> bytes:
    """Encode an attribute. A value is written even where it is zero, since it is one of several (oneof)."""
    out = encode_bytes(1, attribute.name.encode()) + (encode_bytes(2, attribute.doc.encode()) if attribute.doc else b"")
    scalar, number = SCALARS[attribute.kind.removesuffix("_list")], _NUMBERS[attribute.kind]
    if not attribute.kind.endswith("_list"):
        return out + encode_value(scalar, number, attribute.value)
    assert isinstance(attribute.value, tuple)
    if scalar.wire_type == WireType.LENGTH_DELIMITED:
        values = b"".join(encode_bytes(1, scalar.encode(value)) for value in attribute.value)
    else:
        packed = b"".join(map(scalar.encode, attribute.value))
        values = encode_bytes(1, packed) if packed else b""
    return out + encode_bytes(number, values)


def decode_attribute(data: bytes) -> Attribute | None:
    """Decode an attribute; None if it has no value, or one of an unknown kind. Raises WireError."""
    name = doc = ""
    kind, found = "", None  # type: tuple[str, Value | None]
    for number, wire_type, value, offset in decode_fields(data):
        if number in (1, 2):
            text = decode_text(expect_bytes(number, wire_type, value, offset), offset)
            name, doc = (text, doc) if number == 1 else (name, text)
        elif number in _KINDS:
            before, kind = kind, _KINDS[number]
            scalar = SCALARS[kind.removesuffix("_list")]
            if not kind.endswith("_list"):
                found = decode_value(scalar, number, wire_type, value, offset)
                continue
            row = list(found) if before == kind and isinstance(found, tuple) else []  # a message in parts is merged
            for place, inner_type, inner, inner_offset in decode_fields(expect_bytes(number, wire_type, value, offset)):
                if place == 1:
                    row += decode_repeated(scalar, place, inner_type, inner, inner_offset)
            found = tuple(row)
    return None if found is None else Attribute(name, kind, found, doc)


def _encode_number(number: int, value: int) -> bytes:
    return encode_tag(number, WireType.VARINT) + encode_varint(value) if value else b""


def _decode_info(data: bytes, info: TensorInfo) -> TensorInfo:
    texts = [info.values, info.shapes, info.types]
    for number, wire_type, value, offset in decode_fields(data):
        if 1 <= number <= 3:
            texts[number - 1] = decode_text(expect_bytes(number, wire_type, value, offset), offset)
    return TensorInfo(*texts)


# AttributeProto's oneof: double_val = 3, double_list = 4, float_val = 5, ... in the order of SCALARS.
_NUMBERS = {
    kind: number
    for place, scalar in enumerate(SCALARS)
    for kind, number in ((scalar, 3 + 2 * place), (f"{scalar}_list", 4 + 2 * place))
}
_KINDS = {number: kind for kind, number in _NUMBERS.items()}
