# SPDX-License-Identifier: Apache-2.0
"""Packages whose public names are imported on first use."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

LAZY = (
    "stretto",
    "stretto.collectives",
    "stretto.huggingface",
    "stretto.models",
    "stretto.parallel",
    "stretto.planner",
    "stretto.recommendation",
    "stretto.report",
    "stretto.simulator",
    "stretto.train.checkpoint",
    "stretto.launch",
    "stretto.tuning",
)


PACKAGE = """
from typing import TYPE_CHECKING

from stretto.lazy import attach

if TYPE_CHECKING:
    from math import sqrt

    from made import inner as inner

__all__ = ["sqrt"]
__getattr__, __dir__ = attach(__name__)
"""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A package with a lazy name and a lazy submodule."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "made" / "inner.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("made", "made.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("made")


def test_names_are_found_once_and_then_are_the_packages_own(package):
    assert "sqrt" not in vars(package)
    assert package.sqrt(4) == 2
    assert "sqrt" in vars(package)
    assert package.inner.value == 7
    assert dir(package) == ["inner", "sqrt"]


def test_an_unknown_name_is_no_attribute(package):
    with pytest.raises(AttributeError, match="module 'made' has no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.parametrize("name", LAZY)
def test_every_public_name_of_a_lazy_package_can_be_imported(name):
    package = importlib.import_module(name)
    assert set(package.__all__) <= set(dir(package))
    for each in dir(package):
        assert getattr(package, each) is not None


HIDING = """
import sys
from importlib import import_module, util

for name in sys.argv[1:]:
    package = import_module(name)
    for each in package.__all__:
        if util.find_spec(f"{name}.{each}") is not None:
            module = import_module(f"{name}.{each}")  # which becomes an attribute of the package
            if getattr(package, each) is module and hasattr(module, each):
                print(name, each)
"""


def test_no_module_takes_the_place_of_a_public_name_of_its_package():
    assert run(HIDING, *LAZY) == ""


def modules_after(statement: str) -> set[str]:
    """The modules that are neither Python's nor Stretto's which a new interpreter has imported after a statement."""
    found = run(f"{statement}\nimport sys; print(*sys.modules)").split()
    return {name for name in found if name.partition(".")[0] not in {*sys.stdlib_module_names, "stretto"}}


def run(program: str, *arguments: str) -> str:
    """What a program prints in a new interpreter."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_the_front_door_imports_no_more_than_torchs_fsdp2() -> None:
    found = modules_after("from stretto import Grid, parallelize")
    assert found - modules_after("from torch.distributed.fsdp import fully_shard") == set()
    assert not {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton", "transformers"} & found


@pytest.mark.exhaustive
def test_the_trainers_plugin_imports_no_trainer_before_it_is_used() -> None:
    found = modules_after("from stretto.huggingface import trainer_plugin")
    assert not {"transformers", "accelerate", "trl", "pytorch_lightning"} & found
