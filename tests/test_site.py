# SPDX-License-Identifier: Apache-2.0
"""The site in build/site, which `make docs` builds before it runs these tests."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from stretto import __version__
from tests.differences import largest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
NO_GUIDES = ("reference/", "decisions/", "lab/", "CHANGELOG/")
MAX_INDEX_BYTES = 700_000

if not SITE.is_dir():
    pytest.skip("build/site is missing: make docs builds it and runs these tests", allow_module_level=True)


def test_links_and_pictures_of_all_pages_lead_to_files_of_the_site() -> None:
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 100
    broken = []
    for page in pages:
        for link in re.findall(r'\b(?:href|src)="?([^">\s]+)', page.read_text()):
            url = urlsplit(link)
            if url.scheme or url.netloc or not url.path:
                continue
            folder = SITE if url.path.startswith("/") else page.parent
            target = Path(os.path.normpath(folder / unquote(url.path).lstrip("/")))
            if not target.is_file() and not (target / "index.html").is_file():
                broken.append(f"{page.relative_to(SITE)}: {link}")
    assert broken == []


def test_a_page_can_be_edited_and_says_which_version_it_describes() -> None:
    for page, source in (("memory", "docs/memory.md"), ("CONTRIBUTING", "CONTRIBUTING.md")):
        text = (SITE / page / "index.html").read_text()
        assert f'/edit/main/{source}"' in text
        assert f"Stretto {__version__}" in text


def test_pictures_suit_the_dark_theme_and_the_searchs_index_waits_for_a_search() -> None:
    text = (SITE / "overlap" / "index.html").read_text()
    assert re.search(r'\[data-md-color-scheme="slate"\] \.md-typeset img \{[^}]*filter: invert\(1\)', text)
    held, theme = text.find("XMLHttpRequest.prototype.open ="), text.find("assets/javascripts/bundle")
    assert 0 < held < theme
    assert '"/search/search_index.json"' in text
    assert '"search/search_index.json"' in next((SITE / "assets" / "javascripts").glob("bundle*.js")).read_text()


def test_the_searchs_index_is_small_and_weighs_guides_over_all_else() -> None:
    index = SITE / "search" / "search_index.json"
    assert index.stat().st_size < MAX_INDEX_BYTES
    boosts = {entry["location"]: entry.get("boost", 1) for entry in json.loads(index.read_text())["docs"]}
    assert {place for place, boost in boosts.items() if boost < 1} == {
        place for place in boosts if place.startswith(NO_GUIDES)
    }
    # A word in a heading has 1,000 times the weight of one in a text.
    assert largest(boost for boost in boosts.values() if boost < 1) < 1e-3


@pytest.mark.skipif(
    shutil.which("node") is None, reason="the theme's search is JavaScript: node, which runs it, is missing"
)
def test_the_search_finds_guides_first_and_names_in_the_reference() -> None:
    guides = ("resume", "checkpoint", "pipeline", "tune", "fsdp")
    names = ("find_checkpoint", "tune_embedding")
    done = subprocess.run(
        ["node", ROOT / "tests" / "search.mjs", SITE, *guides, *names], capture_output=True, text=True, check=True
    )
    first = [json.loads(line)[0] for line in done.stdout.splitlines()]
    found = dict(zip((*guides, *names), first, strict=True))
    assert {query: found[query] for query in guides if found[query].startswith(NO_GUIDES)} == {}
    assert all(found[query].startswith("reference/") for query in names), found
