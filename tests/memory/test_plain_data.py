# SPDX-License-Identifier: Apache-2.0
"""Ranks exchange plain data of a type that the receiver names: a damaged message runs no code, and names its sender."""

import math
import pickle
import random
import resource
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.fuzzing import fuzz

from stretto.memory import PeerError, exchange, plain_data
from stretto.memory.plain_data import MAX_BYTES, all_gather_data, broadcast_data, pack, unpack


class Place(NamedTuple):
    host: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Offer:
    place: Place
    dtype: torch.dtype | None
    times: dict[str, list[float]]


OFFER = Offer(Place("hôst", (1, 2)), torch.bfloat16, {"a b": [0.1, 1e-300, math.inf], "": []})
KINDS: list[tuple[Any, Any]] = [
    (None, str | None),
    (True, bool),
    (-(2**63), int),
    (0.1, float),
    ("ü\n\0", str),
    (b"\0\xff", bytes),
    (torch.float8_e4m3fn, torch.dtype),
    ("two", Literal["one", "two"]),
    ((1, "a"), tuple[int, str]),
    ((), tuple[int, ...]),
    ([(1, None), (2, "b")], list[tuple[int, str | None]]),
    ({(1, 2): [True], (): []}, dict[tuple[int, ...], list[bool]]),
    (Place("here", (3,)), Place),
    (OFFER, Offer),
    ({"any": [1, (2.5, None, {"b": b"c"})]}, Any),
]


@pytest.mark.parametrize(("value", "kind"), KINDS, ids=[str(kind) for _, kind in KINDS])
def test_a_value_arrives_as_it_was_and_of_the_same_type(value, kind):
    found = unpack(pack(value), kind)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, str),
        (1, bool),
        (True, int),
        (1.5, int),
        ("a", None),
        ((1, 2), tuple[int]),
        ([1], list[str]),
        ((1,), Place),
        ({1: 2}, dict[str, int]),
        ("three", Literal["one"]),
        ({"a": 1}, list[int]),
        (("h", (1,)), Offer),
    ],
    ids=str,
)
def test_a_value_of_another_type_than_the_receiver_expects_is_refused(value, kind):
    with pytest.raises(ValueError, match=r"type|parts"):
        unpack(pack(value), kind)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, torch.ones(2), len, 1j, [Place]], ids=lambda value: type(value).__name__
)
def test_what_is_no_plain_data_is_refused_before_it_is_sent(value):
    with pytest.raises(ValueError, match=r"plain data, and .* is none"):
        pack(value)


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("code of a peer was run",)


def mutate(chance: random.Random, packed: bytes) -> bytes:
    """Bytes that are changed, cut, repeated, moved, or those of a pickle."""
    data = bytearray(packed)
    for _ in range(chance.randrange(1, 4)):
        at, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        match chance.randrange(6):
            case 0 if at < len(data):
                data[at] = chance.randrange(256)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end] * chance.randrange(1, 50)
            case 3:
                data[at:end] = chance.choice([b"[" * 5000, b"9" * 5000, b"1e999", b'["tuple"]', b'"\\ud800"', b"NaN"])
            case 4:
                data[at:end] = chance.choice([b'"list"', b'"dict"', b'"bytes"', b'"dtype"', b"[]", b"null", b"{}"])
            case 5:
                data[at:at] = pickle.dumps(Bomb())
        data = data or bytearray(b" ")
    return bytes(data[: 1 << 20])


def test_thousands_of_mutated_messages_are_read_as_the_type_or_refused(capfd):
    packed = [(bytes(pack(value).tolist()), kind) for value, kind in KINDS]

    def case(chance: random.Random) -> None:
        data, kind = chance.choice(packed)
        found = unpack(torch.frombuffer(bytearray(mutate(chance, data)), dtype=torch.uint8), kind)
        if kind in (bool, int, float, str, bytes, torch.dtype, Place, Offer):
            assert type(found) is kind

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert 0 < fuzz(case, 5000, ValueError) < 5000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kB"
    assert capfd.readouterr().out == ""


def send_to_each_other() -> tuple[Any, Any, Any]:
    rank = dist.get_rank()
    offer = Offer(Place(str(rank), (rank,) * rank), None, {"x" * 100 * rank: []})
    gathered = all_gather_data(offer, kind=Offer)
    pair = dist.new_group([1, 2])
    told = broadcast_data((rank, "told"), pair, tuple[int, str]) if rank in (1, 2) else None
    return [each.place.ranks for each in gathered], told, exchange(rank if rank else None, None, 60.0, int | None)


def test_all_ranks_get_the_values_of_all(ranks):
    for rank, (places, told, numbers) in enumerate(ranks(3).run(send_to_each_other)):
        assert places == [(), (1,), (2, 2)]
        assert told == ((1, "told") if rank else None)
        assert numbers == [None, 1, 2]


def receive(packed: bytes | int) -> list[str]:
    """Return all ranks' errors where rank 1 sends these bytes, or announces so many."""
    refusals = []
    for collect in (all_gather_data, lambda value: exchange(value, None, 60.0)):
        sent = torch.frombuffer(bytearray(packed if isinstance(packed, bytes) else b"1"), dtype=torch.uint8)
        if isinstance(packed, int):
            sent, whole = mock.MagicMock(numel=lambda: packed), sent
            sent.__getitem__.return_value = whole
        with (
            mock.patch.object(plain_data, "pack", lambda value, sent=sent: sent)
            if dist.get_rank() == 1
            else mock.MagicMock()
        ):
            with pytest.raises(PeerError) as caught:
                collect(0)
        refusals.append(str(caught.value))
    return refusals


@pytest.mark.parametrize("packed", [pickle.dumps(Bomb()), b"[[", 1 << 60, MAX_BYTES + 1, -1, 0], ids=repr)
def test_a_damaged_message_is_refused_by_all_ranks_with_the_name_of_its_sender(ranks, packed, capfd):
    for refusals in ranks(2).run(receive, packed):
        assert all("rank 1 " in refusal for refusal in refusals), refusals
    assert "code of a peer" not in capfd.readouterr().out


def test_a_whole_number_that_no_float_has_is_refused():
    digits = torch.frombuffer(bytearray(b"9" * 400), dtype=torch.uint8)
    with pytest.raises(ValueError, match="is not of type"):
        unpack(digits, float)
