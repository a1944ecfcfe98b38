# SPDX-License-Identifier: Apache-2.0
"""Runs `python -m tests.stress`: chooses the next batch of calls, keeps the results, and replaces ranks that hang."""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tests.stress.harness.catalogue import Configuration, load_catalogue, select
from tests.stress.harness.ledger import Account, Ledger
from tests.stress.harness.settings import StressSetting
from tests.stress.harness.team import mix
from tests.stress.harness.worker import CallBatch, Poison
from tests.stress.harness.worker_pool import Replies, WorkerPool

from stretto.cluster.detection import count_gpus
from stretto.memory.mps import has_mps, mps_daemon, share_for
from stretto.memory.shared_gpus import SWITCH

RESULTS_A_BATCH = 2_400  # of all ranks together, on GPUs
FLOOR = 2_400  # results that every configuration gets before any gets more
_SECONDS_OF_BATCH = 0.8
_MAX_TIMES = 8  # how many times as many calls as a configuration's first batch a later one may have
MIN_CALLS, MAX_CALLS = 60, 1_200
CPU_CALLS = 6  # interpreted kernels are thousands of times slower
FIRST_LIMIT = 300.0  # seconds for a batch in which kernels are compiled
LIMIT = 120.0
_MODE_WEIGHTS = {"eager": 5, "graph": 3, "groups": 2}
_POISONED = 0.3  # fraction of batches before which workspaces are poisoned; always before the second
_MAX_FAILURES = 2  # batches that hang or raise before the run leaves their configuration out
_PROGRESS_SECONDS = 10.0  # between lines of progress


@dataclass(frozen=True)
class StressReport:
    """The findings of a run.

    accounts: results of all selected configurations, over all runs of the file. launched: the Triton kernels that each
    configuration launched in this run; of compiled kernels, those that no other had launched in the same form before.
    """

    seed: int
    ranks: int
    device: str
    seconds: float
    configurations: Mapping[str, Configuration]
    accounts: Mapping[str, Account]
    launched: Mapping[str, set[str]]

    @property
    def is_clean(self) -> bool:
        """True if no call gave a wrong result, raised or hung."""
        return all(account.is_clean for account in self.accounts.values())

    @property
    def results(self) -> int:
        return sum(account.results for account in self.accounts.values())

    def count(self, what: str) -> int:
        """The number of "wrong", "raised" or "hung" calls of all configurations."""
        return sum(getattr(account, what) for account in self.accounts.values())

    def list_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "family": configuration.family,
                "results": self.accounts[name].results,
                "wrong": self.accounts[name].wrong,
                "raised": self.accounts[name].raised,
                "hung": self.accounts[name].hung,
                "seconds": round(self.accounts[name].seconds, 2),
                "modes": self.accounts[name].modes,
                "findings": self.accounts[name].findings,
            }
            for name, configuration in self.configurations.items()
        ]


def stress(setting: StressSetting, report: Callable[[str], None] = print) -> StressReport:
    """Run the stress and return its findings.

    report: prints a line of progress. Raises ValueError for a pattern that matches nothing, RuntimeError if ranks
    cannot be started.
    """
    gpus = count_gpus()
    known = load_catalogue(setting.catalogues)
    chosen = {
        name: one
        for name, one in select(known, setting.only).items()
        if one.suits(setting.ranks) and (gpus or one.on_cpu) and (one.crosses_nodes or not setting.nodes)
    }
    if not chosen:
        between = f" of the nodes {setting.nodes}" if setting.nodes else ""
        raise ValueError(
            f"none of the configurations that match {setting.only!r} is for {setting.ranks} ranks{between} here"
        )
    seed = random.SystemRandom().randrange(2**31) if setting.seed is None else setting.seed
    ledger = Ledger(setting.resume)
    ledger.begin(setting.ranks, seed)
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "STRETTO_NODES": setting.nodes}
    report(f"{len(chosen)} configurations, {setting.ranks} ranks, seed {seed}")
    with ExitStack() as stack:
        if not gpus:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        elif setting.ranks > gpus:
            environment[SWITCH] = "1"
            if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
                report("the ranks share GPUs under the MPS daemon that is there")
            elif has_mps():
                environment |= stack.enter_context(mps_daemon(share_for(-(-setting.ranks // gpus))))
                report("the ranks share GPUs under MPS")
            else:
                report("the ranks share GPUs by time slices: there is no MPS here")
        device = "cuda" if gpus else "cpu"
        pool = WorkerPool(setting.ranks, device, seed, setting.catalogues, environment, prepare=setting.prepare)
        stack.callback(pool.close)
        return _StressRun(setting, seed, chosen, ledger, pool, report, has_gpus=bool(gpus)).run()


def choose_mode(modes: Sequence[str], seed: int, name: str, number: int) -> str:
    """Choose the mode of a configuration's batch. It depends on the seed alone, so that a run can be repeated.

    The first batches use each mode once, in a random rotation, so that short runs with several seeds cover all modes.
    """
    if number < len(modes):
        return modes[(mix(seed, "first mode", name) + number) % len(modes)]
    weights = [_MODE_WEIGHTS[mode] for mode in modes]
    return random.Random(mix(seed, "later mode", name, number)).choices(modes, weights)[0]


def _describe_raised(raised: Mapping[int, str]) -> str:
    """One rank's traceback and the last lines of the others', which name the ranks that each waited for."""
    (first, text), *others = sorted(raised.items())
    lines = [f"rank {first}: {text.strip()}"]
    lines += [f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in others if text.strip()]
    return "\n".join(lines)


class _StressRun:
    """A run in progress. turns: results that each configuration would have if no call had failed; decides the order."""

    def __init__(
        self,
        setting: StressSetting,
        seed: int,
        chosen: Mapping[str, Configuration],
        ledger: Ledger,
        pool: WorkerPool,
        report: Callable[[str], None],
        *,
        has_gpus: bool,
    ) -> None:
        self._setting, self._seed, self._chosen = setting, seed, chosen
        self._ledger, self._pool, self._report, self._has_gpus = ledger, pool, report, has_gpus
        self._accounts = {name: ledger.of(setting.ranks, name) for name in chosen}
        self._turns = {name: account.results for name, account in self._accounts.items()}
        self._batches = dict.fromkeys(chosen, 0)
        self._failures = dict.fromkeys(chosen, 0)
        self._compiled: set[tuple[int, str, str]] = set()
        self._seconds: dict[tuple[int, str, str], float] = {}  # of `_calls` calls, by start, configuration and mode
        self._launched: dict[str, set[str]] = {name: set() for name in chosen}
        self._began = self._reported = time.monotonic()
        self._calls = setting.calls or self._choose_calls()

    def _choose_calls(self) -> int:
        if not self._has_gpus:
            return CPU_CALLS
        return min(max(-(-RESULTS_A_BATCH // self._setting.ranks), MIN_CALLS), MAX_CALLS)

    def run(self) -> StressReport:
        """Run batch after batch until the time is over or all configurations have enough results."""
        while time.monotonic() - self._began < 60 * self._setting.minutes:
            name = self._choose()
            if name is None:
                break
            self._run_batch(name)
            self._ledger.write()
            self._report_progress()
            if self._setting.stops_at_first and not self._accounts[name].is_clean:
                break
        device = self._pool.about
        if device and device not in self._ledger.devices.setdefault(self._setting.ranks, []):
            self._ledger.devices[self._setting.ranks].append(device)
        self._ledger.write()
        seconds = time.monotonic() - self._began
        return StressReport(
            self._seed, self._setting.ranks, device, seconds, self._chosen, self._accounts, self._launched
        )

    def _choose(self) -> str | None:
        """The configuration with the fewest results; None where all have enough."""
        open_ones = [name for name in self._chosen if self._failures[name] < _MAX_FAILURES]
        if self._setting.results is not None:
            open_ones = [name for name in open_ones if self._turns[name] < self._setting.results]
        least = FLOOR if self._setting.results is None else self._setting.results
        # Once all have the least number of results, configurations alternate: fast ones have larger batches.
        return min(open_ones, key=lambda name: (min(self._turns[name], least), self._batches[name]), default=None)

    def _size_batch(self, name: str, mode: str) -> int:
        """The number of calls in the next batch: more if the last one was fast, so that calls take most of the time."""
        seconds = self._seconds.get((self._pool.starts, name, mode))
        if self._setting.calls or seconds is None or not self._has_gpus:
            return self._calls
        return self._calls * min(max(int(_SECONDS_OF_BATCH / max(seconds, 1e-3)), 1), _MAX_TIMES)

    def _run_batch(self, name: str) -> None:
        number = self._batches[name]
        self._batches[name] += 1
        mode = choose_mode(self._list_modes(name), self._seed, name, number)
        if number == 1 or (number and random.Random(mix(self._seed, "poison", name, number)).random() < _POISONED):
            replies = self._pool.ask(Poison(name), LIMIT)
            if not replies.is_whole:
                self._fail(name, replies, f"batch {number}, before which workspaces were poisoned")
                return
        batch = CallBatch(name, number, self._size_batch(name, mode), mode)
        replies = self._pool.ask(batch, self._find_limit(name, mode))
        self._turns[name] += batch.calls * self._setting.ranks
        where = f"batch {number}, {mode}"
        account = self._accounts[name]
        account.batches += 1
        if not replies.is_whole:
            self._fail(name, replies, where)
            return
        self._launched[name].update(*(outcome.launched for outcome in replies.outcomes.values()))
        account.results += sum(outcome.calls for outcome in replies.outcomes.values())
        key = self._pool.starts, name, mode
        longest = max(outcome.seconds for outcome in replies.outcomes.values())
        account.seconds += longest
        kind = f"{mode}, {self._setting.prepare}" if self._setting.prepare else mode
        if kind in account.modes:  # the first batch of a mode compiles
            self._seconds[key] = longest * self._calls / max(batch.calls, 1)
        account.modes[kind] = account.modes.get(kind, 0) + replies.outcomes[0].calls * self._setting.ranks
        wrong = {rank: outcome.wrong for rank, outcome in replies.outcomes.items() if outcome.wrong}
        if wrong:
            account.wrong += sum(wrong.values())
            first = min(replies.outcomes[rank].first_wrong for rank in wrong)
            self._find(name, f"{where}: wrong results by rank {wrong}, the first in call {first}")

    def _list_modes(self, name: str) -> list[str]:
        """The modes that the configuration supports on this machine."""
        configuration = self._chosen[name]
        modes = ["eager"]
        if self._has_gpus and configuration.takes_graphs:
            modes.append("graph")
        if configuration.takes_groups:
            modes.append("groups")
        return modes

    def _find_limit(self, name: str, mode: str) -> float:
        """Seconds that a batch may take: more if these ranks have not compiled its kernels yet."""
        key = self._pool.starts, name, mode
        is_first = key not in self._compiled
        self._compiled.add(key)
        return self._setting.limit or (FIRST_LIMIT if is_first or not self._has_gpus else LIMIT)

    def _fail(self, name: str, replies: Replies, where: str) -> None:
        """Count ranks that raised or hung, and kill all ranks, since the others wait for them; new ones start later."""
        account = self._accounts[name]
        self._failures[name] += 1
        account.raised += len(replies.raised)
        account.hung += len(replies.missing)
        if replies.raised:
            self._find(name, f"{where}: {len(replies.raised)} ranks raised, {_describe_raised(replies.raised)}")
        if replies.missing:
            self._find(name, f"{where}: ranks {sorted(replies.missing)} hung")
        self._pool.kill()

    def _find(self, name: str, what: str) -> None:
        text = f"seed {self._seed}, {what}"
        self._accounts[name].note(text)
        self._report(f"FOUND {name}: {text}")

    def _report_progress(self) -> None:
        now = time.monotonic()
        if now - self._reported < _PROGRESS_SECONDS:
            return
        self._reported = now
        results = [account.results for account in self._accounts.values()]
        bad = sum(account.wrong + account.raised + account.hung for account in self._accounts.values())
        self._report(
            f"{now - self._began:.0f} s: {sum(results):,} results, at least {min(results):,} of each configuration, "
            f"{bad:,} wrong, raised or hung"
        )
