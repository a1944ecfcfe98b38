# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.stress`: what it covers, what it counts, and that it finds what is broken on purpose."""

import ast
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.mutations import mutations
from tests.mutations.mutation_table import KINDS, MUTATIONS, Edit, Mutation
from tests.mutations.mutations import Verdict, apply, write_table
from tests.processes import shared_server
from tests.stress.__main__ import app
from tests.stress.harness import run as stress_run
from tests.stress.harness import worker
from tests.stress.harness.catalogue import StressCase, load_catalogue, select
from tests.stress.harness.ledger import Ledger
from tests.stress.harness.run import StressSetting, stress
from tests.stress.harness.team import mix
from tests.stress.harness.worker import draw_entries
from tests.stress.kernels import list_kernels
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("forks_interpreted_processes")

FAKES = ("tests.stress.stress_fakes",)


def call(*arguments: object) -> tuple[int, str]:
    """The exit status of the command, and what was printed on either stream."""
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def run_fakes(only: str, **options: Any) -> tuple[stress_run.StressReport, list[str]]:
    printed: list[str] = []
    # The fakes' third call of a batch is broken, so each rank's batch has four.
    setting = StressSetting(2, 2.0, only, seed=5, results=8, catalogues=FAKES, calls=4, **options)
    return stress(setting, printed.append), printed


@pytest.fixture(scope="module")
def catalogue():
    return load_catalogue()


@pytest.mark.long
def test_every_kernel_that_the_library_launches_has_a_configuration(catalogue):
    covered = {kernel for one in catalogue.values() for kernel in one.kernels}
    kernels = set(list_kernels())
    missing = sorted(kernels - covered)
    assert not missing, f"give these a configuration in tests.stress: {', '.join(missing)}"
    assert not covered - kernels, "configurations name kernels that there are not"


def test_a_kernel_is_found_by_its_launch_and_device_functions_are_not(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "new.py").write_text(
        "@triton.jit\ndef helper(x): pass\n"
        "@triton.jit\ndef kernel(x):\n    helper(x)\n"
        "@triton.jit\ndef other(x): pass\n"
        "def launch(channel, helper):\n    kernel[(1,)](helper)\n"
    )
    (tmp_path / "ops" / "user.py").write_text(
        "from stretto.ops import new\ndef launch(channel):\n    channel.launch(new.other, 1)\n"
    )
    (tmp_path / "ops" / "more.cu").write_text('extern "C" __global__ void __launch_bounds__(512)\nrun(int x) {}')
    (tmp_path / "ops" / "writer.py").write_text("lines = ['__global__ void first(', '__global__ void first(']")
    assert list_kernels(tmp_path) == [
        "ops.more.cu:run",
        "ops.new.kernel",
        "ops.new.other",
        "ops.writer:first/1",
        "ops.writer:first/2",
    ]


def test_a_pattern_is_a_name_a_wildcard_or_a_part(catalogue):
    assert list(select(catalogue, "all-gather/copies")) == ["all-gather/copies"]
    assert len(select(catalogue, "all-gather/copies*")) > 3
    assert set(select(catalogue, "shots")) == {name for name in catalogue if "shots" in name}
    assert list(select(catalogue, "tiles/push,mlp/*")) == ["mlp/mlp", "mlp/gated", "tiles/push"]
    assert select(catalogue, None) == catalogue


def test_list_shows_every_configuration_with_what_it_covers(catalogue):
    status, text = call("--list", "--json")
    shown = json.loads(text)["configurations"]
    assert status == 0
    assert [one["name"] for one in shown] == list(catalogue)
    assert all(one["covers"] and one["family"] for one in shown)
    status, text = call("--list", "--only", "tiles/*")
    assert (status, "tiles/peer-ring" in text, "all-gather" in text) == (0, True, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", 1], "ranks is 1, but must be at least 2"),
        (["--ranks", 1000], "ranks is 1000, but must be at most 64"),
        (["--minutes", 0], "minutes is 0.0, but must be more than 0"),
        (["--results", 0], "results is 0, but must be at least 1"),
        (["--seed", -1], "seed is -1, but must be at least 0"),
        (["--late-warps"], "late on a GPU only"),
        (["--only", "nothing/*"], "no configuration matches 'nothing/*'"),
        (["--list", "--only", "nothing/*"], "no configuration matches 'nothing/*'"),
        (["--resume", "nowhere/at/all.json"], "nowhere/at is not a folder"),
    ],
)
def test_bad_options_are_refused_before_any_rank_starts(arguments, words):
    status, text = call(*arguments)
    assert (status, words in text) == (2, True), text


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    file = tmp_path / "results.json"
    file.write_text('{"version": 7}')
    status, text = call("--resume", file, "--only", "tiles/push")
    assert (status, "holds no results of a stress run" in text) == (2, True), text


def test_no_call_takes_an_input_of_the_calls_just_before():
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    drawn = draw_entries(6, 200, random.Random(seed))
    assert sorted(drawn[:6]) == list(range(6))
    assert all(drawn[at] not in drawn[max(at - 3, 0) : at] for at in range(200))


def test_a_captured_call_was_called_before_and_every_call_counts(monkeypatch):
    events: list[Any] = []

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    @contextlib.contextmanager
    def capture(graph, **options):
        events.append("begin")
        yield
        events.append("end")

    class Recorded(StressCase):
        entries = 3

        def call(self, entry):
            events.append(entry)
            return []

        def release_graph(self):
            events.append("released")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(worker, "_be_late", lambda state: None)
    state = mock.Mock(device=torch.device("cpu"))
    calls = worker._run_graph(state, Recorded(), 30, random.Random(1), torch.zeros(30, dtype=torch.int32))
    begin, end = events.index("begin"), events.index("end")
    assert begin == worker.GRAPH_CALLS  # a first call allocates memory of all ranks, which no graph can hold
    assert events[:begin] == events[begin + 1 : end]
    assert events[end + 1 :] == ["replay"] * 3 + ["released"]
    assert calls == 4 * worker.GRAPH_CALLS


def test_a_configurations_first_batches_have_every_mode_beginning_with_any():
    chosen = [
        [stress_run.choose_mode(worker.MODES, seed, "tiles/push", number) for number in range(60)] for seed in range(20)
    ]
    assert all(set(modes[:3]) == set(modes[3:]) == set(worker.MODES) for modes in chosen)
    assert {modes[0] for modes in chosen} == set(worker.MODES)


@pytest.mark.long
def test_wrong_results_are_counted_and_the_others_go_on():
    report, printed = run_fakes("fake/[rw]*")
    accounts = report.accounts
    assert (accounts["fake/right"].results, accounts["fake/right"].wrong) == (8, 0)
    assert (accounts["fake/wrong"].results, accounts["fake/wrong"].wrong) == (8, 1)
    assert (
        "seed 5, batch 0, eager: wrong results by rank {1: 1}, the first in call 2" in accounts["fake/wrong"].findings
    )
    assert not report.is_clean
    assert any(line.startswith("FOUND fake/wrong") for line in printed)


@pytest.mark.exhaustive
def test_ranks_that_raise_or_hang_are_counted_and_replaced(tmp_path):
    file = tmp_path / "results.json"
    report, _ = run_fakes("fake/*", limit=8.0, resume=file)
    accounts = report.accounts
    assert (accounts["fake/raises"].raised, accounts["fake/raises"].results) == (1, 0)
    assert "broken on purpose" in accounts["fake/raises"].findings[0]
    assert accounts["fake/hangs"].hung == 1
    assert "ranks [1] hung" in accounts["fake/hangs"].findings[0]
    assert (accounts["fake/right"].results, accounts["fake/right"].is_clean) == (8, True)
    kept = json.loads(file.read_text())["ranks"]["2"]
    assert kept["seeds"] == [5]
    assert kept["configurations"]["fake/wrong"]["wrong"] == 1

    again, _ = run_fakes("fake/right", resume=file)
    assert again.accounts["fake/right"].results == 8  # which it has already
    more = stress(StressSetting(2, 2.0, "fake/right", 6, 16, file, FAKES, calls=4), lambda line: None)
    assert more.accounts["fake/right"].results == 16
    ledger = Ledger(file)
    assert ledger.seeds[2] == [5, 5, 6]
    assert ledger.of(2, "fake/hangs").hung == 1  # what another run has found is kept


def run_interpreted(only: str | None, results: int) -> stress_run.StressReport:
    """Real configurations, interpreted on two ranks, that must be right and launch the kernels that they name."""
    report = stress(StressSetting(2, 20.0, only, results=results))
    assert report.is_clean, report.list_rows()
    for name, configuration in report.configurations.items():
        kernels = {kernel for kernel in configuration.kernels if not kernel.startswith("collectives.")}
        assert kernels <= report.launched[name], name
        assert report.accounts[name].results >= results, name
    return report


@pytest.mark.long
def test_interpreted_ranks_find_nothing_and_launch_the_kernels_that_configurations_name():
    report = run_interpreted("tiles/packets,all-gather/copies,copy/direct-all-gather/Copy", results=20)
    assert set(report.configurations) == {"tiles/packets", "all-gather/copies", "copy/direct-all-gather/Copy"}
    assert all(set(account.modes) == {"eager", "groups"} for account in report.accounts.values())


@pytest.mark.exhaustive
def test_all_interpreted_configurations_find_nothing_and_launch_the_kernels_that_they_name():
    run_interpreted(None, results=1)


def test_a_seed_gives_the_same_numbers_in_every_process():
    assert mix(5, "mode", "tiles/push", 0) == 1432562644


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_every_mutation_fits_the_source_as_it_is(mutation, catalogue, tmp_path):
    """Assert that what is removed is there exactly once, what is left can be parsed, and what should find it exists."""
    package = Path(str(files("stretto")))
    for edit in mutation.edits:
        (tmp_path / edit.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / edit.file, tmp_path / edit.file)
    apply(mutation, tmp_path)
    for edit in mutation.edits:
        changed = (tmp_path / edit.file).read_text()
        assert changed != (package / edit.file).read_text()
        if edit.file.endswith(".py"):
            ast.parse(changed)
    assert select(catalogue, mutation.only)
    assert mutation.kind in KINDS
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in Path(file).read_text(), test


@pytest.mark.exhaustive
def test_an_equivalent_mutation_leaves_the_accesses_to_memory_as_they_are(tmp_path):
    equivalent = [mutation for mutation in MUTATIONS if mutation.equivalent]
    assert equivalent
    package = Path(str(files("stretto")))
    seen = [print_accesses(package.parent)]
    for number, mutation in enumerate(equivalent):
        source = tmp_path / str(number)
        shutil.copytree(package, source / "stretto", ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutation, source / "stretto")
        seen.append(print_accesses(source))
    assert all("bar.sync" in " ".join(lines) for lines in json.loads(seen[0]).values())
    assert set(seen) == {seen[0]}


def print_accesses(source):
    """Return what `tests.lab.ptx_of_kernels` prints of the package in a folder."""
    here = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{os.getcwd()}"}
    command = [shared_server("torch").python, "-m", "tests.lab.ptx_of_kernels"]
    return subprocess.run(command, env=here, check=True, capture_output=True, text=True).stdout


def test_each_family_has_one_mutation_of_each_kind():
    families: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        families.setdefault(mutation.family, set()).add(mutation.kind)
    assert set(map(frozenset, families.values())) == {frozenset(KINDS)}


def test_a_mutation_that_does_not_fit_is_refused(tmp_path):
    (tmp_path / "file.py").write_text("one\none\n")
    for old in ("one", "two"):
        with pytest.raises(ValueError, match=r"file.py has \d times, and not once"):
            apply(Mutation("a family", "wait", "a wait", (Edit("file.py", old, "three"),), "tiles"), tmp_path)


def test_stress_and_tests_of_a_mutation_may_be_run_separately(tmp_path, monkeypatch):
    first, second = MUTATIONS[0], next(one for one in MUTATIONS if one.kind == "fence")

    def find(chosen, *, stresses, runs_tests, **options):
        for one in chosen:
            how = "wrong: tiles/push" if stresses and one is first else ""
            yield Verdict(one.family, one.kind, one.what, how, 3.0 * stresses, "a.py::test_it" if runs_tests else "")

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["mutations", "--out", str(tmp_path), *options])
        return mutations.main()

    monkeypatch.setattr(mutations, "try_all", find)
    monkeypatch.setattr(mutations, "MUTATIONS", (first, second))
    assert run("--tests-only") == 1  # a barrier is for the stress to find
    assert run("--stress-only") == 0
    rows = {(row["kind"], row["what"]): row for row in json.loads((tmp_path / "mutations.json").read_text())}
    assert set(rows) == {(first.kind, first.what), (second.kind, second.what)}
    assert {row["by_tests"] for row in rows.values()} == {"a.py::test_it"}
    assert {row["seconds"] for row in rows.values()} == {3.0}
    assert (tmp_path / "mutations.md").read_text().count("| yes |") == 2
    (tmp_path / "mutations.json").write_text("[7]")
    with pytest.raises(SystemExit):
        run("--tests-only")


def test_the_table_shows_what_has_detected_a_mutation():
    verdicts = [
        Verdict("tiles", "wait", "for a tile", "wrong: tiles/push", 3.0, ""),
        Verdict("tiles", "fence", "before TMA", "", 60.0, "tests/a.py::test_a_fence"),
        Verdict("tiles", "barrier", "before a signal", "", 60.0, "tests/a.py::test_a_barrier"),
    ]
    assert [verdict.is_found for verdict in verdicts] == [True, True, False]  # a barrier is for the stress to find
    table = write_table(verdicts)
    assert "| tiles | wait: for a tile | wrong: tiles/push | 3 s | no | yes |" in table
    assert "| tiles | barrier: before a signal | no | 60 s | test a barrier | **no** |" in table
