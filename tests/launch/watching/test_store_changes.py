# SPDX-License-Identifier: Apache-2.0
"""The watchers of several machines exchange lines through a store that others may write, too."""

import random
from dataclasses import asdict

import pytest

from stretto.launch.watching.ranks import RankState
from stretto.launch.watching.watcher import WATCHERS, NodeExchange

KEY = "0123456789abcdef"
CHANGES = 10_000


class Store(dict[str, bytes]):
    """The part of torch's store that `NodeExchange` uses. A `get` of a key that is not there would wait."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        self[key] = super().get(key, b"") + value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def state_of(rank: int) -> RankState:
    return RankState(rank=rank, host=f"node{rank}", pid=rank + 1, phase="step", step=1, idle=0.0)


@pytest.mark.long
def test_whatever_is_written_into_the_store_only_lines_of_the_jobs_watchers_count() -> None:
    rng, store, now = random.Random(0), Store(), [0.0]
    one, two = (NodeExchange(store, node, KEY, lambda: now[0]) for node in (0, 1))
    stranger = NodeExchange(store, 1, "another job's", lambda: now[0])
    two.exchange([state_of(1)])
    one.exchange([state_of(0)])
    for _ in range(CHANGES):
        line = two.sign({"number": rng.randrange(9), "node": 1, "ranks": [asdict(state_of(1))]}).encode()
        at, junk = rng.randrange(len(line)), rng.randbytes(rng.randrange(1, 80))
        values = [
            junk,
            b"",
            line[:at],
            line[:at] + junk + line[at:],
            line.replace(b"node1", b"node2"),
            stranger.sign({"number": 1, "node": 1, "ranks": [asdict(state_of(1)) | {"idle": 1e9}]}).encode(),
            b"[" * rng.randrange(10_000),
            b"7,-1,1e9,../../x,99999999999999,",
        ]
        key = rng.choice([WATCHERS, WATCHERS, "stretto/watch/0", "stretto/watch/1", f"stretto/watch/{rng.random()}"])
        store[key] = rng.choice(values)
        if rng.random() < 0.1:
            store.pop(WATCHERS, None)
        if rng.random() < 0.02:  # the watchers look once a second
            now[0] += 1.0
            two.exchange([state_of(1)])
            states, silent = one.exchange([state_of(0)])
            assert states == {1: state_of(1)}
            assert silent == {1: 0.0}, "a change of the list hides no machine"


def test_machines_find_each_other_again_after_the_list_was_removed() -> None:
    store = Store()
    one, two = (NodeExchange(store, node, KEY) for node in (0, 1))
    one.exchange([state_of(0)])
    store.pop(WATCHERS)
    for _ in range(2):
        assert one.exchange([state_of(0)])[0] in ({}, {1: state_of(1)})
        two.exchange([state_of(1)])
    assert one.exchange([state_of(0)])[0] == {1: state_of(1)}
