# SPDX-License-Identifier: Apache-2.0
"""Tests that what a pipeline stage is told of earlier modules' outputs is plain data,
and no peer chooses a class to import.
"""

import collections
import pickle
import random
import sys
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutputWithPast

from stretto.memory import PeerError
from stretto.memory.plain_data import pack
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, parallelize
from stretto.parallel.pipeline.activations import Activations, OutputLayouts, StandIns, tensors_of
from stretto.parallel.pipeline.message_format import MessageHeader, MessageKey
from tests.fuzzing import fuzz
from tests.memory.test_plain_data import Bomb, mutate


class Pair(NamedTuple):
    left: Tensor
    rest: list[Any]


HIDDEN, MASK = torch.ones(2, 3), torch.ones(4, dtype=torch.bool)
OUTPUTS: list[Any] = [
    HIDDEN,
    (HIDDEN, None, "text", 3, 0.5, True),
    [HIDDEN, (MASK,)],
    {"hidden": HIDDEN, 2: {"deep": [MASK]}},
    Pair(HIDDEN, [MASK, {"a": ()}]),
    collections.OrderedDict(b=HIDDEN, a=MASK),
    collections.deque([HIDDEN, 1], maxlen=5),
    torch.max(HIDDEN, 1),
    BaseModelOutputWithPast(last_hidden_state=HIDDEN, hidden_states=(HIDDEN, MASK)),
]


def stand_in_for(output: Any) -> Any:
    """Return what a later stage is given in the place of a module's output."""
    layouts = OutputLayouts()
    layouts.note("module", output)
    return StandIns(OutputLayouts.unpacked(layouts.packed()), torch.device("cpu")).make("module")


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: type(output).__name__)
def test_a_later_stage_gets_nan_or_zeros_in_the_structure_of_the_output(output):
    found = stand_in_for(output)
    assert type(found) is type(output)
    for given, made in zip(tree_leaves(output), tree_leaves(found), strict=True):
        if isinstance(given, Tensor):
            assert (made.shape, made.dtype) == (given.shape, given.dtype)
            assert made.isnan().all() if made.is_floating_point() else not made.any()
        else:
            assert made == given
    if isinstance(output, dict):
        assert list(found) == list(output)


def test_outputs_that_are_alike_are_described_once_and_calls_stay_in_order():
    layouts = OutputLayouts()
    for block in range(100):
        layouts.note(block, (HIDDEN, MASK))
    layouts.note("head", MASK)
    layouts.note("head", HIDDEN)
    packed = layouts.packed()
    assert packed.numel() < 4000
    assert OutputLayouts.unpacked(packed) == layouts


def test_an_output_that_no_receiver_could_rebuild_is_refused_by_name():
    class Local(NamedTuple):
        hidden: Tensor

    for output in (Local(HIDDEN), collections.defaultdict(list, a=HIDDEN)):
        with pytest.raises(ValueError, match=rf"{type(output).__name__}.*return a tuple or a dict"):
            stand_in_for(output)


@pytest.mark.parametrize(
    "name", ["antigravity:fly", "os:system", "builtins:eval", "subprocess:Popen", "x", ":", "a:b.c"]
)
def test_a_class_that_a_peer_names_is_neither_imported_nor_called(name):
    layouts = OutputLayouts()
    layouts.note("module", Pair(HIDDEN, []))
    ours = f"{Pair.__module__}:Pair"
    renamed = bytes(layouts.packed().tolist()).replace(ours.encode(), name.encode())
    with pytest.raises(ValueError, match="has not imported"):
        OutputLayouts.unpacked(torch.frombuffer(bytearray(renamed), dtype=torch.uint8))
    assert "antigravity" not in sys.modules


@pytest.mark.long
def test_thousands_of_mutated_messages_are_read_or_refused():
    layouts = OutputLayouts()
    for number, output in enumerate(OUTPUTS):
        layouts.note(number, output)
    message = Activations([HIDDEN], [0], layouts).as_message()
    packed, before = bytes(message[1].tolist()), set(sys.modules)
    header = bytes(MessageHeader.of(1, MessageKey("F", 1, 2), message).pack().tolist())

    def case(chance: random.Random) -> None:
        if chance.random() < 0.5:
            mutated = torch.frombuffer(bytearray(mutate(chance, packed)), dtype=torch.uint8)
            Activations.from_message([message[0], mutated, *message[2:]])
        else:
            MessageHeader.unpack(torch.frombuffer(bytearray(mutate(chance, header)), dtype=torch.uint8).clone())

    assert 0 < fuzz(case, 5000, ValueError) < 5000
    assert set(sys.modules) == before


FP32 = torch.float32


@pytest.mark.parametrize(
    "plain",
    [
        ("tensor", (-1,), FP32),
        ("tensor", (1 << 20, 1 << 20), FP32),
        ("tensor", (True,), FP32),
        ("tensor", (2,), "float32"),
        ("value", [1]),
        ("dict", [([], ("value", 1))]),
        ("object", f"{Pair.__module__}:Pair", None, [("value", 1)]),
        ("object", "collections:OrderedDict", 3, []),
        ("what", 1),
        None,
    ],
    ids=repr,
)
def test_a_forged_description_of_an_output_is_refused(plain):
    for packed in (pack(([plain], [("module", [0])])), pack(([("value", 1)], [("module", [1])]))):
        with pytest.raises(ValueError, match=r"described by nothing|describes no output|are not the parts"):
            OutputLayouts.unpacked(packed)


@pytest.mark.parametrize(
    ("place", "word"), [(1, 2), (1, -1), (5, 100), (7, -1), (7, 99), (8, 65), (8, 1 << 62), (9, -3), (9, 1 << 62)]
)
def test_a_forged_header_of_a_message_is_refused(place, word):
    words = MessageHeader.of(1, MessageKey("F", 1, 2), [HIDDEN]).pack().view(torch.int64)
    assert MessageHeader.unpack(words.view(torch.uint8))[1] == 8 * len(words)
    words[place] = word
    with pytest.raises(ValueError, match="the header of a message is damaged"):
        MessageHeader.unpack(words.view(torch.uint8))


def step_with_damaged_descriptions() -> str:
    grid = Grid(pipe=2, timeout=60)
    model = parallelize(GPT(GPTConfig(layers=2, hidden=16, heads=4, vocab=32, max_seq_len=8)), grid)
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    damaged = torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8)
    with (
        mock.patch.object(OutputLayouts, "packed", return_value=damaged),
        Pipeline(model, grid, micro_batch_size=2) as pipe,
    ):
        with pytest.raises(PeerError) as caught:
            pipe.step(tokens, tokens)
    return str(caught.value)


def test_a_stage_refuses_damaged_descriptions_with_the_name_of_the_rank_that_sent_them(ranks, capfd):
    of_sender, of_receiver = ranks(2).run(step_with_damaged_descriptions)
    assert "pipe rank 0 has sent activations that are damaged" in of_receiver
    assert "pipe rank 1" in of_sender
    assert "code of a peer" not in capfd.readouterr().out


def test_tensors_are_found_in_mappings_that_torch_takes_for_leaves() -> None:
    """Blocks hand keys on in transformers' KVSharingDict: unseen, a later stage would miss them."""
    found = tensors_of([MASK, {"keys": collections.UserDict({"full": (HIDDEN, MASK)})}])
    assert [id(each) for each in found] == [id(MASK), id(HIDDEN), id(MASK)]
