# SPDX-License-Identifier: Apache-2.0
"""Faults at random between two nodes, whose kernels put: short ones harm nothing, others are named on both sides."""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from tests.memory.network.relay import Relay
from tests.processes import LIMIT, shared_server

SEED = random.randrange(2**31)
SECONDS = 5.0  # the group's limit: a loaded machine may stop a rank for a while, too
SHORT = 0.25  # of an outage that harms nothing
HARMLESS = ("link down", "reset", "half a frame", "stopped")
HARMFUL = ("link down for good", "killed", "stopped for good", "proxy ended")


class Job:
    """Two ranks and the relay between them."""

    def __init__(self, folder, rng, proxies):
        self.folder, self.rng, self.proxies, self.printed, self.kinds = folder, rng, proxies, ([], []), []
        python = shared_server("interpreted commands").python
        self.processes = [
            subprocess.Popen(
                [
                    python,
                    "-m",
                    "tests.memory.network.putting_rank",
                    str(rank),
                    str(folder),
                    proxies[rank],
                    str(SECONDS),
                ],
                env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        self.readers = [threading.Thread(target=self.read, args=(rank,)) for rank in range(2)]
        for reader in self.readers:
            reader.start()
        self.wait_for((folder / "target").exists)
        self.relay = Relay(("127.0.0.1", int((folder / "target").read_text())), rng.randrange(2**31))
        (folder / "relay.new").write_text(str(self.relay.address[1]))
        (folder / "relay.new").rename(folder / "relay")
        self.ids = [shared_server("interpreted commands").process_of(process.pid) for process in self.processes]

    def read(self, rank):
        for line in self.processes[rank].stdout:
            self.printed[rank].append(line.strip())

    def go_on(self):
        """Wait until both ranks have made a few more calls."""
        wanted = [len(lines) + 3 for lines in self.printed]
        self.wait_for(lambda: all(len(lines) >= count for lines, count in zip(self.printed, wanted, strict=True)))

    def wait_for(self, condition):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in self.processes), self.describe()
            time.sleep(0.005)

    def describe(self):
        return self.proxies, self.kinds, [lines[-1:] for lines in self.printed]

    def inject(self, kind):
        """Make a fault; the rank that it is of, if it is of one."""
        rank = self.rng.randrange(2)
        self.kinds.append((kind, rank))
        match kind:
            case "link down" | "link down for good":
                self.relay.take_down()
                if kind == "link down":
                    time.sleep(SHORT)
                    self.relay.bring_up()
                return None
            case "reset":
                self.relay.reset()
            case "half a frame":
                self.relay.cuts_next = True
            case "stopped" | "stopped for good":
                os.kill(self.ids[rank], signal.SIGSTOP)
                if kind == "stopped":
                    time.sleep(SHORT)
                    os.kill(self.ids[rank], signal.SIGCONT)
            case "killed":
                os.kill(self.ids[rank], signal.SIGKILL)
            case "proxy ended":
                os.kill(self.ids[rank], signal.SIGUSR1)
                return None
        return rank

    def end(self, lost=None):
        """What each rank printed last, once all processes have ended."""
        for rank in [1 - lost, lost] if lost is not None else [0, 1]:
            if rank == lost:  # it is judged no more
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.ids[rank], signal.SIGKILL)
            self.processes[rank].wait(LIMIT)
            self.readers[rank].join(LIMIT)
        return [lines[-1] for lines in self.printed]

    def close(self):
        self.relay.close()
        for process in self.processes:
            process.kill()
            process.wait(LIMIT)
            process.stdout.close()


def run_faults(folder, seed, count):
    """Jobs of up to four faults, of which the last may be one that ranks do not survive; all faults by their kinds."""
    rng, made = random.Random(seed), []
    while len(made) < count:
        kinds = rng.choices(HARMLESS, k=min(3, count - len(made)))
        if len(made) + len(kinds) < count:
            kinds.append(HARMFUL[sum(kind in HARMFUL for kind in made) % len(HARMFUL)])
        here = folder / str(len(made))
        here.mkdir()
        job = Job(here, rng, rng.choices(("native", "python"), k=2))
        try:
            run_job(job, kinds)
        finally:
            job.close()
        made += kinds
        assert not any(Path(f"/proc/{process}").exists() for process in job.ids)
    return made


def run_job(job, kinds):
    job.go_on()
    for kind in kinds[:-1] if kinds[-1] in HARMFUL else kinds:
        job.inject(kind)
        job.go_on()
    if kinds[-1] not in HARMFUL:
        (job.folder / "stop").touch()
        assert job.end() == ["right", "right"], job.describe()
        return
    lost = job.inject(kinds[-1])
    for rank, last in enumerate(job.end(lost)):
        if rank == lost:
            continue
        assert last.startswith("error "), job.describe()
        for words in (
            "all_gather_by_puts: ",
            f"rank {rank} of 2 (node {rank}, NIC lo)",
            f"rank {1 - rank} of 2 (node {1 - rank}, NIC lo)",
        ):
            assert words in last, job.describe()


@pytest.mark.parametrize("count", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_short_faults_harm_nothing_and_others_are_named_on_both_sides(tmp_path, count):
    print(f"seed {SEED}")
    made = run_faults(tmp_path, SEED, count)
    assert len(made) == count


@pytest.mark.exhaustive
def test_200_faults_harm_nothing_or_are_named(tmp_path):
    print(f"seed {SEED}")
    made = run_faults(tmp_path, SEED, 200)
    assert {*made} == {*HARMLESS, *HARMFUL}
