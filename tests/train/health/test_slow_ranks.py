# SPDX-License-Identifier: Apache-2.0
"""Which rank is slow, by windows of steps and by entries of torch's flight recorder that the tests make up."""

import json
import sys
import threading
import time
from typing import Any

import pytest
from stretto.train.health.beat import Beat, Window

from stretto.train.health import device_waits, flight_recorder, progress, slow_ranks
from stretto.train.health.device_waits import is_due, seconds_in_collectives
from stretto.train.health.slow_ranks import WINDOW, BusySampler, SlowRanks

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
    return {int(rank[1:]): [Window(2, *window)] for rank, window in windows.items()}


def test_the_rank_whose_nccl_kernels_are_the_shortest_is_slow():
    # Steps of 180 ms. Rank 3 is in NCCL for 20 ms, the others for 100 ms, of which they wait 80 ms for it.
    found = SlowRanks().find({rank: [Window(2, 0.16 if rank == 3 else 0.08, 0.18, "nccl")] for rank in range(4)})
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


def test_a_heartbeat_brings_the_windows():
    beat = Beat(0, "host", 1, 1, "step", 31, 0.0, busy=(Window(2, 0.1, 0.2, "nccl"), Window(3, 0.2, 0.3, "nccl")))
    assert Beat.of_json(beat.as_json()) == beat
    assert Beat.of_json(beat.as_json()).busy[1].view == "nccl"


def test_readings_take_a_thousandth_of_the_time_and_ranks_read_in_the_same_windows():
    assert all(is_due(window, before, 1.0) for before, window in enumerate((7, 8, 9, 10))), "short runs are measured"
    for seconds in (0.5, 3.0, 24.0, 49.0, 51.0, 1000.0):
        read = [window for window in range(1024) if is_due(window, 100, seconds)]
        assert len(read) * device_waits.READING <= 1.05e-3 * 1024 * seconds + 2 * device_waits.READING
        # A rank that measures a little less time.
        other = {window for window in range(1024) if is_due(window, 100, seconds * 0.97)}
        assert len(other.intersection(read)) >= len(read) / 2
        assert len(read) == 1024 or seconds < 50, "windows that are long enough are all read"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What NCCL's flight recorder has, as JSON; torch for CPUs has none."""
    entries: list[dict[str, Any]] = []
    found = [("nccl", lambda collectives, active: json.dumps({"entries": entries} if collectives else {}).encode())]
    monkeypatch.setattr(flight_recorder, "_functions", lambda: found)
    return entries


def test_a_window_on_a_gpu_is_measured_by_nccl(recorded):
    sampler = BusySampler(has_gpu=True, reads_nccl=True)
    sampler._starts.extend(steps_of(100, 9))
    recorded.extend(entry(step * 100 + 50, 20.0) for step in range(9))
    sampler._add(0, 0.4, 0.03)  # the first steps have taken longer
    (window,) = sampler.windows()
    assert window == (0, pytest.approx(0.08), pytest.approx(0.1), "nccl")
    del recorded[:]
    sampler._add(1, 0.1, 0.03)
    assert len(sampler.windows()) == 1, "the other ranks' times are not to be compared with the host's"


def test_without_times_of_nccl_the_hosts_view_is_taken_and_the_recorder_is_left_alone_soon(recorded, monkeypatch):
    readings = []
    monkeypatch.setattr(device_waits, "read_seconds", lambda starts: readings.append(1))
    sampler = BusySampler(has_gpu=True, reads_nccl=True)
    for number in range(20):
        sampler._add(number, 0.1, 0.03)
    assert [window.view for window in sampler.windows()] == ["host"] * slow_ranks.KEPT
    assert sampler.windows()[-1].number == 19
    assert len(readings) == device_waits.FIRST_WINDOWS


def test_the_recorder_is_not_read_on_cpus_or_with_cuda_graphs(monkeypatch):
    monkeypatch.setattr(device_waits, "read_seconds", lambda starts: pytest.fail("it was read"))
    for has_gpu, view in ((False, "cpu"), (True, "host")):
        sampler = BusySampler(has_gpu=has_gpu)
        sampler._add(0, 0.1, 0.03)
        assert sampler.windows() == (Window(0, 0.03, 0.1, view),)


def test_a_wait_in_a_thread_of_the_autograd_engine_is_a_wait_of_the_rank(monkeypatch):
    def frame_in(name: str, file: str) -> Any:
        """A frame that is in a function of this name and file."""
        space: dict[str, Any] = {"look": sys._getframe}
        exec(compile(f"def {name}():\n    return look()\n", file, "exec"), space)
        return space[name]()

    main = frame_in("_engine_run_backward", "graph.py")
    engine = frame_in("wait", "x/torch/distributed/distributed_c10d.py")
    sampler = BusySampler(has_gpu=True)
    frames = {threading.main_thread().ident: main}
    monkeypatch.setattr(slow_ranks.sys, "_current_frames", lambda: frames)
    assert not sampler._is_waiting()
    frames[123456789] = engine  # a thread that Python did not start
    assert sampler._is_waiting()


@pytest.mark.parametrize(("waits", "busy"), [(True, 0.0046), (False, 0.005)], ids=["host waits", "host never waits"])
def test_steps_are_seen_with_the_unix_time_that_the_recorder_has_too(monkeypatch, waits, busy):
    """The sampler's thread itself, on steps that the test notes. A host that never waits is held up by nobody."""
    monkeypatch.setattr(slow_ranks, "PERIOD", 0.0005)
    monkeypatch.setattr(BusySampler, "_is_waiting", lambda self: waits)
    times = []
    monkeypatch.setattr(device_waits, "read_seconds", lambda starts: times.append(list(starts)) or (0.005, 0.0004))
    sampler = BusySampler(has_gpu=True, reads_nccl=True)
    before = progress.current()
    sampler.start()
    try:
        pause = threading.Event()
        for step in range(WINDOW + 2):
            progress.note("step", step)
            pause.wait(0.005)
    finally:
        sampler.stop()
        sampler._thread.join()
        progress.note(before.phase, 0)
    (window,) = sampler.windows()
    assert (window.number, window.view) == (0, "nccl")
    assert (window.busy, window.step) == (pytest.approx(busy), 0.005)
    (starts,) = times
    assert len(starts) > WINDOW / 2
    assert starts == sorted(set(starts))
    assert abs(starts[-1][1] / 1e9 - time.time()) < 60


def test_nccl_times_collectives_unless_the_user_has_set_otherwise(monkeypatch):
    for name in ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert flight_recorder.environment(times_nccl=True)["TORCH_NCCL_ENABLE_TIMING"] == "1"
    assert set(flight_recorder.environment(times_nccl=False)) == {"TORCH_FR_BUFFER_SIZE"}
    for name in ("TORCH_NCCL_ENABLE_TIMING", "NCCL_ENABLE_TIMING"):  # torch's name, and its old one
        with monkeypatch.context() as patched:
            patched.setenv(name, "0")
            assert set(flight_recorder.environment(times_nccl=True)) == {"TORCH_FR_BUFFER_SIZE"}
