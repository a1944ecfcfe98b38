# SPDX-License-Identifier: Apache-2.0
"""The package: what the sdist and the wheel have in them, and that the wheel works from an empty folder."""

import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from functools import partial
from pathlib import Path

import pytest

import stretto
from tests.processes import PythonServer

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "examples", "docs", "lab", ".ci")
LICENSE_LINE = "SPDX-License-Identifier: Apache-2.0"
BUILD = "from setuptools import build_meta; import sys; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

make_links_absolute = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["make_links_absolute"]


def is_kept(path: Path) -> bool:
    """True if a path belongs to the repository, and not to a cache or a build."""
    return path.suffix not in (".pyc", ".pyo") and not any(
        part == "__pycache__" or part.endswith(".egg-info") for part in path.parts
    )


def list_files(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if is_kept(path)}


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a "wheel" or "sdist" of the tree at `source`, and return its path."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(command, cwd=source, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of a copy of the repository, in which nothing that was built before can be."""
    copy = tmp_path_factory.mktemp("repository")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    return build("sdist", copy, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made of the sdist alone, as an installer makes it."""
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """The wheel's metadata, whose payload is the description that a package index shows."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing in it but the wheel's files, installed by pip; dependencies come from this Python."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True)
    return folder


def run_installed(installed: Path, folder: Path, *command: str) -> str:
    """Run the installed command `stretto` in a folder, and return what it printed; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "stretto"), *command],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(installed), "COLUMNS": "120"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_sdist_has_every_file_that_tests_and_docs_need(unpacked: Path) -> None:
    for name in FOLDERS:
        assert list_files(ROOT / name) - list_files(unpacked / name) == set(), name
    for name in (
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "Makefile",
        "constraints.txt",
    ):
        assert (unpacked / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.long
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    assert names == {f"stretto/{name}" for name in list_files(ROOT / "src" / "stretto")}
    assert len(licences) == 1


@pytest.mark.long
def test_the_metadata_names_version_authors_and_licence(metadata: Message) -> None:
    assert metadata["Version"] == stretto.__version__
    assert metadata["Author"] == "The Stretto authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert any(value.startswith("Programming Language :: Python :: 3.11") for value in metadata.get_all("Classifier"))
    urls = dict(value.split(", ") for value in metadata.get_all("Project-URL"))
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Source"]) for url in urls.values())


def test_the_version_is_written_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]


def test_the_citation_names_this_version_and_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {stretto.__version__}\n" in citation
    assert f"\nrepository-code: {project['urls']['Source']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


@pytest.mark.long
def test_the_description_for_a_package_index_has_no_relative_link(metadata: Message) -> None:
    description = metadata.get_payload()
    assert "# Stretto" in description
    links = [part.partition(")")[0] for part in description.split("](")[1:]]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_links_of_the_readme_lead_to_the_versions_files() -> None:
    text = "[docs](docs/tiles.md#layout) ![loss](results/loss.png) [here](#below) [paper](https://host/paper)"
    assert make_links_absolute(text, "https://host/stretto", "1.2") == (
        "[docs](https://host/stretto/blob/v1.2/docs/tiles.md#layout) "
        "![loss](https://host/stretto/raw/v1.2/results/loss.png) [here](#below) [paper](https://host/paper)"
    )


@pytest.mark.long
def test_the_commands_work_from_a_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert "Train a small GPT" in run_installed(installed, tmp_path, "demo", "--help")
    assert run_installed(installed, tmp_path, "--version") == f"stretto {stretto.__version__}\n"
    plan = ("plan", "--model", "gpt-5b", "--cluster", "perlmutter", "--gpus", "8", "--batch", "8", "--seq-len", "2048")
    assert "z=8" in run_installed(installed, tmp_path, *plan)
    run_installed(installed, tmp_path, "init", "demo")
    assert "z=2" in run_installed(installed, tmp_path, "plan", "demo.toml", "--cluster", "dgx-h200", "--gpus", "4")
    run_installed(installed, tmp_path, "collective", "compile", "ring-all-reduce", "--ranks", "4", "-o", "ring.xml")
    assert run_installed(installed, tmp_path, "collective", "verify", "ring.xml").endswith("verified\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.toml", "ring.xml"]


@pytest.mark.exhaustive
def test_a_short_demo_runs_from_a_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    variables = {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    server = PythonServer(["stretto.cli.demo", "stretto.report", "stretto.launch.rank"], variables)
    try:
        run = partial(subprocess.run, cwd=tmp_path, env=os.environ | variables, text=True, capture_output=True)
        found = run([server.python, "-c", "import stretto.train; print(stretto.train.__file__)"], check=True).stdout
        assert Path(found).is_relative_to(installed)
        done = run([server.python, "-m", "stretto", "demo", "--steps", "2"], check=False)
    finally:
        server.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 steps on 4 ranks, then on one: about 30 s on 2 CPU cores")
    assert "largest difference at any step" in done.stdout
    files = {path.name for path in (tmp_path / "runs" / "demo").iterdir()}
    assert {"config.toml", "metrics.jsonl", "summary.md", "one-rank"} <= files


@pytest.mark.exhaustive
def test_the_whole_demo_runs_from_a_wheel_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    printed = run_installed(installed, tmp_path, "demo")
    assert "largest difference at any step" in printed
    assert {"config.toml", "metrics.jsonl", "summary.md"} <= {path.name for path in (tmp_path / "runs/demo").iterdir()}


def test_every_source_file_names_its_licence() -> None:
    kinds = {".py", ".cu", ".cpp", ".h", ".hpp"}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    files = [ROOT / "setup.py", ROOT / ".ci" / "run", *filter(is_kept, files)]
    assert len(files) > 600
    without = [
        str(path.relative_to(ROOT))
        for path in files
        if LICENSE_LINE not in "".join(path.read_text().splitlines(keepends=True)[:2])
    ]
    assert without == [], f'begin with "# {LICENSE_LINE}"'
