# SPDX-License-Identifier: Apache-2.0
"""Configurations of `python -m tests.stress`, which cover every kernel of the library in every form of its calls.

A catalogue is a module with a function `list_configurations()`. It is imported when needed, since Triton decides at its
import whether kernels are compiled or interpreted.
"""

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from stretto.suggestions import did_you_mean

if TYPE_CHECKING:
    from tests.stress.harness.team import Team
    from torch import Tensor

CATALOGUES = (
    "tests.stress.operators",
    "tests.stress.collectives",
    "tests.stress.primitives",
    "tests.stress.embedding",
    "tests.stress.copy_engines",
    "tests.stress.optimizers",
    "tests.stress.attention",
    "tests.stress.exchange",
    "tests.stress.tensor_parallel",
    "tests.stress.experts",
    "tests.stress.few_tokens",
    "tests.stress.inference",
)


class Check(NamedTuple):
    """A result of a call and its expected value. mask: where they must agree (None: everywhere)."""

    found: "Tensor"
    expected: "Tensor"
    mask: "Tensor | None" = None


class StressCase(ABC):
    """The calls of one configuration on one rank, in one group.

    entries: the number of inputs with known results, which calls use in random order. are_outputs_new: each call
    allocates the tensors that it returns; they are poisoned after the comparison, so that the allocator gives poisoned
    memory to the next call. leaves_room: calls of two groups complete in whatever order their kernels start.
    """

    entries: int
    are_outputs_new = True
    leaves_room = True

    @abstractmethod
    def call(self, entry: int) -> Sequence[Check]:
        """Enqueue the call with input number `entry`, and pair its results with the expected ones. Does not wait."""

    def poison(self) -> None:  # noqa: B027  (not every case has a workspace)
        """Fill the workspaces with poison, as far as the protocol allows. No rank is in a call meanwhile."""

    def check(self) -> None:  # noqa: B027
        """Raise the error that the device has reported, such as a wait that timed out. The device is idle."""

    def release_graph(self) -> None:  # noqa: B027
        """Release the resources of a captured graph of calls; the graph is deleted."""


@dataclass(frozen=True)
class Configuration:
    """One form of calls of one kernel, or of a few that belong together.

    family: the part of the library. kernels: those that it launches, as `kernels.list_kernels` names them. covers: a
    description for `--list`. make: makes the case of a rank; collective. takes_graphs: CUDA graphs can capture its
    calls. takes_groups: several groups may call it at once. takes_halves: these may be the two halves of the ranks,
    for which its kernels are compiled anew. crosses_nodes: ranks of several nodes can run it. suits: whether it
    supports a number of ranks. on_cpu: CPU ranks can run it.
    """

    name: str
    family: str
    kernels: tuple[str, ...]
    covers: str
    make: Callable[["Team"], StressCase]
    takes_graphs: bool = True
    takes_groups: bool = True
    takes_halves: bool = False
    crosses_nodes: bool = False
    suits: Callable[[int], bool] = lambda ranks: True
    on_cpu: bool = True

    def describe(self) -> dict[str, Any]:
        """For `--list --json`."""
        return {"name": self.name, "family": self.family, "covers": self.covers, "kernels": list(self.kernels)}


def load_catalogue(modules: Iterable[str] = CATALOGUES) -> dict[str, Configuration]:
    """All configurations of the modules by name. Raises ValueError if two have one name."""
    found: dict[str, Configuration] = {}
    for module in modules:
        for configuration in import_module(module).list_configurations():
            if configuration.name in found:
                raise ValueError(f"two configurations are called {configuration.name!r}")
            found[configuration.name] = configuration
    return found


def select(configurations: dict[str, Configuration], patterns: str | None) -> dict[str, Configuration]:
    """The configurations that match one of the patterns (with commas between): a name, wildcards (*, ? and [...]), or
    a part of a name.

    Raises ValueError for a pattern that matches none.
    """
    if patterns is None:
        return configurations
    picked = select_names({name: one.family for name, one in configurations.items()}, patterns)
    return {name: one for name, one in configurations.items() if name in picked}


def select_names(families: Mapping[str, str], patterns: str) -> set[str]:
    """The names that match one of the patterns, as `select` says. families: the family of each name."""
    picked: set[str] = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        found = set(_pick(families, pattern))
        if not found:
            near = did_you_mean(pattern, families)
            raise ValueError(
                f"no configuration matches {pattern!r}{near or ':'} --list shows all {len(families)}, of the families "
                f"{', '.join(sorted(set(families.values())))}"
            )
        picked |= found
    return picked


def _pick(names: Iterable[str], pattern: str) -> list[str]:
    if pattern in names:
        return [pattern]
    has_wildcard = any(character in pattern for character in "*?[")
    return [name for name in names if (fnmatch.fnmatchcase(name, pattern) if has_wildcard else pattern in name)]
