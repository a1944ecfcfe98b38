# SPDX-License-Identifier: Apache-2.0
"""The README and the pages of docs/: links lead somewhere, pictures are shown, and what they count is so."""

import inspect
import json
import re
import runpy
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

from stretto.collectives.algorithms import ALGORITHMS
from tests.cli.answers import walk_commands

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "lab" / "results").rglob("*.md")])
INDEX = ROOT / "lab" / "results" / "README.md"  # generated: it links every folder
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Return what `#...` may name on a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, heading = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not heading or heading in anchors(target))


def test_links_lead_to_files_and_headings_that_are_there() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(prose(page)) if not link.startswith("https://")]
    assert len(links) > 1000
    broken = [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not leads_somewhere(page, link)]
    assert broken == []


def test_every_picture_of_the_docs_is_shown_and_every_folder_of_results_is_linked() -> None:
    linked = {(page.parent / link).resolve() for page in PAGES if page != INDEX for link in LINK.findall(prose(page))}
    assert set((ROOT / "docs").rglob("*.png")) <= linked
    assert {path for path in INDEX.parent.iterdir() if path.is_dir()} <= {path.parent for path in linked}


def test_the_readme_counts_the_algorithms() -> None:
    assert len(ALGORITHMS) == 19
    assert "Nineteen algorithms" in (ROOT / "README.md").read_text()


def test_every_result_of_the_readme_names_its_runs_days_and_commits() -> None:
    index = [line for line in INDEX.read_text().splitlines() if line.startswith("| [")]
    section = (ROOT / "README.md").read_text().partition("## Results")[2].partition("\n- ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and LINK.search(line)]
    assert len(rows) > 10
    for row in rows:
        run = row.split("|")[-2]
        quoted, found = re.findall(r"(\d\d), ([0-9a-f]{8})", run), []
        for link in LINK.findall(row):
            if (record := (ROOT / link).with_suffix(".json")).is_file():
                made = json.loads(record.read_text())
                found.append((made["date"].removeprefix("2026-11-"), made["commit"]))
            else:  # an account of several runs, whose commits the index has
                folder = link.split("/")[2]
                commits = " ".join(line for line in index if f"| [{folder}](" in line)
                found += [(day, commit) for day, commit in quoted if commit in commits]
        assert quoted, row
        assert set(quoted) == set(found), row


def test_the_reference_has_an_entry_for_every_name_that_a_package_exports() -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    packages = reference["find_public_names"]()
    assert {"stretto", "stretto.ops", "stretto.tiles", "stretto.train.config"} <= packages.keys()
    index = reference["write_index"](packages)
    for package, names in packages.items():
        assert set(names) == set(import_module(package).__all__)
        page = reference["write_page"](package, packages)
        assert [name for name in names if f"heading: {name}\n" not in page and f"## {name}\n" not in page] == []
        assert f"({package}.md)" in index


# What Stretto's own processes tell each other.
INTERNAL = {"CHECKED", "COUNTERS", "ERROR_FILE", "PRINTED_CHECKPOINTS", "STORE_SOCKET"}


def test_every_environment_variable_is_on_one_page() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'"STRETTO_([A-Z_]+)"', text)}
    page = (ROOT / "docs" / "configuration.md").read_text().partition("## Environment variables")[2]
    assert read - INTERNAL == set(re.findall(r"`STRETTO_([A-Z_]+)`", page))


def test_the_index_lists_every_command_and_example() -> None:
    page = (ROOT / "docs" / "index.md").read_text()
    table = page.partition("## Commands")[2].partition("## Glossary")[0]
    commands = {name for name in walk_commands() if " " not in name}
    assert len(commands) > 10
    assert {name for name in commands if f"`{name}`" not in table} == set()
    listed = {(ROOT / "docs" / link).resolve() for link in LINK.findall(table)}
    examples = {path for path in (ROOT / "examples").iterdir() if path.suffix == ".py"}
    assert len(examples) > 4
    assert examples <= listed


def exists(name: str) -> bool:
    try:
        resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def test_names_of_the_library_that_pages_mention_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    names = {name for page in pages for name in re.findall(r"`(stretto(?:\.[A-Za-z_]\w*)+)", prose(page))}
    assert len(names) > 20
    assert {name for name in names if not exists(name)} == set()


def test_signatures_that_pages_give_are_those_of_the_functions() -> None:
    found = 0
    for page, package in (("operators", "stretto.ops"), ("ops-moe", "stretto.ops.moe"), ("tiles", "stretto.tiles")):
        module = import_module(package)
        for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines():
            heads = line.split(" | ")[0] if line.startswith(("| `", "**`")) else ""
            for name, given in re.findall(r"`(\w+)\(([^`]*)\)`", heads):
                function = getattr(module, name)
                parameters = [*inspect.signature(getattr(function, "fn", function)).parameters]
                names = [each.partition("=")[0].strip() for each in given.split(",")]
                named = [each for each in names if each.isidentifier()]
                assert [each for each in parameters if each in named] == named, (page, name)
                found += 1
    assert found > 40


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {page for page in pages if f": {page}\n" not in navigation} == set()


def test_the_index_lists_every_page() -> None:
    listed = LINK.findall((ROOT / "docs" / "index.md").read_text().partition("## All pages")[2])
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    pages -= {"index.md", *(page for page in pages if re.match(r"decisions/\d", page))}
    assert sorted(listed) == sorted([*pages, "../CHANGELOG.md", "../CONTRIBUTING.md"])


def test_pages_begin_with_what_their_readers_can_do_with_them() -> None:
    texts = [re.sub(r"<!--.*?-->", "", prose(page), flags=re.DOTALL) for page in (ROOT / "docs").glob("*.md")]
    beginnings = [text.partition("\n")[2].strip().partition("\n\n")[0] for text in texts]
    assert len(beginnings) > 30
    assert [beginning for beginning in beginnings if not re.search(r"\b([Yy]ou|Look up)\b", beginning)] == []


def test_every_decision_is_in_their_list() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(LINK.findall((folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}
