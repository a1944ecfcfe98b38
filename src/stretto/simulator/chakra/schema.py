# SPDX-License-Identifier: Apache-2.0
"""The messages of a Chakra execution trace (MLCommons' schema of a rank's operations), and their encoding by protobuf.

The field numbers are those of MLCommons' et_def.proto, package ChakraProtoMsg. Fields that it has and this table does
not (a storage node's details) are skipped.
"""

import functools
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

VERSION = "0.0.4"  # as the schema's own generator writes

SCALARS = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
)  # fmt: skip
"""Types of an attribute's value in protocol buffers, in the order of their fields."""

_MESSAGES = {
    **{f"{scalar}_list": [("values", f"repeated {scalar}")] for scalar in SCALARS},
    "TensorInfo": [("values", "string"), ("shapes", "string"), ("types", "string")],
    # A value is one of several (oneof), and written even where it is zero: double = 3, double_list = 4, float = 5, ...
    "Attribute": [
        ("name", "string"),
        ("doc", "string"),
        *((kind, kind) for scalar in SCALARS for kind in (scalar, f"{scalar}_list")),
    ],
    "Metadata": [("version", "string"), ("attributes", "repeated Attribute")],
    "ChakraNode": [
        ("id", "uint64"),
        ("name", "string"),
        ("type", "int32"),
        ("control_dependencies", "repeated uint64"),
        ("data_dependencies", "repeated uint64"),
        ("start_micros", "uint64"),
        ("duration_micros", "uint64"),
        ("inputs", "TensorInfo"),
        ("outputs", "TensorInfo"),
        ("attributes", "repeated Attribute"),
    ],
}
"""Each message's fields, numbered from 1: their names, and what they hold."""

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
        scalar = self.kind.removesuffix("_list")
        if scalar not in SCALARS:
            raise ValueError(f"attribute {self.name!r}: kind {self.kind!r} is none of {', '.join(SCALARS)}, or _list")
        if self.kind == scalar:
            object.__setattr__(self, "value", self._check(scalar, self.value))
        elif isinstance(self.value, tuple | list):
            object.__setattr__(self, "value", tuple(self._check(scalar, value) for value in self.value))
        else:
            raise ValueError(f"attribute {self.name!r} is {self.value!r}, but a {self.kind} is a tuple")

    def _check(self, scalar: str, value: Any) -> Any:
        """The value as a message holds it. ValueError for one that is of another type, or out of range."""
        try:
            held = getattr(messages()["Attribute"](**{scalar: value}), scalar)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"attribute {self.name!r} is {value!r}, which is no {scalar}: {error}") from error
        is_real = isinstance(held, float) and type(value) in (int, float) and math.isinf(held) == math.isinf(value)
        if not is_real and type(held) is not type(value):
            raise ValueError(f"attribute {self.name!r} is {value!r}, which is no {scalar}")
        return held


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


def to_message(value: ChakraNode | Metadata) -> Any:
    """Make the protobuf message of a node or of the metadata, `messages()[type(value).__name__]`."""
    made = messages()[type(value).__name__]()
    for attribute in value.attributes:
        one = made.attributes.add(name=attribute.name, doc=attribute.doc)
        if isinstance(attribute.value, tuple):
            getattr(one, attribute.kind).SetInParent()  # the list of no values is one, too
            getattr(one, attribute.kind).values.extend(attribute.value)
        else:
            setattr(one, attribute.kind, attribute.value)
    if isinstance(value, Metadata):
        made.version = value.version
        return made
    for name in ("id", "name", "type", "start_micros", "duration_micros"):
        setattr(made, name, getattr(value, name))
    made.control_dependencies.extend(value.control_dependencies)
    made.data_dependencies.extend(value.data_dependencies)
    for tensors, info in ((made.inputs, value.inputs), (made.outputs, value.outputs)):
        for name in ("values", "shapes", "types"):
            if text := getattr(info, name):
                setattr(tensors, name, text)
    return made


def node_of(message: Any) -> ChakraNode:
    """The node of a protobuf message."""
    return ChakraNode(
        id=message.id,
        name=message.name,
        type=NodeType(message.type) if message.type in NodeType._value2member_map_ else message.type,
        control_dependencies=tuple(message.control_dependencies),
        data_dependencies=tuple(message.data_dependencies),
        start_micros=message.start_micros,
        duration_micros=message.duration_micros,
        inputs=_tensors_of(message.inputs),
        outputs=_tensors_of(message.outputs),
        attributes=_attributes_of(message),
    )


def metadata_of(message: Any) -> Metadata:
    """The metadata of the message with which a file begins."""
    return Metadata(message.version, _attributes_of(message))


def _tensors_of(message: Any) -> TensorInfo:
    return TensorInfo(message.values, message.shapes, message.types)


def _attributes_of(message: Any) -> tuple[Attribute, ...]:
    """The attributes that have a value, of a kind that is known."""
    found = []
    for each in message.attributes:
        if (kind := each.WhichOneof("value")) is not None:
            value = getattr(each, kind)
            found.append(Attribute(each.name, kind, tuple(value.values) if kind.endswith("_list") else value, each.doc))
    return tuple(found)


@functools.cache
def messages() -> dict[str, Any]:
    """The classes of messages, by name. ValueError where protobuf is not installed."""
    try:
        from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
        from google.protobuf.descriptor_pool import DescriptorPool
        from google.protobuf.message_factory import GetMessageClass
    except ImportError as error:
        raise ValueError("Chakra traces need the package protobuf: pip install 'stretto[chakra]'") from error
    file = FileDescriptorProto(name="chakra.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields, 1):
            one = message.field.add(name=field, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if kind.startswith("repeated "):
                one.label = FieldDescriptorProto.LABEL_REPEATED
                kind = kind.removeprefix("repeated ")
            if kind in SCALARS:
                one.type = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}")
            else:
                one.type, one.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{file.package}.{kind}"
            if name == "Attribute" and field == kind:
                one.oneof_index = 0
        if name == "Attribute":
            message.oneof_decl.add(name="value")
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in _MESSAGES}
