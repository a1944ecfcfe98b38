# SPDX-License-Identifier: Apache-2.0
"""The process's record of failed waits: which calls raise a failure, for how long, and what happens without a check."""

import ctypes
import gc
import subprocess
import sys

import pytest
import torch

from stretto.memory import PeerError, failures

CPU = torch.device("cpu")


class Workspace:
    """Owner of a failure: here nothing but its name."""

    def __init__(self, name: str) -> None:
        self.record = failures.register(self, lambda words: f"{name} waited for rank {words[1]}", CPU)


@pytest.fixture(autouse=True)
def nothing_failed():
    """Each test begins, and ends, without a failure."""
    gc.collect()
    failures.check()
    yield
    gc.collect()
    failures.check()
    assert int(failures.failure_flag(CPU)) == 0


def fail_as_a_kernel_does(record, peer):
    """The flag first, then the record, its first word last, and the summary word through its address in the record."""
    record.failed.fill_(1)
    record.words[1] = peer
    record.words[0] = 1
    address = record.words[failures.SUMMARY_ADDRESS :][:2].view(torch.int64).item()
    ctypes.c_int32.from_address(address).value = 1


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_failure_of_one_workspace_is_raised_by_every_check_until_it_is_closed(by_kernel):
    healthy, failed = Workspace("healthy"), Workspace("failed")
    assert not failures.has_failed()
    if by_kernel:
        fail_as_a_kernel_does(failed.record, 3)
    else:
        failed.record.mark([1, 3])
    assert failures.has_failed()
    assert int(failures.failure_flag(CPU)) == 1
    assert (healthy.record.is_failed, failed.record.is_failed) == (False, True)
    for _ in range(2):
        with pytest.raises(PeerError, match="failed waited for rank 3"):
            failures.check()
    with pytest.raises(PeerError, match="failed waited for rank 3"):
        failures.synchronize(CPU)
    healthy.record.close()  # which changes nothing
    assert failures.has_failed()
    failed.record.close()
    failures.check()
    assert int(failures.failure_flag(CPU)) == 0


@pytest.mark.long
def test_a_failed_workspace_that_is_dropped_without_being_closed_is_forgotten():
    failed = Workspace("failed")
    failed.record.mark([1, 3])
    del failed
    gc.collect()
    assert not failures.has_failed()
    assert int(failures.failure_flag(CPU)) == 0


def test_of_two_failed_workspaces_one_that_is_closed_leaves_the_other_ones_failure():
    first, second = Workspace("first"), Workspace("second")
    first.record.mark([1, 1])
    second.record.mark([1, 2])
    first.record.close()
    with pytest.raises(PeerError, match="second waited for rank 2"):
        failures.check()
    assert int(failures.failure_flag(CPU)) == 1
    second.record.close()


def test_the_first_failure_of_a_workspace_is_kept():
    failed = Workspace("failed")
    failed.record.mark([1, 3])
    failed.record.mark([1, 4])
    with pytest.raises(PeerError, match="failed waited for rank 3"):
        failures.check()


def test_a_row_is_used_again_and_nothing_of_its_last_failure_is_left(monkeypatch):
    before = Workspace("before")
    before.record.mark([1, 3])
    before.record.close()
    monkeypatch.setattr(failures, "MAX_RECORDS", failures._next_row)
    kept = [Workspace("kept") for _ in failures._free_rows[:]]
    assert kept, "the closed workspace has given its row back"
    assert not failures.has_failed()
    assert not any(one.record.words[: failures.SUMMARY_ADDRESS].any() for one in kept)
    with pytest.raises(RuntimeError, match="no more fit"):
        Workspace("one too many")


@pytest.mark.parametrize("words", [[], [0, 1], [1] * 13])
def test_words_that_are_no_failure_are_refused(words):
    one = Workspace("one")
    with pytest.raises(ValueError, match="a failure has 1 to 12 words, the first of them not 0"):
        one.record.mark(words)


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_watchdog_of_a_time_that_is_none_is_refused(text, monkeypatch):
    monkeypatch.setenv(failures.WATCHDOG_VARIABLE, text)
    with pytest.raises(ValueError, match=f"STRETTO_WATCHDOG must be a number of seconds.* not {text!r}"):
        failures.watchdog_seconds()


# One process that imports torch, and a child for each case, forked while there is one thread.
WATCHED = """
import os, signal, sys, time
import torch
from stretto.memory import PeerError, failures

class Workspace:
    pass

def live(case):
    # Long enough that a busy machine leaves the others the time to look.
    os.environ["STRETTO_WATCHDOG"] = {"off": "0", "never looks": "0.1"}.get(case, "3")
    failures._WATCHDOG_PERIOD = 0.05
    owner = Workspace()
    describe = lambda words: f"{case}: rank 0 waited for rank {words[1]}"
    owner.record = failures.register(owner, describe, torch.device("cpu"))
    owner.record.mark([1, 3])
    if case == "looks at one of two":
        other = Workspace()
        other.record = failures.register(other, lambda words: "another", torch.device("cpu"))
        other.record.mark([1, 4])
    if case.startswith("looks"):
        try:
            failures.check()
        except PeerError:
            pass
    if case == "closes":
        owner.record.close()
    time.sleep(30.0 if case == "never looks" else 1.0 if case == "off" else 4.0)
    os._exit(0)

children = {}
for case in ("never looks", "looks", "looks at one of two", "closes", "off"):
    child = os.fork()
    if child == 0:
        live(case)
    children[child] = case
ended = {}
for _ in children:
    child, status = os.wait()
    ended[children[child]] = os.waitstatus_to_exitcode(status)
print([ended[case] for case in children.values()])
"""


@pytest.mark.long
@pytest.mark.usefixtures("forks_torch_processes")
def test_the_watchdog_ends_a_process_that_does_not_look_by_name_and_no_other():
    ended = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True)
    assert ended.stdout == "[-6, 0, 0, 0, 0]\n", ended.stderr
    assert "never looks: rank 0 waited for rank 3. Set STRETTO_WATCHDOG=0 to switch the watchdog off" in ended.stderr
    assert "off: rank 0" not in ended.stderr
