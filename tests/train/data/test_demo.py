# SPDX-License-Identifier: Apache-2.0
"""The demo's text."""

import sys
from pathlib import Path

import pytest

from stretto.train.data import demo, demo_corpus, open_dataset, write_demo_corpus


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, since some of these corpora are made up."""
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def corpus() -> str:
    """The demo's text, which takes seconds to make; nothing was imported for it."""
    imported = set(sys.modules)
    text = demo_corpus()
    assert set(sys.modules) == imported
    return text


@pytest.mark.long
def test_the_corpus_is_a_megabyte_of_documentation_and_imports_nothing(corpus: str) -> None:
    assert len(corpus.encode()) > 1_000_000
    assert "\x00" not in corpus
    assert 'The "assert" statement' in corpus
    assert "textwrap.TextWrapper.wrap\n" in corpus


@pytest.mark.exhaustive
def test_the_written_corpus_can_be_trained_on(corpus: str, tmp_path: Path) -> None:
    path = write_demo_corpus(tmp_path / "new" / "corpus.txt")
    assert path.read_text(encoding="utf-8") == corpus  # the same in both calls
    assert [file.name for file in path.parent.iterdir()] == ["corpus.txt"]
    dataset = open_dataset(str(path), seq_len=256)
    assert dataset.tokens == path.stat().st_size


def test_a_python_without_its_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.os, "__file__", str(tmp_path / "os.py"))
    with pytest.raises(ValueError, match="its documentation has 1 bytes, but the demo needs 1000000"):
        demo_corpus()


def test_a_corpus_that_another_rank_has_written_meanwhile_stays(tmp_path, monkeypatch):
    """Ranks that train without a launcher all write it; one of them may have opened it already."""
    path = tmp_path / "corpus.txt"

    def come_late() -> str:
        path.write_text("the first rank's")
        return "the second rank's"

    monkeypatch.setattr(demo, "demo_corpus", come_late)
    assert write_demo_corpus(path) == path
    assert path.read_text() == "the first rank's"
    assert list(tmp_path.iterdir()) == [path]


def test_without_a_corpus_no_folder_is_left(tmp_path, monkeypatch):
    def refuse() -> str:
        raise ValueError("no sources")

    monkeypatch.setattr(demo, "demo_corpus", refuse)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="no sources"):
        write_demo_corpus(tmp_path / "run" / "corpus.txt")
    assert not (tmp_path / "run").exists()


def test_the_corpus_is_collected_once_for_all_runs_and_without_a_cache_for_each(tmp_path, monkeypatch):
    collected = []

    def collect() -> str:
        collected.append("the voices\r\nenter")
        return collected[-1]

    monkeypatch.setattr(demo, "demo_corpus", collect)
    for number in (1, 2):
        path = write_demo_corpus(tmp_path / f"run-{number}" / "corpus.txt")
        assert path.read_bytes() == b"the voices\r\nenter"
    assert len(collected) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "file" / "cache"))
    assert write_demo_corpus(tmp_path / "run-3" / "corpus.txt").read_bytes() == b"the voices\r\nenter"
    assert len(collected) == 2
