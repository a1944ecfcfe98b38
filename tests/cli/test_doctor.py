# SPDX-License-Identifier: Apache-2.0
"""`stretto doctor` says what is there, and what is done without what is not."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tests.cli.commands import finish, start

from stretto.cluster import host_memory
from stretto.cluster.host_memory import HostMemoryLimit
from stretto.collectives.backend.native import find_library


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, output, errors = finish(start("doctor", *arguments))
    assert status == 0, errors
    return output


def findings(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, dict[str, str]]:
    output = run(monkeypatch, "--json", **environment)
    return {finding["what"]: finding for finding in json.loads(output)["findings"]}


def test_available_features_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = find_library()
    (tmp_path / "cache").mkdir()
    shutil.copy(library, tmp_path / "cache")
    found = findings(monkeypatch, STRETTO_CACHE=str(tmp_path / "cache"), CUDA_VISIBLE_DEVICES="")
    assert found["backend"]["found"] == f"compiled: {tmp_path / 'cache' / library.name}"
    assert found["torch"] == {"what": "torch", "state": "ok", "found": torch.__version__, "so": ""}
    assert found["GPUs"]["state"] == "missing"
    assert "gloo" in found["GPUs"]["so"]
    assert f"{host_memory.host_memory_limit().bytes / 1e9:,.1f} GB (the " in found["host memory"]["found"]
    assert "without a GPU a rank pins none" in found["host memory"]["found"]
    assert (found["cache"]["state"], found["cache"]["found"]) == ("ok", str(tmp_path / "cache"))
    if sys.platform == "linux":
        assert found["NVRTC"]["state"] == "ok"
        assert found["shared memory"]["state"] == "ok"
    for finding in found.values():
        assert (finding["state"] == "missing") == bool(finding["so"]), finding


def test_missing_features_are_reported_with_their_fallbacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = findings(monkeypatch, STRETTO_CACHE=str(tmp_path / "file"), CXX="no-such-compiler", CUDA_VISIBLE_DEVICES="")
    assert found["cache"]["state"] == "missing"
    assert "STRETTO_CACHE" in found["cache"]["so"]
    assert "there is no C++ compiler 'no-such-compiler' on PATH" in found["backend"]["found"]
    assert "- the backend stretto compiles a small C++ part" in run(monkeypatch)


def test_a_version_that_is_too_old_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    found = importlib.import_module("stretto.cli.doctor")._package("torch", "nothing runs", (2, 11))
    assert (found.state, found.found) == ("missing", "2.9.1+cpu, which is older than 2.11")


@pytest.mark.parametrize(("gpus", "words"), [(4, "each of 4 ranks may pin 25.0 GB"), (1, "a rank may pin 100.0 GB")])
def test_host_memory_is_reported_with_its_limit_and_the_limit_on_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, gpus: int, words: str
) -> None:
    limit = HostMemoryLimit(128 * 10**9, "the cgroup limit /sys/fs/cgroup/memory.max")
    monkeypatch.setattr(host_memory, "host_memory_limit", lambda: limit)
    monkeypatch.setattr(
        host_memory, "host_memory_available", lambda: HostMemoryLimit(100 * 10**9, "what is left of it")
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    (found,) = importlib.import_module("stretto.cli.doctor")._host_memory()
    there = "128.0 GB (the cgroup limit /sys/fs/cgroup/memory.max), 100.0 GB left for optimizer state; "
    assert (found.state, found.found) == ("ok", there + words)


def test_a_system_that_does_not_report_its_memory_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> None:
        raise OSError("this system does not report how much memory it has")

    monkeypatch.setattr(host_memory, "host_memory_limit", unknown)
    (found,) = importlib.import_module("stretto.cli.doctor")._host_memory()
    assert (found.state, found.found) == ("missing", "this system does not report how much memory it has")
    assert found.so


@pytest.mark.long
def test_a_preflight_measures_ranks_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--preflight", "--ranks", "2", "--folder", str(tmp_path), "--json")
    report = json.loads(run(monkeypatch, *arguments, CUDA_VISIBLE_DEVICES=""))
    assert len(report["products"]) == 2
    assert sorted(report["links"]) == ["0->1", "1->0"]
    assert report["faults"] == []
    assert report["seconds"] < 600
    assert not list(tmp_path.iterdir())


def check_some_kernels() -> list[bool]:
    from stretto.bench import kernel_check

    calls = kernel_check.list_calls(torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    ends = "scatter of (2, 512, 256) torch.float32 by kernel", "of 7 by direct-all-to-all LL"
    names = [name for name in calls if name.endswith(ends)]
    assert len(names) == 2, names

    def draw(*shape: int) -> list[torch.Tensor]:
        return list(torch.randint(-1, 2, (2, *shape), generator=generator).float())

    return [torch.equal(*calls[name](draw)) for name in names]


def check_broken_kernel() -> tuple[int, dict[str, int]]:
    from stretto.bench import kernel_check

    kernel_check.list_calls = lambda device: {"broken": lambda draw: (draw(3)[0], torch.full((3,), 7.0))}
    report = kernel_check.check_rank(2, 0.0, 5)
    return report.results, dict(report.wrong)


def test_kernels_are_compared_with_results_known_to_the_bit(interpret) -> None:
    assert all(map(all, interpret(2, check_some_kernels)))


def test_kernels_with_wrong_results_are_named(interpret) -> None:
    assert interpret(2, check_broken_kernel) == [(2, {"broken": 2})] * 2
