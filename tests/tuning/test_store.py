"""What was measured once is found again, and a damaged file never stops a run."""

import json
import logging

import pytest

from stretto.tuning import Store


def test_times_are_found_again_by_machine_and_key(tmp_path):
    Store(tmp_path / "times.json").add("a", {"product": [1.5, 2.0]})
    Store(tmp_path / "times.json").add("a", {"other": (0.5,)})
    Store(tmp_path / "times.json").add("b", {"product": [9.0]})
    assert Store(tmp_path / "times.json").read("a") == {"product": (1.5, 2.0), "other": (0.5,)}
    assert Store(tmp_path / "times.json").read("b") == {"product": (9.0,)}
    assert Store(tmp_path / "times.json").read("c") == {}
    assert [file.name for file in tmp_path.iterdir()] == ["times.json"]


def test_the_folder_is_made_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "deep" / "cache"))
    Store().add("a", {"product": [1.0]})
    assert json.loads((tmp_path / "deep" / "cache" / "tuning.json").read_text()) == {"a": {"product": [1.0]}}


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"a": 3}', '{"a": {"product": "fast"}}', '{"a": {"product": [-1]}}']
)
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(tmp_path, content):
    file = tmp_path / "times.json"
    file.write_text(content)
    assert Store(file).read("a") == {}
    Store(file).add("a", {"product": [1.0]})
    assert Store(file).read("a")["product"] == (1.0,)


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        Store(tmp_path / "file" / "times.json").add("a", {"product": [1.0]})
    assert "not kept" in caplog.text
