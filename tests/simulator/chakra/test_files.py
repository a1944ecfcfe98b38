# SPDX-License-Identifier: Apache-2.0
"""Chakra's files: bytes worked out by hand from protocol buffers' rules, all kinds of values, and broken files."""

import dataclasses
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzzing import fuzz

from stretto.simulator.chakra import (
    Attribute,
    ChakraNode,
    ChakraTrace,
    Metadata,
    NodeType,
    TensorInfo,
    files,
    read_chakra,
    write_chakra,
)
from stretto.simulator.chakra.schema import messages, node_of, to_message

# Worked out by hand. A field's tag is number x 8 + wire type: 0 a varint, 2 a length, 1 eight bytes.
BY_HAND = bytes.fromhex(
    "07"  # the metadata has 7 bytes
    "0a05"
    "302e302e34"  # field 1, a length of 5: version "0.0.4"
    "1b"  # a node of 27 bytes
    "0801"  # field 1: id 1
    "1202"
    "6d6d"  # field 2, a length of 2: name "mm"
    "1804"  # field 3: type 4, COMP_NODE
    "38ac02"  # field 7: duration_micros 300 = 0b10_0101100: the low 7 bits with the mark, 0xac, then 2
    "520e"  # field 10, an attribute of 14 bytes
    "0a09"
    "69735f6370755f6f70"  # its field 1, a length of 9: "is_cpu_op"
    "d80100"  # its field 27 (27 x 8 = 216 = 0xd8 0x01): bool_val false
    "36"  # a node of 54 bytes
    "0802"  # id 2
    "1807"  # type 7, COMM_COLL_NODE
    "2a0101"  # field 5, packed, a length of 1: data_deps [1]
    "520d"
    "0a09"
    "636f6d6d5f74797065"
    "4806"  # "comm_type", field 9: int64_val 6, ALL_TO_ALL
    "520f"
    "0a09"
    "636f6d6d5f73697a65"
    "68808040"  # "comm_size", field 13: uint64_val 2**20, two bytes of 0 marked
    "520d"
    "0a01"
    "61"
    "1206"
    "64656c746173"
    "7805"  # "a", doc_string "deltas", field 15: sint32_val -3, zigzag 5
)
NODES = (
    ChakraNode(1, "mm", NodeType.COMP_NODE, duration_micros=300, attributes=(Attribute("is_cpu_op", "bool", False),)),
    ChakraNode(
        2,
        type=NodeType.COMM_COLL_NODE,
        data_dependencies=(1,),
        attributes=(
            Attribute("comm_type", "int64", 6),
            Attribute("comm_size", "uint64", 1 << 20),
            Attribute("a", "sint32", -3, doc="deltas"),
        ),
    ),
)
# What protobuf 7.36.2 writes for a node with an attribute of each kind, by MLCommons' field numbers.
EVERY_KIND = bytes.fromhex(
    "0803120a6576657279206b696e641804220301ac022a01023005388080808020420e0a055b2778275d12055b5b325d5d4a0b1a09"
    "5b27666c6f6174275d52160a06646f75626c6512036f6e6519000000000000f8bf521d0a07646f75626c657322120a1000000000"
    "0000f8bf000000000000f8bf52110a05666c6f617412036f6e652d0000803e52140a06666c6f617473320a0a080000803e000080"
    "3e52170a05696e74333212036f6e6538feffffffffffffffff0152200a06696e7433327342160a14feffffffffffffffff01feff"
    "ffffffffffffff0152170a05696e74363412036f6e65488080808080e0ffffff0152200a06696e7436347352160a148080808080"
    "e0ffffff018080808080e0ffffff0152130a0675696e74333212036f6e655880d0acf30e52170a0775696e74333273620c0a0a80"
    "d0acf30e80d0acf30e52180a0675696e74363412036f6e6568ffffffffffffffffff0152210a0775696e7436347372160a14ffff"
    "ffffffffffffff01ffffffffffffffffff01520f0a0673696e74333212036f6e65780552100a0773696e743332738201040a0205"
    "0552180a0673696e74363412036f6e658801ffffffffffffffff7f52200a0773696e743634739201140a12ffffffffffffffff7f"
    "ffffffffffffffff7f52140a076669786564333212036f6e659d010700000052170a086669786564333273a2010a0a0807000000"
    "0700000052180a076669786564363412036f6e65a9010000000000000010521f0a086669786564363473b201120a100000000000"
    "000010000000000000001052150a08736669786564333212036f6e65bd01f9ffffff52180a09736669786564333273c2010a0a08"
    "f9fffffff9ffffff52190a08736669786564363412036f6e65c90100000000000000f052200a09736669786564363473d201120a"
    "1000000000000000f000000000000000f0520e0a04626f6f6c12036f6e65d80101520e0a05626f6f6c73e201040a02010052180a"
    "06737472696e6712036f6e65ea0108746f72757320c3bc52200a07737472696e6773f201140a08746f72757320c3bc0a08746f72"
    "757320c3bc52110a05627974657312036f6e65fa010200ff52130a066279746573738202080a0200ff0a0200ff"
)
KINDS = {
    "double": -1.5,
    "float": 0.25,
    "int32": -2,
    "int64": -(1 << 40),
    "uint32": 4_000_000_000,
    "uint64": (1 << 64) - 1,
    "sint32": -3,
    "sint64": -(1 << 62),
    "fixed32": 7,
    "fixed64": 1 << 60,
    "sfixed32": -7,
    "sfixed64": -(1 << 60),
    "bool": True,
    "string": "torus ü",
    "bytes": b"\x00\xff",
}


def decode_node(data):
    return node_of(messages()["ChakraNode"].FromString(data))


def encode_node(node):
    return to_message(node).SerializeToString()


def read_bytes(folder, data):
    (folder / "t.0.et").write_bytes(data)
    return read_chakra(folder / "t")


def test_bytes_encoded_by_hand_are_read(tmp_path):
    trace = read_bytes(tmp_path, BY_HAND)
    assert trace.metadata == Metadata("0.0.4")
    assert trace.nodes == (NODES,)
    assert trace.nodes[0][1].get("comm_size") == 1 << 20
    assert trace.nodes[0][1].get("comm_tag", 7) == 7


def test_an_attributes_fields_may_be_in_any_order_and_numbers_unpacked():
    unpacked = bytes.fromhex("20052006")  # field 4, ctrl_deps, one number each, as proto2 writes
    assert decode_node(unpacked).control_dependencies == (5, 6)
    value_first = bytes.fromhex("520548060a0161")
    assert decode_node(value_first).attributes == (Attribute("a", "int64", 6),)


def test_every_kind_of_value_has_the_schemas_field():
    node = decode_node(EVERY_KIND)
    assert (node.id, node.name, node.type) == (3, "every kind", NodeType.COMP_NODE)
    assert (node.control_dependencies, node.data_dependencies) == ((1, 300), (2,))
    assert (node.start_micros, node.duration_micros) == (5, 1 << 33)
    assert node.inputs == TensorInfo(values="['x']", shapes="[[2]]")
    assert node.outputs == TensorInfo(types="['float']")
    for kind, value in KINDS.items():
        second = False if kind == "bool" else value
        assert node.get(kind) == value, kind
        assert node.get(kind + "s") == (value, second), kind
    assert encode_node(node) == EVERY_KIND


def test_fields_that_the_schema_does_not_know_are_read_over():
    storage = bytes.fromhex("5a020801")  # field 11, a storage node's own message
    assert decode_node(storage + encode_node(NODES[0])) == NODES[0]
    assert decode_node(bytes.fromhex("184d")).type == 77  # a type that this schema does not know
    assert decode_node(bytes.fromhex("52030a0161")).attributes == ()  # an attribute without a value


texts = st.text(st.characters(codec="utf-8"), max_size=8)
unsigned = st.integers(0, (1 << 64) - 1)
VALUES = {
    "double": st.floats(allow_nan=False),
    "float": st.floats(allow_nan=False, width=32),
    "bool": st.booleans(),
    "string": texts,
    "bytes": st.binary(max_size=8),
} | {
    sign + fixed + bits: st.integers(
        0 if sign == "u" or (fixed == "fixed" and sign == "") else -(1 << int(bits) - 1),
        (1 << int(bits)) - 1 if sign == "u" or (fixed == "fixed" and sign == "") else (1 << int(bits) - 1) - 1,
    )
    for bits in ("32", "64")
    for sign, fixed in (("", "int"), ("u", "int"), ("s", "int"), ("", "fixed"), ("s", "fixed"))
}
attributes = st.sampled_from(sorted(VALUES)).flatmap(
    lambda kind: st.one_of(
        st.builds(Attribute, texts, st.just(kind), VALUES[kind], texts),
        st.builds(Attribute, texts, st.just(kind + "_list"), st.lists(VALUES[kind], max_size=4).map(tuple), texts),
    )
)
infos = st.builds(TensorInfo, texts, texts, texts)
nodes = st.builds(
    ChakraNode,
    unsigned,
    texts,
    st.sampled_from(NodeType),
    st.lists(unsigned, max_size=4).map(tuple),
    st.lists(unsigned, max_size=4).map(tuple),
    unsigned,
    unsigned,
    infos,
    infos,
    st.lists(attributes, max_size=4).map(tuple),
)


def test_the_kinds_of_the_properties_are_all_kinds():
    assert sorted(VALUES) == sorted(KINDS)


@given(nodes)
def test_a_node_is_read_as_it_was_written(node):
    assert decode_node(encode_node(node)) == node


@pytest.mark.long
@settings(max_examples=30)
@given(st.lists(st.lists(nodes, max_size=3).map(tuple), min_size=1, max_size=3))
def test_a_trace_is_read_as_it_was_written(tmp_path_factory, ranks):
    trace = ChakraTrace(tuple(ranks), {"7": (0,)}, Metadata("0.0.4", (Attribute("made by", "string", "a test"),)))
    prefix = tmp_path_factory.mktemp("trace") / "step"
    paths = write_chakra(trace, prefix)
    assert [path.name for path in paths] == [*(f"step.{rank}.et" for rank in range(len(ranks))), "step.groups.json"]
    assert read_chakra(prefix) == trace


@pytest.mark.long
def test_random_bytes_are_read_or_refused_in_one_line(tmp_path):
    def case(rng):
        data = bytearray(rng.choice([BY_HAND, bytes([len(EVERY_KIND) & 127 | 128, len(EVERY_KIND) >> 7]) + EVERY_KIND]))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randrange(1, 9)]
                case _:
                    data[at:at] = rng.randbytes(rng.randrange(9))
            if not data:
                break
        read_bytes(tmp_path, bytes(data))

    accepted = fuzz(case, 500, ValueError)
    assert 0 < accepted < 500


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (BY_HAND[:-1], "near byte 36, "),
        (BY_HAND[:20], "near byte 8, "),
        (b"\x1f\x8b\x08\x00", "is compressed: unpack it with gunzip"),
        (b"\xff\xff\xff\xff\x7f", "near byte 0, Truncated message"),
        (b"\xff" * 9 + b"\x01", "is no Chakra trace: near byte 0, "),
        (b"\xff" * 11, "Too many bytes"),
        (BY_HAND[:8] + b"\x02\x0a\x05", "near byte 8, "),
        (BY_HAND[:8] + b"\x02\x0b\x00", "near byte 8, "),
        (BY_HAND[:8] + b"\x03\x12\x01\xff", "bad UTF-8"),
    ],
)
def test_an_invalid_trace_raises_with_the_place(tmp_path, data, message):
    with pytest.raises(ValueError, match=r"t\.0\.et") as error:
        read_bytes(tmp_path, data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_ranks_and_prefixes_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*none\.0\.et"):
        read_chakra(tmp_path / "none")
    for rank in (0, 2):
        (tmp_path / f"t.{rank}.et").write_bytes(BY_HAND)
    with pytest.raises(ValueError, match=r"there is no .*t\.1\.et, but there is .*t\.2\.et"):
        read_chakra(tmp_path / "t")


def test_sizes_are_bounded_before_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match=r"is larger than 10 bytes, the most a rank of a trace"):
        read_bytes(tmp_path, BY_HAND)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="more than"):
        files.read_rank(tmp_path / "t.0.et", max_nodes=1)


def test_a_pipe_in_place_of_a_rank_or_of_groups_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.0.et")
    with pytest.raises(ValueError, match=r"pipe\.0\.et: is not a regular file"):
        read_chakra(tmp_path / "pipe")
    write_chakra(ChakraTrace(((),)), tmp_path / "one")
    with pytest.raises(ValueError, match=r"pipe\.0\.et: is not a regular file"):
        read_chakra(tmp_path / "one", groups=tmp_path / "pipe.0.et")


def test_groups_are_read_from_a_file_or_from_the_traces_own_nodes(tmp_path):
    node = files.group_node(0, {"3": (1, 0), "4": ()})
    write_chakra(ChakraTrace(((node,), ())), tmp_path / "t")
    assert dict(read_chakra(tmp_path / "t").groups) == {"3": (1, 0), "4": (0, 1)}
    (tmp_path / "g.json").write_text('{"5": [0]}')
    assert read_chakra(tmp_path / "t", groups=tmp_path / "g.json").group("5") == (0,)
    other = files.group_node(1, {"3": (0, 1)})
    for rank in ((node, other), (other, node)):
        write_chakra(ChakraTrace((rank, ())), tmp_path / "two")
        with pytest.raises(
            ValueError, match=r"rank 0's node . .* group '3' is .* another node .*: give a file of groups"
        ):
            read_chakra(tmp_path / "two")
    (tmp_path / "g.json").write_text('{"3": [1]}')
    assert read_chakra(tmp_path / "two", groups=tmp_path / "g.json").group("3") == (1,)
    (tmp_path / "g.json").write_text('{"5": [0, 9]}')
    with pytest.raises(ValueError, match=r"group '5' is \[0, 9\], but must be different ranks from 0 to 1"):
        read_chakra(tmp_path / "t", groups=tmp_path / "g.json")
    (tmp_path / "g.json").write_text("[")
    with pytest.raises(ValueError, match="is no JSON"):
        read_chakra(tmp_path / "t", groups=tmp_path / "g.json")


@pytest.mark.parametrize(
    ("kind", "value"), [("int32", 1 << 31), ("uint64", -1), ("bool", 1), ("double", "1"), ("int64", 1.0), ("half", 1.0)]
)
def test_an_attribute_refuses_what_it_cannot_hold(kind, value):
    with pytest.raises(ValueError, match="attribute 'a'"):
        Attribute("a", kind, value)


def test_without_protobuf_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    monkeypatch.setitem(sys.modules, "google.protobuf.descriptor_pb2", None)
    messages.cache_clear()
    (tmp_path / "t.0.et").write_bytes(BY_HAND)
    with pytest.raises(ValueError, match=r"pip install 'stretto\[chakra\]'"):
        read_chakra(tmp_path / "t")


def test_a_node_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        NODES[0].id = 5
