# SPDX-License-Identifier: Apache-2.0
"""Tests of what a trace says of computation and communication: traces made by hand, with times that are known."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.report.test_run_report import png_size
from tests.train import runs

from stretto.report import Timeline, plot_timeline, read_timeline, write_report
from stretto.train.observe import tracing
from stretto.train.observe.timeline import merge, subtract, total

GROUPS = {"7": "x", "9": "z", "0": "world"}
ABOUT = {"groups": GROUPS, "rank": 0, "grid": {"data": 1, "x": 2, "y": 1, "z": 2}}
ORIGIN = 5_000_000  # microseconds: traces do not begin at 0


def event(category: str, name: str, start: float, end: float, *, thread: int = 7, **about: Any) -> dict[str, Any]:
    """An event from `start` to `end`, in milliseconds."""
    times = {"ts": ORIGIN + start * 1e3, "dur": (end - start) * 1e3}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "args": about} | times


def product(start: float, end: float) -> dict[str, Any]:
    return event("kernel", "sm90_gemm_bf16", start, end)


def nccl(group: str, start: float, end: float) -> dict[str, Any]:
    about = {"Collective name": "allreduce", "Process Group Name": group}
    return event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start, end, thread=20, **about)


def gpu_trace(*events: dict[str, Any], steps: tuple[tuple[float, float], ...] = ((0, 100),)) -> dict[str, Any]:
    marks = [
        event("gpu_user_annotation", f"stretto step {number}", start, end)
        for number, (start, end) in enumerate(steps, start=4)
    ]
    names = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}
    return {"traceEvents": [names, *marks, *events], "stretto": ABOUT}


def milliseconds(by_axis: dict[str, float]) -> dict[str, float]:
    """Those that are not zero."""
    return {axis: round(seconds * 1e3, 6) for axis, seconds in by_axis.items() if seconds}


def waited(end: float, bubble: float, message: float) -> dict[str, Any]:
    """The mark at the end of a pipeline stage's wait; bubble and message in milliseconds."""
    return event("user_annotation", f"stretto waited {bubble / 1e3:.6f} {message / 1e3:.6f}", end, end)


def test_the_hosts_time_is_its_steps_without_its_waits_for_the_gpu() -> None:
    steps = [
        event("user_annotation", f"stretto step {number}", start, start + 40) for number, start in ((4, 0), (5, 50))
    ]
    waits = [event("cuda_runtime", "cudaStreamSynchronize", 30, 40), event("cuda_runtime", "cudaLaunchKernel", 50, 90)]
    trace = gpu_trace(product(0, 100), *steps, *waits, steps=((0, 50), (50, 100)))
    timeline = read_timeline(trace)
    assert timeline.host == timeline.summary()["host"] == pytest.approx(35e-3)
    assert read_timeline(cpu_trace()).host is None
    assert "launching it took the host 35.0 ms" in tracing._describe(timeline)
    assert "host_per_layer" not in timeline.summary()
    of_layers = read_timeline({**trace, "stretto": {**trace["stretto"], "layers": 10}})
    assert of_layers.summary()["host_per_layer"] == pytest.approx(3.5e-3)
    assert "launching it took the host 35.0 ms, 3.50 ms a layer" in tracing._describe(of_layers)


def test_waits_of_a_pipeline_are_bubbles_and_messages() -> None:
    """Of a wait that ends at 40, the bubble is until the message was sent; products meanwhile hide a part of it."""
    timeline = read_timeline(gpu_trace(product(0, 12), waited(40, 20, 10), product(40, 100), waited(100, 0, 5)))
    assert timeline.rows == ("compute", "pipe", "bubble")
    assert timeline.bubble == pytest.approx(18e-3)  # from 12 to 30
    assert timeline.communication["pipe"] == pytest.approx(15e-3)
    assert timeline.exposed_by_axis["pipe"] == pytest.approx(10e-3)
    assert timeline.summary()["bubble"] == pytest.approx(18e-3)


def operator(name: str, start: float, end: float, number: int, **about: Any) -> dict[str, Any]:
    """An operator of the host. number: its id, which its kernels have too."""
    return event("cpu_op", name, start, end, **{"External id": number} | about)


def kernel_of(number: int, start: float, end: float) -> dict[str, Any]:
    return event("kernel", "sm90_gemm_bf16", start, end, thread=20, **{"External id": number})


# An attention, experts and their backward passes: experts' node has the sequence number of their operator, 5.
WITH_EXPERTS = [
    event("user_annotation", "stretto experts", 10, 20),
    operator("aten::mm", 2, 8, 1, **{"Sequence number": 4}),
    operator("aten::mm", 12, 18, 2, **{"Sequence number": 5}),
    operator("autograd::engine::evaluate_function: MmBackward0", 30, 50, 3, **{"Sequence number": 5}),
    operator("aten::mm", 32, 48, 4),
    operator("autograd::engine::evaluate_function: MmBackward0", 50, 60, 5, **{"Sequence number": 4}),
    operator("aten::mm", 52, 58, 6),
]


def test_experts_computation_has_a_separate_row_forward_and_backward() -> None:
    on_cpu = read_timeline(cpu_trace(*WITH_EXPERTS))
    kernels = [kernel_of(number, 60 + number, 61 + number) for number in (1, 2, 4, 6)]
    on_gpu = read_timeline(gpu_trace(*WITH_EXPERTS, *kernels))
    assert on_cpu.rows[:2] == on_gpu.rows[:2] == ("compute", "experts")
    assert (on_cpu.compute, on_cpu.experts) == pytest.approx((0.034, 0.022))
    assert (on_gpu.compute, on_gpu.experts) == pytest.approx((0.004, 0.002))
    assert on_gpu.summary()["experts"] == pytest.approx(0.002)
    assert "experts" not in read_timeline(gpu_trace(product(0, 10))).rows


def test_experts_communication_has_rows_of_its_axes() -> None:
    groups = {"1": "expert", "2": "expert_data", "3": "expert_z"}
    trace = gpu_trace(*(nccl(name, 10 * number, 10 * number + 5) for number, name in enumerate(groups)))
    timeline = read_timeline(trace | {"stretto": ABOUT | {"groups": groups}})
    assert milliseconds(timeline.communication) == {"expert": 5, "data": 5, "z": 5}


def test_a_collective_is_exposed_where_no_computation_runs() -> None:
    timeline = read_timeline(gpu_trace(product(0, 30), nccl("7", 20, 50), product(45, 100)))
    assert milliseconds(timeline.communication) == {"x": 30}
    assert milliseconds(timeline.exposed_by_axis) == {"x": 15}
    assert timeline.compute == pytest.approx(0.085)
    assert timeline.idle == pytest.approx(0)
    assert timeline.rows == ("compute", "x")


def test_simultaneous_exposed_time_of_two_axes_counts_once_in_total_and_for_each_axis() -> None:
    timeline = read_timeline(gpu_trace(product(0, 10), nccl("7", 10, 30), nccl("9", 20, 50), product(60, 100)))
    assert milliseconds(timeline.exposed_by_axis) == {"x": 20, "z": 30}
    assert timeline.exposed_total == pytest.approx(0.040)
    assert timeline.idle == pytest.approx(0.010)


def test_collectives_of_one_axis_that_overlap_count_once() -> None:
    timeline = read_timeline(gpu_trace(nccl("7", 10, 30), nccl("7", 20, 40), product(0, 5)))
    assert milliseconds(timeline.communication) == milliseconds(timeline.exposed_by_axis) == {"x": 30}


def test_a_collective_under_computation_is_not_exposed() -> None:
    timeline = read_timeline(gpu_trace(product(0, 50), product(50, 100), nccl("9", 10, 90)))
    assert milliseconds(timeline.communication) == {"z": 80}
    assert timeline.exposed_total == 0


def test_copies_on_the_device_are_computation() -> None:
    copies = event("gpu_memcpy", "Memcpy DtoD", 0, 20), event("gpu_memset", "Memset", 20, 30)
    timeline = read_timeline(gpu_trace(*copies, nccl("7", 10, 40), product(90, 100)))
    assert milliseconds(timeline.exposed_by_axis) == {"x": 10}


def test_copies_between_host_and_device_have_a_row_for_each_direction() -> None:
    timeline = read_timeline(
        gpu_trace(
            product(0, 40),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 30, 60, stream=20),
            event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 55, 65, stream=7),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 35, 50, stream=21),
            nccl("9", 45, 70),
        )
    )
    assert timeline.rows == ("compute", "z", "host to device", "device to host")
    assert timeline.compute == pytest.approx(0.040)
    assert milliseconds(timeline.host_copies) == {"host to device": 35, "device to host": 15}
    assert milliseconds(timeline.exposed_host_copies) == {"host to device": 25, "device to host": 10}
    assert milliseconds(timeline.exposed_by_axis) == {"z": 25}  # a copy beside it does not hide a collective
    assert timeline.exposed_total == pytest.approx(0.025)
    assert timeline.idle == pytest.approx(0.030)  # after the collective's end at 70 ms
    assert timeline.summary()["host_copies"] == timeline.host_copies
    line = "copies host to device 35.0 ms (25.0 exposed), device to host 15.0 ms (10.0 exposed)"
    assert tracing._describe(timeline).endswith(line)


def test_a_step_without_copies_between_host_and_device_has_no_rows_for_them() -> None:
    timeline = read_timeline(gpu_trace(product(0, 40), event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 40, 60)))
    assert timeline.rows == ("compute",)
    assert milliseconds(timeline.host_copies) == milliseconds(timeline.exposed_host_copies) == {}
    assert "copies" not in tracing._describe(timeline)


def test_seconds_are_those_of_a_step_and_spans_outside_of_steps_are_ignored() -> None:
    trace = gpu_trace(
        *(product(-20, 10), nccl("7", -10, 30), product(30, 60), nccl("9", 60, 120), product(120, 900)),
        steps=((0, 60), (80, 160)),
    )
    timeline = read_timeline(trace)
    assert [step.number for step in timeline.steps] == [4, 5]
    assert timeline.step_time == pytest.approx(0.080)
    assert milliseconds(timeline.exposed_by_axis) == {"x": 10, "z": 30}
    assert timeline.compute == pytest.approx((10 + 30 + 40) / 2e3)


def test_a_step_lasts_as_long_as_its_mark_on_any_stream() -> None:
    second = event("gpu_user_annotation", "stretto step 4", 90, 120, thread=20)
    assert read_timeline(gpu_trace(product(0, 100), second)).step_time == pytest.approx(0.120)


def test_without_marks_on_the_gpu_those_of_the_host_count() -> None:
    trace = gpu_trace(product(0, 40), steps=())
    trace["traceEvents"].append(event("user_annotation", "stretto step 9", 0, 50))
    assert read_timeline(trace).step_time == pytest.approx(0.050)


def test_an_axis_is_found_by_the_groups_name_its_description_or_the_call_that_launched_the_kernel() -> None:
    described = event("kernel", "ncclKernel", 0, 10, **{"Process Group Description": "mesh_data"})
    launched = event("kernel", "ncclKernel", 20, 30, **{"External id": 44})
    call = event("cpu_op", "record_param_comms", 0, 1, **{"External id": 44, "Process Group Name": "9"})
    unknown = event("kernel", "ncclKernel", 40, 50)
    world = nccl("0", 60, 70)
    timeline = read_timeline(gpu_trace(described, launched, call, unknown, world))
    assert milliseconds(timeline.communication) == {"data": 10, "z": 10, "other": 20}
    assert timeline.rows == ("compute", "z", "data", "other")


def cpu_trace(*events: dict[str, Any]) -> dict[str, Any]:
    marks = [
        event("user_annotation", "stretto group x", -20, -15),
        event("user_annotation", "gloo:all_reduce", -18, -17, thread=31),
        event("user_annotation", "gloo:all_reduce", -17, -16, thread=32),
        event("user_annotation", "stretto group z", -15, -10),
        event("user_annotation", "gloo:all_reduce", -14, -13, thread=33),
        event("user_annotation", "stretto step 4", 0, 100),
    ]
    return {"traceEvents": [*marks, *events], "stretto": ABOUT}


def test_on_a_cpu_operators_are_computation_and_gloos_threads_communicate_for_the_axis_that_they_showed() -> None:
    timeline = read_timeline(
        cpu_trace(
            event("cpu_op", "_Linear3D", 0, 100),  # not an operator: a function that calls some
            event("cpu_op", "aten::linear", 0, 20),
            event("cpu_op", "aten::addmm", 5, 15),
            event("cpu_op", "c10d::allreduce_", 20, 30),
            event("cpu_op", "aten::empty", 22, 28),  # a part of handing it over
            event("cpu_op", "aten::mm", 50, 60, thread=8),  # autograd's thread
            event("user_annotation", "gloo:all_reduce", 25, 55, thread=32),
            event("cpu_op", "aten::copy_", 30, 40, thread=32),
            event("user_annotation", "gloo:all_gather", 10, 40, thread=33),
            event("user_annotation", "gloo:all_reduce", 70, 80, thread=34),
        )
    )
    assert [span.name for span in timeline.spans if span.row == "compute"] == ["aten::linear", "aten::mm"]
    assert milliseconds(timeline.communication) == {"x": 30, "z": 30, "other": 10}
    assert milliseconds(timeline.exposed_by_axis) == {"x": 25, "z": 20, "other": 10}
    assert timeline.exposed_total == pytest.approx(0.040)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no trace"),
        ("[" * 100_000, "is no trace"),
        ("[]", "is no object with a list 'traceEvents'"),
        ('{"traceEvents": [{"ph": "M", "name": "a thread"}, {"ts": 1}]}', r"traceEvents\[1\] is .*'ts': 1"),
        (
            '{"traceEvents": [], "stretto": {"groups": {}, "grid": [2], "rank": 0}}',
            "has a key 'stretto' that is damaged",
        ),
        ('{"traceEvents": []}', "has no key 'stretto'"),
    ],
)
def test_a_file_that_no_traced_run_has_written_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_timeline(tmp_path / "trace.json")


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="has no step"):
        read_timeline(gpu_trace(product(0, 10), steps=()))


def test_intervals_are_sets_of_moments() -> None:
    assert merge([(5, 6), (1, 3), (2, 4), (4, 4.5), (9, 9)]) == ((1, 4.5), (5, 6))
    assert subtract(((0, 10),), ((2, 3), (5, 6))) == ((0, 2), (3, 5), (6, 10))
    assert subtract(((0, 4), (6, 8)), ((3, 7),)) == ((0, 3), (7, 8))
    assert subtract(((1, 2), (3, 4)), ((0, 9),)) == ()
    assert subtract(((1, 2),), ()) == ((1, 2),)
    assert total(((1, 2), (3, 6))) == 4


def test_intervals_agree_with_sets_of_whole_moments() -> None:
    print("seed 5")
    random.seed(5)
    for _ in range(300):
        sets = []
        for _ in range(2):
            starts = [random.randrange(40) for _ in range(random.randrange(7))]
            sets.append([(start, start + random.randrange(8)) for start in starts])
        busy, other = ({moment for start, end in each for moment in range(start, end)} for each in sets)
        left = subtract(merge(sets[0]), merge(sets[1]))
        assert {moment for start, end in left for moment in range(int(start), int(end))} == busy - other
        assert total(left) == len(busy - other)


def sample() -> dict[str, Any]:
    return gpu_trace(product(0, 10), nccl("7", 10, 30), nccl("9", 20, 50), product(60, 100))


@pytest.mark.parametrize("trace", [sample(), gpu_trace(product(0, 10))], ids=["two axes", "no communication"])
def test_a_timeline_is_drawn_with_a_row_more_for_each_axis(tmp_path: Path, trace: dict[str, Any]) -> None:
    timeline: Timeline = read_timeline(trace)
    plot_timeline(timeline, tmp_path / "timeline.png")
    width, height = png_size(tmp_path / "timeline.png")
    assert width >= 1500
    assert height > 80 * len(timeline.rows)


SUMMARY = {
    "steps": 1, "loss": 2.5, "seconds": 0.2, "tokens_per_second": 640.0, "peak_memory_bytes": 3 << 20,
    "parameters": 5, "bytes_sent": {"x": 8}, "ranks": 4, "grid": {}, "device": "cpu",
}  # fmt: skip
PREDICTED = {"step_time": 0.15, "exposed": {"x": 0.005, "y": 0.0, "z": 0.007, "data": 0.0}, "peak_memory": 2 << 20}


def report_of(out: Path, *, trace: dict[str, Any] | None, predicted: dict[str, Any] | None) -> str:
    """summary.md of a run whose batch has 128 tokens."""
    out.mkdir(exist_ok=True)
    runs.write_config(runs.configure(out, "grid.x=2", "grid.z=2"))
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "tokens_per_second": 640.0}\n')
    (out / "trace.json").unlink(missing_ok=True)
    summary = SUMMARY | ({} if predicted is None else {"predicted": predicted})
    if trace is not None:
        (out / "trace.json").write_text(json.dumps(trace))
        summary |= {"measured": read_timeline(trace).summary()}
    (out / "summary.json").write_text(json.dumps(summary))
    write_report(out)
    return (out / "summary.md").read_text()


@pytest.mark.long
def test_a_summary_compares_measured_with_predicted(tmp_path: Path) -> None:
    text = report_of(tmp_path / "run", trace=sample(), predicted=PREDICTED)
    for line in (
        "## Measured beside predicted",
        "| step time | 200.0 ms | 150.0 ms |",
        "| step time while traced | 100.0 ms |  |",
        "| exposed communication over x | 20.0 ms | 5.0 ms |",
        "| exposed communication over z | 30.0 ms | 7.0 ms |",
        "| exposed communication, together | 40.0 ms | 12.0 ms |",
        "| peak memory of a rank | 3 MiB | 2 MiB |",
        "](timeline.png)",
    ):
        assert line in text
    assert "over y" not in text
    assert "copies" not in text
    assert png_size(tmp_path / "run" / "timeline.png")[0] >= 1500


@pytest.mark.long
def test_a_summary_has_the_exposed_copies_of_each_direction_that_has_any(tmp_path: Path) -> None:
    copy = event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 90, 105, stream=21)
    text = report_of(tmp_path / "run", trace=gpu_trace(product(0, 95), copy, steps=((0, 110),)), predicted=None)
    assert "| exposed copies device to host | 10.0 ms |" in text
    assert "host to device" not in text


@pytest.mark.long
def test_a_summary_has_what_was_measured_without_a_prediction_and_what_was_predicted_without_a_trace(
    tmp_path: Path,
) -> None:
    measured = report_of(tmp_path / "run", trace=sample(), predicted=None)
    assert "| exposed communication over z | 30.0 ms |\n" in measured
    assert "predicted" not in measured
    predicted = report_of(tmp_path / "run", trace=None, predicted=PREDICTED)
    assert "| step time | 200.0 ms | 150.0 ms |" in predicted
    assert "| exposed communication over z |  | 7.0 ms |" in predicted
    assert "traced" not in predicted


@pytest.mark.long
def test_a_run_that_was_not_traced_has_nothing_of_a_trace_in_its_folder(tmp_path: Path) -> None:
    report_of(tmp_path / "run", trace=sample(), predicted=None)
    text = report_of(tmp_path / "run", trace=None, predicted=None)
    assert "Measured" not in text
    assert "Timeline" not in text
    assert not (tmp_path / "run" / "timeline.png").exists()
