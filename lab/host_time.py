# SPDX-License-Identifier: Apache-2.0
"""`python -m lab host-time`: the host's time for a step of an unmodified transformers model, Stretto's beside torch's.

This process is rank 0 of a group whose other ranks do not exist (torch's backend "fake"): collectives send nothing and
take no time, and what is left is what the host does to launch a step, which limits steps of many small kernels. On a
GPU the device is idle when a timed step begins. Results of reductions are wrong, and losses mean nothing.

On CPUs, which also compute, models are tiny and time is that of this process; calls of Python and C say more there.
"""

import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.harness import Bench, Measured, column
from lab.training import unmodified_steps
from lab.training.families import TRANSFORMERS
from lab.training.unmodified_steps import Groups, TransformerWorkload, Way, build_step
from stretto.bench.harness import empty_memory, peak_memory_gib, run_ranks
from stretto.bench.settings import Layers, Needs, Option, Repeats, Rounds, WarmUp, require_known
from stretto.bench.training.runs import Step
from stretto.parallel.comm.collectives import Started
from stretto.parallel.comm.rank_order import RankOrder


@dataclass(frozen=True)
class HostTimeSetting:
    """Settings of `python -m lab host-time`. Raises ValueError for an unknown model."""

    model: Annotated[str, Option("A name of lab/training/families.py: gpt2-xl, qwen3-0.6b, and others.")] = "gpt2-xl"
    of: Annotated[int, Option("Ranks of the group, of which one exists.", least=2)] = 2
    axis: Annotated[Literal["z", "data"], Option("z: beside FSDP2. data: beside DDP with autocast.")] = "z"
    layers: Layers = None
    batch: Annotated[int, Option("Sequences of the rank.", least=1)] = 1
    seq_len: Annotated[int | None, Option("Tokens a sequence (default: 256, with --cpu 16).", least=2)] = None
    cpu: Annotated[bool, Option("On the CPU, with tiny sizes of the model.")] = False
    eager: Annotated[bool, Option("Without torch.compile of the layers.")] = False
    only: Annotated[tuple[str, ...], Option("Only runs with this in their name.", is_repeated=True)] = ()
    warm_up: WarmUp = 5
    repeats: Repeats = 10
    rounds: Rounds = 2

    def __post_init__(self) -> None:
        require_known("model", (self.model,), TRANSFORMERS)

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        return self.seq_len or (16 if self.cpu else 256)


@dataclass(frozen=True)
class Row:
    """A way to train: the host's time, what the device takes on after it, calls of a step, and memory."""

    name: str = column("run")
    host_milliseconds: float = column("host (ms)", "{:.1f}")
    ratio: float = column("to the first", "{:.2f}")
    device_milliseconds: float | None = column("then waits for the device (ms)", "{:.1f}")
    python_calls: int = column("Python calls", "{:,}")
    c_calls: int = column("C calls", "{:,}")
    peak_memory_gib: float | None = column("peak memory (GiB)", "{:.1f}")


def list_ways(setting: HostTimeSetting) -> dict[str, Way]:
    """The runs by name, the peer first."""
    compiles: Literal["", "layers"] = "" if setting.eager else "layers"
    grid: dict[str, int] = {setting.axis: setting.of}
    name = f"Stretto {setting.axis}={setting.of}"
    ways = {"DDP": Way("torch", compiles, "autocast")} if setting.axis == "data" else {"FSDP2": Way("torch", compiles)}
    ways[name] = Way("stretto", compiles, grid=grid)
    if setting.axis == "z":
        ways[f"{name}, all roles"] = Way("stretto", compiles, grid=grid, options={"roles": {}})
        ways[f"{name} by blocks"] = Way("stretto", compiles, grid=grid, by_blocks=True)
    found = {name: way for name, way in ways.items() if not setting.only or any(each in name for each in setting.only)}
    if not found:
        raise ValueError(f"no run has {' or '.join(map(repr, setting.only))} in its name: {', '.join(ways)}")
    return found


def measure_host(setting: HostTimeSetting) -> Measured:
    rows = run_ranks(1, _measure, setting, list_ways(setting))
    name = f"{setting.model}-{setting.axis}-{setting.of}-{setting.batch}x{setting.tokens}" + "-eager" * setting.eager
    return Measured(rows, name=name + "-cpu" * setting.cpu)


def _measure(setting: HostTimeSetting, ways: Mapping[str, Way]) -> list[dict[str, Any]]:
    is_gpu = not setting.cpu
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.of)
    layers = setting.layers or (TRANSFORMERS[setting.model].layers if is_gpu else 4)
    times = setting.warm_up, setting.repeats, setting.rounds
    batch = setting.batch * setting.of
    workload = TransformerWorkload(setting.model, layers, batch, setting.tokens, not is_gpu, *times)
    rows: dict[str, dict[str, Any]] = {}
    with _without_other_ranks():
        for _ in range(setting.rounds):
            for name, way in ways.items():
                empty_memory()
                step = build_step(workload, way, groups := Groups(device))
                found = _time_host(step, setting, is_gpu=is_gpu) | {"peak_memory_gib": peak_memory_gib(device)}
                print(f"{name}: {found['host_milliseconds']:.1f} ms", flush=True)
                if name not in rows or found["host_milliseconds"] < rows[name]["host_milliseconds"]:
                    rows[name] = {"name": name, **found}
                del step, groups
                torch.compiler.reset()
    first = next(iter(rows.values()))["host_milliseconds"]
    return [row | {"ratio": row["host_milliseconds"] / first} for row in rows.values()]


def _time_host(step: Step, setting: HostTimeSetting, *, is_gpu: bool) -> dict[str, Any]:
    """Medians of the host's seconds until a step is launched, and until the device has run it; and calls of one."""
    clock = time.perf_counter if is_gpu else time.process_time
    settle = torch.cuda.synchronize if is_gpu else lambda: None
    of_host, of_device = [], []
    for _ in range(setting.warm_up + setting.repeats):
        settle()
        began = clock()
        step()
        of_host.append(clock() - began)
        settle()
        of_device.append(clock() - began - of_host[-1])
    calls = {"call": 0, "c_call": 0}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event in calls:
            calls[event] += 1

    profile = getattr(threading, "setprofile_all_threads", sys.setprofile)  # Python 3.12: autograd's thread, too
    profile(note)
    step()
    profile(None)
    return {
        "host_milliseconds": statistics.median(of_host[setting.warm_up :]) * 1e3,
        "device_milliseconds": statistics.median(of_device[setting.warm_up :]) * 1e3 if is_gpu else None,
        "python_calls": calls["call"],
        "c_calls": calls["c_call"],
    }


@contextmanager
def _without_other_ranks() -> Iterator[None]:
    """Leave out what asks other ranks by another way than the group's collectives, and copy engines to their GPUs."""
    with (
        patch("stretto.parallel.builder.have_copy_engines", lambda group, device: False),
        patch("stretto.parallel.resolve._LAUNCHED_BY_HOST", ("cuda", "cpu")),  # shard on a CPU as for a GPU
        patch.object(RankOrder, "_agree", lambda self, events: None),
        patch.object(Started, "_wait_and_look", lambda self: None),  # gloo's
        patch.object(unmodified_steps, "DistributedDataParallel", _wrap),
    ):
        yield


def _wrap(model: torch.nn.Module) -> torch.nn.Module:
    """DDP, whose buckets the fake group returns at once: its work has no result, which DDP asks for."""
    wrapped = DistributedDataParallel(model)

    def divide(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        device = bucket.buffer().device
        done = torch.futures.Future[torch.Tensor](devices=[device] if device.type == "cuda" else None)
        done.set_result(bucket.buffer().div_(dist.get_world_size()))
        return done

    wrapped.register_comm_hook(None, divide)
    return wrapped


BENCH = Bench(
    "host-time",
    "The host's time for a step of an unmodified transformers model, beside FSDP2's or DDP's, in one process.",
    HostTimeSetting,
    measure_host,
    Row,
    title=lambda setting: f"{setting.model}, {setting.batch} x {setting.tokens} tokens a rank",
    needs=Needs.ONE_GPU,
)
