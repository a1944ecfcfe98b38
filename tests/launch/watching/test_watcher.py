# SPDX-License-Identifier: Apache-2.0
"""Watchers of several machines talk through the store, and refuse values in it that are not theirs."""

import io
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from stretto.counters import Wait, Window
from stretto.launch.watching import stacks
from stretto.launch.watching.monitor import Monitor
from stretto.launch.watching.ranks import RankState
from stretto.launch.watching.watcher import NodeExchange, RankWatcher

KEY = "the key of this job"
WAIT = Wait("all_reduce", (0, 1, 2, 3), "data", "7", 124)


def state_of(rank: int, **changes: Any) -> RankState:
    values: dict[str, Any] = {"rank": rank, "host": "a-host", "pid": 1000 + rank, "phase": "step", "step": 31}
    values |= {"idle": 19.5, "entered": {"7": 124}, "where": ("loader.py:7 in read",), "wait": WAIT, "waits": True}
    return RankState(**values | {"windows": (Window(2, 0.2, 0.1, "nccl"),)} | changes)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_a_state_is_the_same_after_its_way_through_the_store() -> None:
    for state in (state_of(3), state_of(0, wait=None, step=None, state=stacks.GONE, save=4, windows=())):
        assert RankState.of_json(json.loads(json.dumps(asdict(state)))) == state


def begin(*nodes: NodeExchange) -> None:
    """Let each machine see that the others write new lines."""
    for node in (*nodes, *nodes):
        node.exchange([])


def test_two_machines_see_each_others_ranks(store: dist.Store) -> None:
    clock = Clock()
    first, second = (NodeExchange(store, node, KEY, clock) for node in (0, 2))
    assert first.exchange([state_of(0), state_of(1)]) == ({}, {})
    assert second.exchange([]) == ({}, {}), "a line that was there before may be of an earlier start of the job"
    assert first.exchange([state_of(0), state_of(1)]) == ({}, {})
    states, silent = second.exchange([state_of(2, idle=3.0), state_of(3)])
    assert states == {0: state_of(0), 1: state_of(1)}
    assert silent == {0: 0.0, 1: 0.0}
    states, _ = first.exchange([state_of(0), state_of(1)])
    assert states == {2: state_of(2, idle=3.0), 3: state_of(3)}


def test_a_machine_from_which_no_new_line_comes_grows_silent_and_is_heard_again(store: dist.Store) -> None:
    clock = Clock()
    first, second = (NodeExchange(store, node, KEY, clock) for node in (0, 1))
    begin(first, second)
    second.exchange([state_of(1)])
    for seconds in range(20):
        clock.now = 100.0 + seconds
        assert first.exchange([state_of(0)])[1] == {1: float(seconds)}
    second.exchange([state_of(1)])
    assert first.exchange([state_of(0)])[1] == {1: 0.0}


def test_ranks_that_are_done_are_not_silent(store: dist.Store) -> None:
    clock = Clock()
    first, second = (NodeExchange(store, node, KEY, clock) for node in (0, 1))
    begin(first, second)
    second.exchange([state_of(1, is_done=True), state_of(2)])
    first.exchange([state_of(0)])
    clock.now += 50.0
    states, silent = first.exchange([state_of(0)])
    assert (set(states), silent) == ({1, 2}, {2: 50.0})


def test_a_line_with_another_key_or_of_another_machine_is_ignored(store: dist.Store) -> None:
    own, stranger, other = (
        NodeExchange(store, 0, KEY),
        NodeExchange(store, 1, "another key"),
        NodeExchange(store, 2, KEY),
    )
    begin(own, stranger, other)
    stranger.exchange([state_of(1)])
    other.exchange([state_of(2)])
    store.set("stretto/watch/3", store.get("stretto/watch/2").decode())
    store.append("stretto/watchers", "3,5,")  # and nothing at all stands for 5
    assert set(own.exchange([state_of(0)])[0]) == {2}
    assert own.read(3) is None


GARBAGE: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1,
        2**63,
        10**30,
        10**400,
        0.5,
        -0.0,
        1e308,
        float("inf"),
        float("nan"),
        "",
        "x",
        [],
        {},
        [[]],
    ),
    *("../../escaped", "/dev/full", "escaped.txt", "$(touch escaped)", "\x1b[2J\n\n", "\ud800", "é" * 500),
    *(
        [1, 2],
        {"a": {}},
        [[[[]]]],
        {"rank": 0},
        [None] * 50,
        json.loads("[" * 500 + "]" * 500),
        os.getpid(),
        os.getppid(),
    ),
]


def _replace_somewhere(value: Any, chance: random.Random) -> Any:
    """The value with garbage in place of one of its parts, without one, or with one more."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.2:
        return chance.choice(GARBAGE)
    copy: Any = value.copy()
    at = chance.choice(list(copy)) if isinstance(copy, dict) else chance.randrange(len(copy))
    if chance.random() < 0.1:
        del copy[at]
    else:
        copy[at] = _replace_somewhere(copy[at], chance)
    return copy


def _damage(text: bytes, chance: random.Random) -> bytes:
    """The bytes with flipped bits, cut, repeated or with others between them."""
    at, end = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    match chance.randrange(5):
        case 0:
            flipped = bytearray(text or b" ")
            for _ in range(chance.randrange(1, 9)):
                flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
            return bytes(flipped)
        case 1:
            return text[:at]
        case 2:
            return text[:at] + text[end:]
        case 3:
            return text[:end] + text[at:]
        case _:
            return text[:at] + chance.randbytes(chance.randrange(64)) + text[end:]


@pytest.mark.exhaustive
def test_no_value_of_the_store_ends_a_watcher_or_makes_it_touch_anything(
    store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 values: damaged, of other JSON, with paths and process numbers; half of them with the right hash."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    (folder := tmp_path / "current").mkdir()
    monkeypatch.chdir(folder)
    done: list[object] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *arguments, **options: done.append((name, arguments))

    for owner, name in ((os, "kill"), (os, "killpg"), (os, "system"), (subprocess, "Popen"), (os, "mkdir")):
        monkeypatch.setattr(owner, name, record(name))
    clock = Clock()
    nodes, other = NodeExchange(store, 0, KEY, clock), NodeExchange(store, 1, KEY, clock)
    other.exchange([state_of(1), state_of(2, wait=None, waits=False)])
    line = store.get("stretto/watch/1")
    content = json.loads(line.partition(b" ")[2])
    listed = store.get("stretto/watchers")
    own = [state_of(0), state_of(3, wait=None, waits=False, idle=20.0)]
    accepted = 0
    for _ in range(10_000):
        match chance.randrange(4):
            case 0:
                store.set("stretto/watch/1", _damage(line, chance))  # type: ignore[arg-type]
            case 1:
                store.set("stretto/watchers", _damage(listed, chance))  # type: ignore[arg-type]
            case _:  # signed
                content["number"] += 1
                changed = content
                for _ in range(chance.randrange(1, 3)):
                    changed = _replace_somewhere(changed, chance)
                store.set("stretto/watch/1", nodes.sign(changed))
        clock.now += 1.0
        found = nodes.read(1)
        accepted += found is not None
        states, silent = nodes.exchange(own)
        store.set("stretto/watchers", "0,1,")
        monitor = Monitor(None, 4, 20.0, clock)
        monitor.look({**states, **{state.rank: state for state in own}})
        monitor.silent = silent if chance.random() < 0.3 else {}
        running = [rank for rank in monitor.watched(None) if rank in monitor.states]
        for stall in (monitor.find_stall(running), monitor.find_stall(running, 10.0), monitor.find_warning(running)):
            assert stall is None or isinstance(stall.text, str)
        monitor.find_slow(running)
    assert done == []
    assert [path for path in tmp_path.rglob("*") if path != folder] == []
    assert 0 < accepted < 10_000


@pytest.mark.parametrize("length", [1 << 20, 5 << 20])
def test_a_line_that_is_too_long_is_none(store: dist.Store, length: int) -> None:
    own, other = NodeExchange(store, 0, KEY), NodeExchange(store, 1, KEY)
    other.exchange([state_of(1, host="x" * length)])
    assert own.exchange([state_of(0)]) == ({}, {})


SHARE = """
import sys
from pathlib import Path
from stretto import counters
counters.share(Path(sys.argv[1]), int(sys.argv[2]))
counters.note("step", 3)
print("shared", flush=True)
sys.stdin.read()
"""


class Ranks:
    """Two processes that have shared their counters, and the watcher of them, which runs in this process."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        (counters := folder / "counters").mkdir()
        self.errors = [folder / f"error-{rank}.json" for rank in range(2)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", SHARE, str(counters), str(rank)],
                env=os.environ | variables | {"TORCHELASTIC_ERROR_FILE": str(self.errors[rank])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "shared\n"
        settings = {"folder": str(counters), "out": str(folder), "ranks": 2, "timeout": 20.0, "local_ranks": 2}
        self.watcher = RankWatcher(settings, io.BytesIO())
        self.watcher._monitor.look()
        # It looks at no other process of this machine, whatever a test does.
        assert {each.pid for each in self.watcher._local.counters.values()} == {each.pid for each in self.processes}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(**variables: str) -> Ranks:
        made.append(Ranks(tmp_path, variables))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_under_torchrun_a_stall_ends_all_ranks_and_the_culprit_is_named_first(two_ranks: Callable[..., Ranks]) -> None:
    job = two_ranks(TORCHELASTIC_RUN_ID="any")
    job.watcher._end_all("rank 1 is stuck", (1,))
    assert [process.wait() for process in job.processes] == [-signal.SIGKILL] * 2
    found = [json.loads(error.read_text())["message"] for error in job.errors]
    assert found[1]["message"] == "rank 1 is stuck"
    assert found[0]["message"] == "this rank (0) has not failed, but ends, since rank 1 is stuck"
    assert int(found[1]["extraInfo"]["timestamp"]) < int(found[0]["extraInfo"]["timestamp"])
    assert job.watcher._have_ended()


def test_an_error_that_a_rank_has_written_itself_stays(two_ranks: Callable[..., Ranks]) -> None:
    job = two_ranks(TORCHELASTIC_RUN_ID="any")
    job.errors[0].write_text("its own")
    job.watcher._end_all("rank 1 is stuck", (1,))
    assert job.errors[0].read_text() == "its own"


def test_under_other_launchers_a_stall_is_only_reported(two_ranks: Callable[..., Ranks]) -> None:
    job = two_ranks()
    job.watcher._end_all("rank 1 is stuck", (1,))
    assert [process.poll() for process in job.processes] == [None, None]
    assert not any(error.exists() for error in job.errors)


def test_a_process_that_has_a_ranks_number_by_now_is_not_ended(two_ranks: Callable[..., Ranks]) -> None:
    job = two_ranks(TORCHELASTIC_RUN_ID="any")
    known = job.watcher._local.counters
    known[0] = replace(known[0], started=known[0].started - 1)
    job.watcher._end_all("rank 1 is stuck", (1,))
    assert job.processes[1].wait() == -signal.SIGKILL
    assert job.processes[0].poll() is None
