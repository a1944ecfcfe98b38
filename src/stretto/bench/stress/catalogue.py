"""The configurations that `stretto stress` runs: every kernel of the library, in every way in which it can be called.

A catalogue is a module with a function `list_configurations()`. Modules are imported when they are needed, since some
of them import Triton, whose mode (compiled or interpreted) is decided at its import.
"""

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.bench.stress.team import Team

CATALOGUES = (
    "stretto.bench.stress.operators",
    "stretto.bench.stress.collectives",
    "stretto.bench.stress.primitives",
    "stretto.bench.stress.embedding",
    "stretto.bench.stress.copy_engines",
)


class Check(NamedTuple):
    """What a call has made and what it should be; mask: where it matters (None: everywhere)."""

    found: "Tensor"
    expected: "Tensor"
    mask: "Tensor | None" = None


class StressCase(ABC):
    """The calls of one configuration on one rank, in one group.

    entries: how many inputs with known results it has, which calls take in random order. are_outputs_new: whether each
    call allocates the tensors that it returns, which are then filled with poison once they were compared, so that the
    allocator gives poisoned memory to the next call. leaves_room: whether the library promises that calls of two groups
    end in whatever order their kernels start.
    """

    entries: int
    are_outputs_new = True
    leaves_room = True

    @abstractmethod
    def call(self, entry: int) -> Sequence[Check]:
        """Call the kernel with input number `entry`; return its results beside the right ones. It waits for nothing."""

    def poison(self) -> None:  # noqa: B027  (not all have what may be poisoned)
        """Fill the workspaces' data with poison, as far as the kernel's protocol allows, while no rank is in a call."""

    def check(self) -> None:  # noqa: B027
        """Raise what the device has reported: a wait that was given up, say. The device is idle."""

    def release_graph(self) -> None:  # noqa: B027
        """A CUDA graph of its calls is gone."""


@dataclass(frozen=True)
class Configuration:
    """One way to run one kernel, or a few that belong together.

    family: which part of the library it belongs to. kernels: those that it launches, as `kernels.list_kernels` names
    them. covers: in words, for `--list`. make: makes the calls of a rank, collectively. takes_graphs: whether a CUDA
    graph can hold its calls; takes_groups: whether several groups may call it at once; takes_halves: whether two halves
    of the ranks are such groups too, for which its kernels are compiled anew. suits: whether it is for so many ranks.
    on_cpu: whether CPU ranks can run it. symmetric_memory: torch's backend of it, which is chosen for a whole process.
    """

    name: str
    family: str
    kernels: tuple[str, ...]
    covers: str
    make: Callable[["Team"], StressCase]
    takes_graphs: bool = True
    takes_groups: bool = True
    takes_halves: bool = False
    suits: Callable[[int], bool] = lambda ranks: True
    on_cpu: bool = True
    symmetric_memory: str = "CUDA"

    def describe(self) -> dict[str, Any]:
        """For `--list --json`."""
        return {"name": self.name, "family": self.family, "covers": self.covers, "kernels": list(self.kernels)}


def load_catalogue(modules: Iterable[str] = CATALOGUES) -> dict[str, Configuration]:
    """All configurations of the modules by name. ValueError for a name that is there twice."""
    found: dict[str, Configuration] = {}
    for module in modules:
        for configuration in import_module(module).list_configurations():
            if configuration.name in found:
                raise ValueError(f"two configurations are called {configuration.name!r}")
            found[configuration.name] = configuration
    return found


def select(configurations: dict[str, Configuration], patterns: str | None) -> dict[str, Configuration]:
    """Those that one of the patterns, with commas between, picks: by name, by wildcards (*, ? and [...]), or else by a
    part of the name.

    ValueError for a pattern that picks none.
    """
    if patterns is None:
        return configurations
    picked: set[str] = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        found = set(_pick(configurations, pattern))
        if not found:
            families = ", ".join(sorted({one.family for one in configurations.values()}))
            raise ValueError(
                f"no configuration matches {pattern!r}: --list shows all {len(configurations)}, of the families "
                f"{families}"
            )
        picked |= found
    return {name: one for name, one in configurations.items() if name in picked}


def _pick(names: Iterable[str], pattern: str) -> list[str]:
    if pattern in names:
        return [pattern]
    has_wildcard = any(character in pattern for character in "*?[")
    return [name for name in names if (fnmatch.fnmatchcase(name, pattern) if has_wildcard else pattern in name)]
