# SPDX-License-Identifier: Apache-2.0
"""mkdocs hooks: the site also has what the pages of docs/ link to elsewhere in the repository.

On the site, docs/ lies at the top, and results/, examples/, configs/ and the changelog beside its pages. Links are
written for the repository, so that they work in a checkout too, and are rewritten here; a link to a file that the site
does not have leads to the repository. The API reference's pages are made here as well (reference.py), and the finished
site must have an entry for each public name. The search finds guides before all else.
"""

import logging
import os
import re
import sys
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import reference  # noqa: E402  (beside this file)

OUTSIDE = ("lab/results", "examples", "src/stretto/configs", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
LINK = re.compile(r"(\]\()([^)\s]+)(\))|(^\[[^\]]+\]: )(\S+)()", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)

# Folders whose pages the search finds after the guides, and down to which level it finds their headings: a public name,
# a decision's page, and nothing of CONTRIBUTING and results, which guides link to. The theme gives words in a heading
# 1,000 times the weight of those in a text.
SEARCH_LEVELS = {"reference": 2, "decisions": 1, "CHANGELOG.md": 1, "CONTRIBUTING.md": 0, "lab": 0}
SEARCH_BOOST = 1e-4


def on_startup(command: str, dirty: bool) -> None:
    """Print warnings alone while building. With `--quiet` mkdocs would not count them, and `--strict` ignore them."""
    if command == "build":
        logging.getLogger("mkdocs").setLevel(logging.WARNING)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the reference's pages into the navigation, and the version beside the site's name."""
    version = VERSION.search((ROOT / "src" / "stretto" / "__init__.py").read_text())
    assert version is not None
    config.site_name = f"{config.site_name} {version[1]}"
    for section in config.nav or []:
        if "API" in section:
            section["API"] = ["reference/index.md", *(f"reference/{name}.md" for name in reference.find_public_names())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference's pages, and the files outside of docs/ that pages may link to."""
    packages = reference.find_public_names()
    files.append(File.generated(config, "reference/index.md", content=reference.write_index(packages)))
    for package in packages:
        content = reference.write_page(package, packages)
        files.append(File.generated(config, f"reference/{package}.md", content=content))
    for name in OUTSIDE:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                uri = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Weigh the page in the search, and rewrite its links from places in the repository to places on the site."""
    level = SEARCH_LEVELS.get(find_folder(page))
    if level is not None:
        page.meta["search"] = {"boost": SEARCH_BOOST, "exclude": level == 0}
    if find_folder(page) == "reference":
        return markdown
    here = find_in_repository(page.file.src_uri)
    repository = config.extra["repository"]
    page.edit_url = f"{repository}/edit/main/{here}"
    code = FENCE.findall(markdown)
    prose = FENCE.sub("\0", markdown)

    def rewrite(match: re.Match[str]) -> str:
        before, link, after = (part for part in match.groups() if part is not None)
        if link.startswith(("https://", "http://", "#", "mailto:")):
            return match[0]
        path, mark, anchor = link.partition("#")
        target = PurePosixPath(os.path.normpath(here.parent / path))
        uri = find_on_site(target)
        if files.get_file_from_path(uri) is None and (ROOT / target).exists():
            return f"{before}{repository}/blob/main/{target}{mark}{anchor}{after}"
        return f"{before}{os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent)}{mark}{anchor}{after}"

    pieces = LINK.sub(rewrite, prose).split("\0")
    return "".join(piece + block for piece, block in zip(pieces, [*code, ""], strict=True))


def on_page_content(html: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Keep code out of the search's index. Of pages that are no guides it has each heading's first paragraph."""
    tags = [r'<div class="[^"]*highlight"']
    if level := SEARCH_LEVELS.get(find_folder(page)):
        tags += ["<table", f"<h[{level + 1}-6]", r"(?:</p>|</ul>|</ol>)\s*<(?:p|ul|ol)"]
    return re.sub(rf"({'|'.join(tags)})(?=[ >])", r'\1 data-search-exclude="true"', html)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if the reference lacks a public name, as it would if mkdocstrings had not found it."""
    inventory = (Path(config.site_dir) / "objects.inv").read_bytes()
    lines = zlib.decompress(inventory.split(b"\n", 4)[4]).decode().splitlines()
    entries = {line.partition(" ")[0] for line in lines}
    origins = {origin for names in reference.find_public_names().values() for origin in names.values()}
    missing = sorted(origins - entries)
    if missing:
        raise SystemExit(f"the API reference lacks {', '.join(missing)}")


def find_folder(page: Any) -> str:
    """The folder at the site's top that has the page, or the page's own name there."""
    return PurePosixPath(page.file.src_uri).parts[0]


def find_in_repository(uri: str) -> PurePosixPath:
    """Where in the repository a page of the site lies."""
    path = PurePosixPath(uri)
    return path if any(path.is_relative_to(name) for name in OUTSIDE) else PurePosixPath("docs") / path


def find_on_site(path: PurePosixPath) -> str:
    """Where on the site a file of the repository lies; the README's place is that of the index."""
    if path == PurePosixPath("README.md"):
        return "index.md"
    return str(path.relative_to("docs")) if path.parts[0] == "docs" else str(path)
