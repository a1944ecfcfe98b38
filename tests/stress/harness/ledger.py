# SPDX-License-Identifier: Apache-2.0
"""The results of each configuration, over any number of runs, in a JSON file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stretto.atomic_files import write_atomically

_VERSION = 1
_MAX_FINDINGS = 5  # that are kept of a configuration


@dataclass
class Account:
    """The results of one configuration.

    results: calls that completed, counted on each rank. wrong: those with a wrong result. raised, hung: calls that did,
    counted once for each rank. findings: the first few, with the seed.
    """

    results: int = 0
    wrong: int = 0
    raised: int = 0
    hung: int = 0
    seconds: float = 0.0
    batches: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """True if no call was wrong, raised or hung."""
        return not (self.wrong or self.raised or self.hung)

    def note(self, text: str) -> None:
        """Keep a finding, if there is room."""
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(text)


class Ledger:
    """The accounts of all configurations by number of ranks. path: the file that `write` writes, or None."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.accounts: dict[int, dict[str, Account]] = {}
        self.seeds: dict[int, list[int]] = {}
        self.devices: dict[int, list[str]] = {}
        if path is not None and path.exists():
            self._read(path)

    def of(self, ranks: int, name: str) -> Account:
        return self.accounts.setdefault(ranks, {}).setdefault(name, Account())

    def begin(self, ranks: int, seed: int) -> None:
        self.seeds.setdefault(ranks, []).append(seed)

    def write(self) -> None:
        if self.path is None:
            return
        write_atomically(self.path, json.dumps({"version": _VERSION, "ranks": self.encode()}, indent=1))

    def encode(self) -> dict[str, Any]:
        return {
            str(ranks): {
                "seeds": self.seeds.get(ranks, []),
                "devices": self.devices.get(ranks, []),
                "configurations": {name: asdict(account) for name, account in sorted(accounts.items())},
            }
            for ranks, accounts in sorted(self.accounts.items())
        }

    def _read(self, path: Path) -> None:
        """Read the file. Raises ValueError for a file of another kind."""
        try:
            whole = json.loads(path.read_text())
            if whole["version"] != _VERSION:
                raise ValueError(f"it has version {whole['version']}, not {_VERSION}")
            for ranks, one in whole["ranks"].items():
                self.seeds[int(ranks)] = [int(seed) for seed in one["seeds"]]
                self.devices[int(ranks)] = [str(device) for device in one["devices"]]
                self.accounts[int(ranks)] = {
                    name: Account(**account) for name, account in one["configurations"].items()
                }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no results of a stress run: {error}") from error
