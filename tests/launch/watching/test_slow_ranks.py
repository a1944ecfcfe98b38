# SPDX-License-Identifier: Apache-2.0
"""A slow rank is found by windows of steps and by entries of torch's flight recorder that the tests make up."""

from types import SimpleNamespace
from typing import Any

import pytest

from stretto import counters
from stretto.counters import WINDOW, Window
from stretto.launch.watching import device_waits
from stretto.launch.watching.device_waits import NcclWindows, is_due, seconds_in_collectives
from stretto.launch.watching.slow_ranks import SlowRanks

MS = 1_000_000  # nanoseconds


def entry(created_ms: float, duration_ms: float | None) -> dict[str, Any]:
    """An entry as torch 2.13 writes it, of a collective that has finished if it has a duration."""
    finished = duration_ms is not None
    common = {"time_created_ns": int(created_ms * MS), "retired": finished, "profiling_name": "nccl:all_reduce"}
    return (
        common
        | {"state": "completed" if finished else "scheduled"}
        | ({"duration_ms": duration_ms} if finished else {})
    )


def steps_of(milliseconds: float, count: int, first: int = 0) -> list[tuple[int, int]]:
    return [(first + step, int(step * milliseconds * MS)) for step in range(count)]


def test_the_seconds_in_nccl_are_those_of_the_collectives_of_whole_steps():
    # Ten steps of 100 ms, with two collectives each. The last two steps still run.
    entries = [entry(step * 100 + at, 30.0 if step < 8 else None) for step in range(10) for at in (10, 60)]
    assert seconds_in_collectives(entries, steps_of(100, 10)) == pytest.approx((0.1, 0.06))


def test_steps_whose_first_collectives_were_overwritten_do_not_count():
    # The buffer begins in the middle of step 3: 5 ms of it are left, and the collectives of steps 4 to 7 take 20 ms.
    entries = [entry(390, 5.0), *(entry(step * 100 + 50, 20.0) for step in range(4, 9))]
    assert seconds_in_collectives(entries, steps_of(100, 9)) == pytest.approx((0.1, 0.02))


def test_a_step_whose_looks_are_missing_is_part_of_the_steps_between():
    starts = [start for start in steps_of(100, 9) if start[0] not in (3, 4)]
    entries = [entry(step * 100 + 50, 20.0) for step in range(9)]
    assert seconds_in_collectives(entries, starts) == pytest.approx((0.1, 0.02))


def test_operations_that_were_enqueued_as_one_count_once():
    parts = [entry(step * 100 + 40, None) for step in range(9) for _ in range(4)]
    entries = sorted(
        [*parts, *(entry(step * 100 + 50, 20.0) for step in range(9))], key=lambda each: each["time_created_ns"]
    )
    assert seconds_in_collectives(entries, steps_of(100, 9)) == pytest.approx((0.1, 0.02))


@pytest.mark.parametrize(
    "entries",
    [[], [entry(at, None) for at in range(0, 900, 50)], [entry(850, 20.0), entry(860, 20.0)]],
    ids=["none", "none with a time", "less than a step"],
)
def test_without_a_whole_step_of_times_there_is_no_answer(entries):
    assert seconds_in_collectives(entries, steps_of(100, 9)) is None


def of(**windows: tuple[float, float, str]) -> dict[int, list[Window]]:
    """Each rank's window number 2: its busy seconds, the seconds of a step, the view."""
    return {int(rank[1:]): [window_of(*window)] for rank, window in windows.items()}


def window_of(busy: float, step: float, view: str) -> Window:
    return Window(2, step, step - busy, view)


def test_the_rank_whose_nccl_kernels_are_the_shortest_is_slow():
    # Steps of 180 ms. Rank 3 is in NCCL for 20 ms, the others for 100 ms, of which they wait 80 ms for it.
    found = SlowRanks().find({rank: [window_of(0.16 if rank == 3 else 0.08, 0.18, "nccl")] for rank in range(4)})
    assert (found.rank, found.ratio) == (3, pytest.approx(1.8))
    assert found.text == "slowest rank 3: 1.8x the median for 50 steps, until step 149"


def test_ranks_whose_nccl_kernels_run_nearly_all_the_time_are_not_slow_by_noise():
    # What is left of a step beside NCCL's kernels differs by a factor of 4, but rank 1 makes nobody wait for long.
    assert SlowRanks().find(of(r0=(0.01, 1.0, "nccl"), r1=(0.04, 1.0, "nccl"), r2=(0.01, 1.0, "nccl"))) is None
    # Collectives of several groups at the same time add up to more than the step.
    assert SlowRanks().find(of(r0=(-0.3, 1.0, "nccl"), r1=(-0.1, 1.0, "nccl"), r2=(-0.2, 1.0, "nccl"))) is None


def test_a_rank_with_slow_data_is_reported_by_the_hosts_view():
    # Steps of 150 ms. Rank 1 reads for 100 ms; the hosts of the others work for 5 ms, and wait for the GPU.
    found = SlowRanks().find(of(r0=(0.005, 0.15, "host"), r1=(0.1, 0.15, "host"), r2=(0.005, 0.15, "host")))
    assert (found.rank, found.ratio) == (1, pytest.approx(0.15 / 0.055))


def test_a_host_that_works_longer_behind_its_gpu_is_not_slow():
    # Twice as long as the others, but the step takes five times as long.
    assert SlowRanks().find(of(r0=(0.02, 0.2, "host"), r1=(0.04, 0.2, "host"))) is None


def test_on_cpus_all_time_that_is_no_wait_is_a_ranks_own():
    found = SlowRanks().find(of(r0=(0.05, 0.2, "cpu"), r1=(0.1, 0.2, "cpu"), r2=(0.05, 0.2, "cpu")))
    assert (found.rank, found.ratio) == (1, pytest.approx(2.0))


def test_windows_that_were_measured_in_different_ways_are_not_compared():
    assert SlowRanks().find(of(r0=(0.01, 0.2, "host"), r1=(0.19, 0.2, "nccl"))) is None


def test_a_slow_rank_is_reported_again_only_where_another_one_or_its_slowness_has_changed():
    slow = SlowRanks()

    def find(number: int, *busy: float) -> int | None:
        windows = {rank: [Window(number, 0.3, 0.3 - own, "cpu")] for rank, own in enumerate(busy)}
        found = slow.find(windows)
        return None if found is None else found.rank

    assert find(0, 0.1, 0.2, 0.1) == 1
    assert find(0, 0.1, 0.2, 0.1) is None, "the same window"
    assert find(1, 0.1, 0.21, 0.1) is None
    assert find(2, 0.1, 0.28, 0.1) == 1
    assert find(3, 0.2, 0.1, 0.1) == 0
    assert find(4, 0.1, 0.1, 0.1) is None
    assert find(5, 0.2, 0.1, 0.1) == 0, "it was not slow meanwhile"


def test_ranks_without_a_window_in_common_are_not_compared():
    own = [Window(2, 0.2, 0.1, "cpu")]
    assert SlowRanks().find({0: own}) is None
    assert SlowRanks().find({0: own, 1: []}) is None
    assert SlowRanks().find({0: own, 1: [Window(3, 0.2, 0.0, "cpu")]}) is None


def test_readings_take_a_small_share_of_the_time_and_ranks_read_in_the_same_windows():
    assert all(is_due(window, before, 1.0) for before, window in enumerate((7, 8, 9, 10))), "short runs are measured"
    for seconds in (0.5, 3.0, 24.0, 49.0, 99.0, 101.0, 1000.0):
        read = [window for window in range(1024) if is_due(window, 100, seconds)]
        assert len(read) * device_waits.READING <= device_waits.SHARE * 1024 * seconds + device_waits.READING
        # A rank that measures a little less time.
        other = {window for window in range(1024) if is_due(window, 100, seconds * 0.97)}
        assert len(other.intersection(read)) >= len(read) / 2
        assert len(read) == 1024 or seconds < 100, "windows that are long enough are all read"


class Training:
    """Steps of this process with counters of their own, by a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table = counters._Table()
        monkeypatch.setattr(counters, "_table", table)
        monkeypatch.setattr(counters, "_values", table.values)
        monkeypatch.setattr(counters, "_replaces_window", None)
        monkeypatch.setattr(counters, "_view", 0)
        self.now = 0
        clock = SimpleNamespace(monotonic_ns=lambda: self.now, time_ns=lambda: self.now)
        monkeypatch.setattr(counters, "time", clock)
        self.step = 0

    def train(self, steps: int, milliseconds: float, waited: float = 0.0) -> None:
        """Take so many steps more, in each of which this rank waits for `waited` of the milliseconds."""
        for _ in range(steps):
            counters.note("step", self.step)
            with counters.waiting_for([1], "a message"):
                self.now += int(waited * MS)
            self.now += int((milliseconds - waited) * MS)
            self.step += 1

    def windows(self) -> list[Window]:
        """As `Reader` finds them."""
        values = counters._values[counters._WINDOWS : counters._GROUPS]
        found = [values[at : at + counters._WINDOW_SIZE] for at in range(0, len(values), counters._WINDOW_SIZE)]
        windows = [
            Window(n - 1, step / 1e9, waited / 1e9, counters.VIEWS[view]) for n, step, waited, view in found if n
        ]
        return sorted(windows, key=lambda window: window.number)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(monkeypatch)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Entries of NCCL's flight recorder; torch for CPUs has none."""
    entries: list[dict[str, Any]] = []
    monkeypatch.setattr(device_waits, "nccl_entries", lambda: entries)
    return entries


@pytest.mark.parametrize("view", ["cpu", "host"])
def test_a_window_is_a_steps_time_and_the_waits_in_it(training, monkeypatch, view):
    monkeypatch.setattr(device_waits, "nccl_entries", lambda: pytest.fail("the recorder was read"))
    counters.measure_windows(view)
    training.train(WINDOW, 100, 30)
    assert training.windows() == [], "it has not ended"
    training.train(WINDOW, 200, 20)
    assert training.windows() == [Window(0, pytest.approx(0.1), pytest.approx(0.03), view)]
    assert training.windows()[0].busy == pytest.approx(0.07)
    training.train(1, 200, 20)
    assert training.windows()[1] == Window(1, pytest.approx(0.2), pytest.approx(0.02), view)


def test_the_last_windows_are_kept(training):
    training.train(7 * WINDOW + 1, 10)
    assert [window.number for window in training.windows()] == [3, 4, 5, 6]


@pytest.mark.parametrize(("first", "windows"), [(WINDOW // 2, [0, 1]), (WINDOW // 2 + 1, [1])])
def test_a_window_with_less_than_half_of_its_steps_is_left_out(training, first, windows):
    """As where a run resumes in the middle of one."""
    training.step = first
    training.train(2 * WINDOW + 1 - first, 100, 30)
    assert [window.number for window in training.windows()] == windows


def test_a_window_on_a_gpu_is_measured_by_nccl(training, recorded):
    counters.measure_windows("nccl", NcclWindows())
    training.train(WINDOW, 100, 30)
    recorded.extend(entry(step * 100 + 50, 20.0) for step in range(WINDOW))
    training.train(1, 100, 30)
    assert training.windows() == [Window(0, pytest.approx(0.1), pytest.approx(0.02), "nccl")]
    del recorded[:]
    training.train(WINDOW, 100, 30)
    assert len(training.windows()) == 1, "the other ranks' times are not to be compared with the host's"


def test_a_host_that_never_waits_is_held_up_by_nobody(training, recorded):
    """Kernels of a rank that launches them first wait in every step, though all hosts be equally slow."""
    counters.measure_windows("nccl", NcclWindows())
    recorded.extend(entry(step * 100 + 50, 20.0) for step in range(WINDOW))
    training.train(WINDOW + 1, 100, 0)
    assert training.windows() == [Window(0, pytest.approx(0.1), 0.0, "nccl")]


def test_without_times_of_nccl_the_hosts_view_is_taken_and_the_recorder_is_left_alone_soon(training, monkeypatch):
    readings = []
    monkeypatch.setattr(device_waits, "nccl_entries", lambda: readings.append(1) or [])
    counters.measure_windows("nccl", NcclWindows())
    training.train(20 * WINDOW + 1, 100, 30)
    assert [window.view for window in training.windows()] == ["host"] * 4
    assert training.windows()[-1] == Window(19, pytest.approx(0.1), pytest.approx(0.03), "host")
    assert len(readings) == device_waits.FIRST_WINDOWS


def test_nccl_times_collectives_unless_the_user_has_set_otherwise(monkeypatch):
    for name in ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert device_waits.environment(times_nccl=True)["TORCH_NCCL_ENABLE_TIMING"] == "1"
    assert set(device_waits.environment(times_nccl=False)) == {"TORCH_FR_BUFFER_SIZE"}
    for name in ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"):  # torch's name, and its old one
        with monkeypatch.context() as patched:
            patched.setenv(name, "0")
            assert set(device_waits.environment(times_nccl=True)) == {"TORCH_FR_BUFFER_SIZE"}
