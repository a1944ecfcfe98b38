# SPDX-License-Identifier: Apache-2.0
"""Choices follow what was measured here, never what was measured elsewhere; files that lie are refused."""

import json

import pytest

from stretto.collectives import selection, verify
from stretto.collectives.selection import (
    LIBRARY,
    AlgorithmChoice,
    Table,
    default_choice,
    find_choices,
    find_table_file,
    time_key,
)
from stretto.tuning import TuningStore

ONE_SHOT = AlgorithmChoice("one-shot-all-reduce", "LL", 2)
PLAIN = AlgorithmChoice("one-shot-all-reduce", "LL")
SLOW, FAST = [9e-6], [3e-6]


def measured(way=ONE_SHOT, ranks=4, size=1024, dtype="bfloat16"):
    """A file's rows in which this way was faster than the library."""
    return {
        time_key("allreduce", dtype, ranks, size, LIBRARY): SLOW,
        time_key("allreduce", dtype, ranks, size, way): FAST,
    }


def written(tmp_path, content):
    file = tmp_path / "table.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_the_fastest_choice_at_the_nearest_size_is_selected_with_its_reason(tmp_path):
    store = TuningStore(tmp_path / "times.json")
    store.add("a", measured() | measured(LIBRARY, size=1 << 20) | {"matmul of something": [1.0, 2.0]})
    table = Table.read("a", 4, has_nvlink=True, store=store)
    way, why = table.choose("allreduce", "bfloat16", 5000, 4)
    assert way == ONE_SHOT
    assert why == "it was the fastest at 1024 bytes of bfloat16, measured here"
    assert table.choose("allreduce", "bfloat16", 1 << 19, 4).choice == LIBRARY
    way, why = table.choose("allreduce", "float32", 5000, 4)  # of another dtype, for want of its own
    assert (way, "of bfloat16" in why) == (ONE_SHOT, True)
    way, why = table.choose("allgather", "bfloat16", 5000, 4)
    assert way == default_choice("allgather", 5000, 4, has_nvlink=True)
    assert why == "nothing was measured for it, and it is the default on 4 ranks over NVLink"


def test_times_of_another_machine_or_number_of_ranks_are_not_used(tmp_path):
    store = TuningStore(tmp_path / "times.json")
    store.add("a", measured())
    for machine, ranks in (("b", 4), ("a", 2), ("a", 8)):
        table = Table.read(machine, ranks, has_nvlink=True, store=store)
        assert table == Table(has_nvlink=True)
        assert "nothing was measured" in table.choose("allreduce", "bfloat16", 1024, ranks).why


def test_rows_of_the_store_that_are_not_known_are_left_out(tmp_path):
    store = TuningStore(tmp_path / "times.json")
    store.add("a", measured() | {"collective allreduce bfloat16 4 ranks 1024 bytes by magic LL": [1e-9]})
    assert Table.read("a", 4, has_nvlink=True, store=store).rows == {("allreduce", "bfloat16"): ((1024, ONE_SHOT),)}


def test_a_named_file_is_read_as_the_store_writes_it(tmp_path):
    file = tmp_path / "table.json"
    TuningStore(file).add("a", measured())
    TuningStore(file).add("b", measured(ranks=2))
    table = Table.load(file, "a", 4, has_nvlink=True)
    way, why = table.choose("allreduce", "bfloat16", 1024, 4)
    assert (way, why.endswith(f"measured {file}")) == (ONE_SHOT, True)
    with pytest.raises(
        ValueError, match=r"table.json was measured on 4 ranks, and this group has 2: measure here with `.* --ranks 2`"
    ):
        Table.load(file, "a", 2, has_nvlink=True)
    with pytest.raises(ValueError, match=r"table.json was measured on a; b, and this is c: measure here with `stretto"):
        Table.load(file, "c", 4, has_nvlink=True)


def row(**changes):
    named = {"collective": "allreduce", "dtype": "bfloat16", "ranks": "4", "bytes": "1024", "way": "library"} | changes
    return "collective {collective} {dtype} {ranks} ranks {bytes} bytes by {way}".format(**named)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is no file of measured times"),
        ("{", "is no file of measured times"),
        ("\udcff", "is no file of measured times"),
        ("[" * 100_000, "is no file of measured times"),
        ("[]", "it holds no table"),
        ({"a": 3}, "'a' has no table"),
        ({"a": {row(): "fast"}}, "no seconds above 0"),
        ({"a": {row(): [True]}}, "no seconds above 0"),
        ({"a": {row(): [float("nan")]}}, "no seconds above 0"),
        ({"a": {row(): [-1.0]}}, "no seconds above 0"),
        ({"a": {row(): [1.0, 2.0]}}, "a choice has one time, not 2"),
        ({"a": {row(): []}}, "a choice has one time, not 0"),
        ({"a": {"collective of mine": [1.0]}}, "a row is `collective NAME DTYPE N ranks N bytes by CHOICE`"),
        ({"a": {row(collective="scan"): [1.0]}}, "there is no collective 'scan'"),
        ({"a": {row(dtype="float7"): [1.0]}}, "there is no dtype 'float7'"),
        ({"a": {row(dtype="load"): [1.0]}}, "there is no dtype 'load'"),
        ({"a": {row(bytes="0"): [1.0]}}, "at least one rank and one byte"),
        ({"a": {row(bytes="9" * 400): [1.0]}}, "a row is"),
        ({"a": {row(way="magic LL"): [1.0]}}, "allreduce is run by library, one-shot-.*: not by 'magic'"),
        ({"a": {row(way="dgx1-all-gather LL"): [1.0]}}, "not by 'dgx1-all-gather'"),
        ({"a": {row(way="one-shot-all-reduce LL64"): [1.0]}}, "there is no protocol 'LL64': there are Simple, LL"),
        ({"a": {row(way="one-shot-all-reduce LL x99"): [1.0]}}, "there is no choice 'one-shot-all-reduce LL x99'"),
        ({"a": {}}, "was measured on no ranks, and this group has 4"),
        ({}, "was measured on nothing, and this is a"),
    ],
)
def test_a_named_file_that_is_no_table_is_refused_by_name(tmp_path, content, message):
    if content == "\udcff":
        file = tmp_path / "table.json"
        file.write_bytes(b"\xff\xfe\x00")
    else:
        file = written(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        Table.load(file, "a", 4, has_nvlink=True)
    assert "table.json" in str(caught.value)


def test_a_named_file_that_is_not_there_or_too_large_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"absent.json: cannot be read: No such file"):
        Table.load(tmp_path / "absent.json", "a", 4, has_nvlink=True)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(
        ValueError, match=r"large.json: is larger than 67108864 bytes, the most a file of measured times may have"
    ):
        Table.load(tmp_path / "large.json", "a", 4, has_nvlink=True)


def test_an_algorithm_that_does_not_compile_for_these_ranks_is_refused_when_the_file_is_read(tmp_path, monkeypatch):
    def compile_for(**parameters):
        raise ValueError("recursive halving takes a power of 2")

    monkeypatch.setattr(
        selection, "find", lambda name: type("Never", (), {"compile": staticmethod(compile_for), "parameters": ()})
    )
    file = written(tmp_path, {"a": measured()})
    with pytest.raises(ValueError, match=r"table.json: recursive halving takes a power of 2"):
        Table.load(file, "a", 4, has_nvlink=True)


@pytest.mark.parametrize(("seconds", "way"), [(0.96, ONE_SHOT), (0.98, LIBRARY), (1.0, LIBRARY)])
def test_calls_hardly_faster_than_the_librarys_are_left_to_it(seconds, way, tmp_path):
    times = {time_key("allreduce", "bfloat16", 4, 1024, one): [t] for one, t in ((ONE_SHOT, seconds), (LIBRARY, 1.0))}
    for rows in (times, dict(reversed(times.items()))):
        file = tmp_path / f"{next(iter(rows))}.json".replace(" ", "-")
        TuningStore(file).add("a", rows)
        table = Table.read("a", 4, has_nvlink=True, store=TuningStore(file))
        assert table.choose("allreduce", "bfloat16", 1024, 4).choice == way


@pytest.mark.parametrize(("seconds", "choice"), [(0.97, ONE_SHOT), (0.99, PLAIN), (1.01, PLAIN)])
def test_an_unrolled_kernel_has_to_gain_on_the_plain_one(seconds, choice, tmp_path):
    store = TuningStore(tmp_path / "times.json")
    timed = ((ONE_SHOT, seconds), (PLAIN, 1.0), (LIBRARY, 2.0))
    store.add("a", {time_key("allreduce", "bfloat16", 4, 1024, one): [t] for one, t in timed})
    table = Table.read("a", 4, has_nvlink=True, store=store)
    assert table.choose("allreduce", "bfloat16", 1024, 4).choice == choice


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_a_tuner_times_every_kind_of_algorithm_that_these_ranks_can_run_and_all_are_safe(ranks):
    for collective in selection.CHOICES:
        names = {way.algorithm for way in find_choices(collective, has_nvlink=True, ranks=ranks)} - {None}
        kinds = {name.partition("-")[0] for name in names}
        if collective == "alltoall":
            assert kinds == ({"direct", "two"} if ranks in (4, 6) else {"direct"})
        else:
            assert {"ring", "recursive"} <= kinds
            assert ("hierarchical" in kinds) == (ranks in (4, 6))
        for name in names:
            for in_place in (True, False) if collective != "alltoall" else (False,):
                assert verify(AlgorithmChoice(name).compile(ranks, in_place=in_place)).ok


def test_without_nvlink_nothing_runs_by_ll128(tmp_path):
    for collective in selection.CHOICES:
        assert any(way.protocol == "LL128" for way in find_choices(collective, has_nvlink=True))
        assert not any(way.protocol == "LL128" for way in find_choices(collective, has_nvlink=False))
        for ranks in (2, 3, 4, 8):
            for exponent in range(31):
                assert default_choice(collective, 1 << exponent, ranks, has_nvlink=False).protocol in ("LL", "")
        sizes = [default_choice(collective, 1 << exponent, 2, has_nvlink=True).protocol for exponent in range(31)]
        assert sizes[-4:] == ["Copy"] * 4  # 128 MB and more
        assert {"LL", "LL128", "Copy"} == set(sizes)
        assert default_choice(collective, 1024, 4, has_nvlink=False).protocol == "LL"
    assert default_choice("allreduce", 32 << 20, 3, has_nvlink=True) == LIBRARY
    assert default_choice("alltoall", 32 << 20, 3, has_nvlink=True) == AlgorithmChoice("direct-all-to-all", "LL128")
    line = AlgorithmChoice("two-shot-all-reduce", "LL128")
    file = tmp_path / "times.json"
    TuningStore(file).add("a", measured(line))
    assert (
        Table.read("a", 4, has_nvlink=True, store=TuningStore(file)).choose("allreduce", "bfloat16", 1024, 4).choice
        == line
    )
    table = Table.read("a", 4, has_nvlink=False, store=TuningStore(file))
    assert table.choose("allreduce", "bfloat16", 1024, 4).choice == LIBRARY
    assert "over links other than NVLink" in table.choose("allgather", "bfloat16", 1024, 4).why
    with pytest.raises(ValueError, match="LL128 needs NVLink"):
        Table.load(file, "a", 4, has_nvlink=False)


def test_the_file_is_that_of_the_argument_or_else_the_environment(monkeypatch):
    monkeypatch.delenv("STRETTO_COLLECTIVES_TABLE", raising=False)
    assert find_table_file(None) is None
    monkeypatch.setenv("STRETTO_COLLECTIVES_TABLE", "there.json")
    assert str(find_table_file(None)) == "there.json"
    assert str(find_table_file("here.json")) == "here.json"
