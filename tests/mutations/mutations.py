# SPDX-License-Identifier: Apache-2.0
"""Removes one barrier, wait, acquire or fence at a time, and shows whether the stress or a test of machine code fails.

    python -m tests.mutations.mutations --ranks 2 --jobs 8 --out lab/results/mutations

Run it in the repository's root, since it runs the tests there. It applies each mutation to a copy of the package's
source, stresses that copy's configurations until the first finding, for at most a minute, and runs the named tests of
machine code on the copy. Several mutations are tried at a time, each stress under its own MPS daemon.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path

from tests.mutations.mutation_table import MUTATIONS, Mutation

from stretto.atomic_files import write_atomically

ROOT = Path(__file__).parents[2]
_BATCH_LIMIT = 75.0  # seconds, after which a batch counts as hung
_START_SECONDS = 400.0  # for the ranks to start, and to finish the batch that runs when the time is over
_TEST_SECONDS = 600.0
_MAX_WORDS = 160  # of a finding


@dataclass(frozen=True)
class Verdict:
    """The verdict on a mutation. by_stress, by_tests: how each has found it, or "" if it has not.

    equivalent: see `Mutation`.
    """

    family: str
    kind: str
    what: str
    by_stress: str
    seconds: float
    by_tests: str
    note: str = ""
    equivalent: str = ""

    @property
    def is_found(self) -> bool:
        """True if it was found: barriers and waits by the stress, acquires and fences by either."""
        return bool(self.equivalent) or bool(self.by_stress or (self.kind in ("acquire", "fence") and self.by_tests))


def apply(mutation: Mutation, package: Path) -> None:
    """Apply a mutation to a copy of the package. ValueError unless each quoted text occurs exactly once."""
    for edit in mutation.edits:
        path = package / edit.file
        text = path.read_text(encoding="utf-8")
        count = text.count(edit.old)
        if count != 1:
            raise ValueError(f"{mutation.name}: {edit.file} has {count} times, and not once: {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def try_all(
    mutations: Sequence[Mutation],
    *,
    ranks: int,
    minutes: float,
    jobs: int,
    tests: Path,
    stresses: bool = True,
    runs_tests: bool = True,
) -> Iterator[Verdict]:
    """Try mutations, `jobs` at a time, and yield their verdicts in order.

    ranks: of each stress. minutes: its time limit. tests: the folder that the tests' paths are relative to. stresses:
    False runs only the tests, which need no GPU. runs_tests: False runs only the stress.
    """
    # Each stress starts its own MPS daemon: a process that is killed in a kernel breaks its daemon's other clients.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_MPS_PIPE_DIRECTORY"}
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(
            lambda mutation: _try(
                mutation, ranks, minutes, tests, environment, stresses=stresses, runs_tests=runs_tests
            ),
            mutations,
        )


def _try(
    mutation: Mutation,
    ranks: int,
    minutes: float,
    tests: Path,
    environment: dict[str, str],
    *,
    stresses: bool,
    runs_tests: bool,
) -> Verdict:
    if mutation.equivalent:
        return Verdict(mutation.family, mutation.kind, mutation.what, "", 0.0, "", equivalent=mutation.equivalent)
    with tempfile.TemporaryDirectory(prefix="stretto-mutation-") as folder:
        source = Path(folder) / "src"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(str(files("stretto")), source / "stretto", ignore=ignored)
        apply(mutation, source / "stretto")
        paths = os.pathsep.join([str(source), str(ROOT), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        here = environment | {"PYTHONPATH": paths}
        by_stress, seconds, note = _stress(mutation, ranks, minutes, folder, here) if stresses else ("", 0.0, "")
        by_tests = _test(mutation, tests, here) if runs_tests else ""
    return Verdict(mutation.family, mutation.kind, mutation.what, by_stress, seconds, by_tests, note)


def _stress(
    mutation: Mutation, ranks: int, minutes: float, folder: str, environment: dict[str, str]
) -> tuple[str, float, str]:
    """Run the stress. Returns (how it found the mutation, or "", seconds, a note)."""
    command = [sys.executable, "-P", "-m", "tests.stress", "--ranks", str(ranks), "--minutes", str(minutes), "--json"]
    command += ["--only", mutation.only, "--stop-at-first", "--limit", str(_BATCH_LIMIT)]
    if mutation.kind != "wait":  # all other kinds are found when warps drift apart
        command.append("--late-warps")
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60 * minutes + _START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", 0.0, "the stress did not end"
    try:
        report = json.loads(done.stdout.splitlines()[-1])
        rows = report["configurations"]
    except (IndexError, ValueError, KeyError):
        return "", 0.0, f"the stress failed: {(done.stdout + done.stderr).strip()[-_MAX_WORDS:]}"
    found = next((row for row in rows if row["wrong"] or row["raised"] or row["hung"]), None)
    if found is None:
        return "", report["seconds"], f"{report['results']:,} results were right"
    how = next(what for what in ("wrong", "hung", "raised") if found[what])
    last = found["findings"][0].strip().splitlines()[-1][-_MAX_WORDS:] if found["findings"] else ""
    return f"{how}: {found['name']}", report["seconds"], last


def _test(mutation: Mutation, tests: Path, environment: dict[str, str]) -> str:
    """The first of the mutation's tests that fails, or ""."""
    for test in mutation.tests:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", test]
        try:
            done = subprocess.run(
                command,
                cwd=tests,
                env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                timeout=_TEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{test} (did not end)"
        if done.returncode == 1:  # other codes: pytest itself failed, or found no such test
            return test
    return ""


_FIELDS = [field.name for field in fields(Verdict)]
_JSON = "mutations.json"


def write_table(verdicts: Sequence[Verdict]) -> str:
    lines = ["| family | removed | stress | after | machine code | found |", "|---|---|---|---|---|---|"]
    for verdict in verdicts:
        test = verdict.by_tests.rpartition("::")[2].replace("_", " ")
        seconds = f"{verdict.seconds:.0f} s" if verdict.seconds else ""
        found = (
            f"nothing to find: {verdict.equivalent}" if verdict.equivalent else "yes" if verdict.is_found else "**no**"
        )
        lines.append(
            f"| {verdict.family} | {verdict.kind}: {verdict.what} | {verdict.by_stress or 'no'} | {seconds} | "
            f"{test or 'no'} | {found} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try the mutations that the command line selects. Returns 1 if one was not found."""
    parser = argparse.ArgumentParser(description="Break the kernels on purpose, and show what finds it.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", default="", help="families, kinds or family/kind, with commas")
    parser.add_argument("--tests", type=Path, default=Path(), help="the repository's root")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--tests-only", action="store_true", help="run no stress, and so need no GPU")
    parts.add_argument("--stress-only", action="store_true", help="run no tests of machine code")
    parser.add_argument(
        "--out", type=Path, help="folder for mutations.md and mutations.json: what these have of other runs stays there"
    )
    options = parser.parse_args()
    wanted = {part for part in options.only.split(",") if part}
    known = {name for one in MUTATIONS for name in (one.family, one.kind)}
    if unknown := wanted - known - {f"{one.family}/{one.kind}" for one in MUTATIONS}:
        parser.error(f"--only is {', '.join(sorted(unknown))}, but families and kinds are {', '.join(sorted(known))}")
    chosen = [one for one in MUTATIONS if not wanted or wanted & {one.family, one.kind, f"{one.family}/{one.kind}"}]
    try:
        verdicts = {} if options.out is None else read_verdicts(options.out / _JSON)
    except ValueError as error:
        parser.error(str(error))
    for verdict in try_all(
        chosen,
        ranks=options.ranks,
        minutes=options.minutes,
        jobs=options.jobs,
        tests=options.tests.resolve(),
        stresses=not options.tests_only,
        runs_tests=not options.stress_only,
    ):
        key = verdict.family, verdict.kind, verdict.what
        before = verdicts.get(key)
        if before is not None and options.tests_only:
            verdicts[key] = replace(before, by_tests=verdict.by_tests)
        elif before is not None and options.stress_only:
            verdicts[key] = replace(verdict, by_tests=before.by_tests)
        else:
            verdicts[key] = verdict
        print(f"{verdict.family}, {verdict.kind}, {verdict.what}: {verdict.by_stress or 'no'} after "
              f"{verdict.seconds:.0f} s ({verdict.note}); tests: {verdict.by_tests or 'no'}", flush=True)  # fmt: skip
        if options.out is not None:  # after each: an interrupted run keeps its verdicts
            options.out.mkdir(parents=True, exist_ok=True)
            every = _sort(verdicts)
            write_atomically(options.out / "mutations.md", write_table(every))
            found = [asdict(one) | {"is_found": one.is_found} for one in every]
            write_atomically(options.out / _JSON, json.dumps(found, indent=1) + "\n")
    every = _sort(verdicts)
    print(write_table(every))
    return int(not all(verdict.is_found for verdict in every))


def read_verdicts(path: Path) -> dict[tuple[str, str, str], Verdict]:
    """Read earlier verdicts, by family, kind and what was removed. ValueError for a file of another kind."""
    if not path.exists():
        return {}
    try:
        rows = [Verdict(**{name: row[name] for name in _FIELDS if name in row}) for row in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no verdicts on mutations") from error
    return {(row.family, row.kind, row.what): row for row in rows}


def _sort(verdicts: Mapping[tuple[str, str, str], Verdict]) -> list[Verdict]:
    """The verdicts in the order of `MUTATIONS`, without those on mutations that no longer exist."""
    keys = [(one.family, one.kind, one.what) for one in MUTATIONS]
    return [verdicts[key] for key in keys if key in verdicts]


if __name__ == "__main__":
    sys.exit(main())
