# SPDX-License-Identifier: Apache-2.0
"""Tests that what was measured once is found again, and a damaged file never stops a run."""

import json
import logging

import pytest
from tests.full_disk import no_room_beyond

from stretto.native_code import cache_folder
from stretto.tuning import TuningStore
from stretto.tuning.store import read_times


def test_times_are_found_again_by_machine_and_key(tmp_path):
    TuningStore(tmp_path / "times.json").add("a", {"product": [1.5, 2.0]})
    TuningStore(tmp_path / "times.json").add("a", {"other": (0.5,)})
    TuningStore(tmp_path / "times.json").add("b", {"product": [9.0]})
    assert TuningStore(tmp_path / "times.json").read("a") == {"product": (1.5, 2.0), "other": (0.5,)}
    assert TuningStore(tmp_path / "times.json").read("b") == {"product": (9.0,)}
    assert TuningStore(tmp_path / "times.json").read("c") == {}
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]


def test_the_folder_is_created_where_the_environment_sets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "deep" / "cache"))
    TuningStore().add("a", {"product": [1.0]})
    assert json.loads((tmp_path / "deep" / "cache" / "tuning.json").read_text()) == {"a": {"product": [1.0]}}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"a": 3}', '{"a": {"product": "fast"}}', '{"a": {"product": [-1]}}']
)
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(tmp_path, content):
    file = tmp_path / "times.json"
    file.write_text(content)
    assert TuningStore(file).read("a") == {}
    TuningStore(file).add("a", {"product": [1.0]})
    assert TuningStore(file).read("a")["product"] == (1.0,)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        TuningStore(tmp_path / "file" / "times.json").add("a", {"product": [1.0]})
    assert "not kept" in caplog.text


def test_a_disk_that_is_full_costs_a_warning_and_leaves_the_file_as_it_was(tmp_path, caplog):
    store = TuningStore(tmp_path / "times.json")
    store.add("a", {"product": [1.0]})

    with caplog.at_level(logging.WARNING), no_room_beyond(10):
        store.add("a", {"product": [2.0]})
    assert "not kept" in caplog.text
    assert "times.json: File too large" in caplog.text
    assert store.read("a") == {"product": (1.0,)}
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]


def test_damaged_entries_are_measured_again_with_the_reason(tmp_path, caplog):
    (tmp_path / "times.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert TuningStore(tmp_path / "times.json").read("a") == {}
    assert "measured again" in caplog.text
    assert TuningStore(tmp_path / "none.json").read("a") == {}


def test_a_file_that_the_user_names_is_read_whole(tmp_path):
    TuningStore(tmp_path / "times.json").add("a", {"product": [1.5, 2], "other": []})
    TuningStore(tmp_path / "times.json").add("b", {})
    assert read_times(tmp_path / "times.json") == {"a": {"product": (1.5, 2), "other": ()}, "b": {}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no file of measured times"),
        ("[]", "holds no table"),
        ('{"a": 3}', "'a' has no table"),
        ('{"a": {"product": "fast"}}', "no seconds above 0 for 'product': fast"),
        ('{"a": {"product": [0]}}', "no seconds above 0"),
        ('{"a": {"product": [true]}}', "no seconds above 0"),
        ('{"a": {"product": [Infinity]}}', "no seconds above 0"),
        ('{"a": {"product": [NaN]}}', "no seconds above 0"),
    ],
)
def test_a_file_that_the_user_names_and_has_other_content_raises(tmp_path, content, words):
    file = tmp_path / "times.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=words) as error:
        read_times(file)
    assert str(file) in str(error.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_times(tmp_path / "none.json")


def test_the_cache_is_in_the_systems_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("STRETTO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "stretto"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "stretto"
