# SPDX-License-Identifier: Apache-2.0
"""`python -m lab offload`: training with optimizer state on the host, on one GPU.

buckets: steps of flat state without a model, for sizes and numbers of buckets, and the host links' bound. tiles: a step
of SGD with momentum in tiles, at once, and by torch's own optimizer: time, and additional peak memory. train: tokens/s
and memory of a model with state on the host and, where that fits, on the device. peers: the same, compared with FSDP2
with `CPUOffloadPolicy`. largest: the largest model that the planner predicts to fit, and one layer more.
"""

import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mode
from typing import Annotated, Any

import torch
from torch import Tensor

from lab.harness import Bench, Measured, column
from lab.peers import build_offloaded
from lab.pictures import describe_origin, points, select
from lab.training.models import LLAMA_7B
from stretto.bench.harness import FAILURES, empty_memory, in_one_line, run_ranks, time_steps
from stretto.bench.settings import Needs, Option, Repeats, SeqLen, require_known
from stretto.cluster import Cluster, HostLink
from stretto.cluster.probe import measure_host_link
from stretto.execution import StateOptions
from stretto.memory.failures import synchronize
from stretto.models import GPT, GPTConfig
from stretto.optim.state.store import OptimizerStateStore, StoredParameter
from stretto.optim.state.updates import GPU_TILE, TILE
from stretto.parallel import Grid, no_sync, parallelize
from stretto.planner import GridPlan, predict, read_architecture
from stretto.train.stored_optimizer import (
    MakeUpdate,
    NoRanks,
    StoredOptimizer,
    adamw_update,
    build_store,
    sgd_update,
    tiled_update,
)

OFFLOAD_PARTS = ("buckets", "tiles", "train", "peers", "largest")


@dataclass(frozen=True)
class OffloadSetting:
    """Settings of `python -m lab offload`. Raises ValueError for settings that cannot work."""

    parts: Annotated[tuple[str, ...], Option("buckets, tiles, train, peers, largest, with commas.")] = (
        "buckets",
        "tiles",
        "train",
    )
    layers: Annotated[int, Option("Of the model that is trained, a Llama of width 4096.", least=1)] = 32
    seq_len: SeqLen = 4096
    micro_batch: Annotated[int, Option("Sequences of a micro-batch.", least=1)] = 2
    micro_batches: Annotated[tuple[int, ...], Option("How many a step has, with commas.")] = (1, 4, 16)
    numbers: Annotated[int, Option("Parameters that are stepped without a model, for buckets and tiles.", least=1)] = (
        1 << 29
    )
    repeats: Repeats = 2
    cpu: Annotated[bool, Option("Small sizes on the CPU: a try, no figure.")] = False

    def __post_init__(self) -> None:
        require_known("part", self.parts, OFFLOAD_PARTS)

    def model(self) -> GPTConfig:
        """The model that is trained."""
        if self.cpu:
            return replace(LLAMA_7B, layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, max_seq_len=64)
        return replace(LLAMA_7B, layers=self.layers, max_seq_len=self.seq_len)


GIB = 1 << 30
LEARNING_RATE = 1e-5
LONG = 32  # micro-batches of a step that is timed once


@dataclass(frozen=True)
class LinkRow:
    """The host link's rates."""

    to_device: float = column("to the device (GB/s)", "{:.1f}")
    to_host: float = column("to the host (GB/s)", "{:.1f}")
    both: float = column("both at once (GB/s)", "{:.1f}")


@dataclass(frozen=True)
class BucketRow:
    """A step of flat state on the host, by the buckets' size and number."""

    step_on: str = column("step on")
    weights: str = column("fp32 weights")
    bucket: float = column("bucket (M numbers)", "{:.0f}")
    buffers: int = column("sets of buffers")
    seconds: float = column("step (s)", "{:.3f}")
    limit_seconds: float = column("bytes / duplex link (s)", "{:.3f}")
    ratio: float = column("ratio", "{:.2f}")


@dataclass(frozen=True)
class TileRow:
    """A step of SGD with momentum, and its memory."""

    name: str = column("step")
    milliseconds: float = column("time (ms)", "{:.2f}")
    spike_mib: float | None = column("memory above what lies there (MiB)", "{:.1f}")


@dataclass(frozen=True)
class TrainRow:
    """Training with state on the host or the device."""

    name: str = column("state")
    parameters: float = column("parameters (billions)", "{:.2f}")
    micro_batches: int = column("micro-batches a step")
    tokens_per_second: float = column("tokens/s", "{:,.0f}")
    step_seconds: float = column("step (s)", "{:.2f}")
    optimizer_seconds: float = column("of which optimizer (s)", "{:.2f}")
    optimizer_ratio: float = column("bytes / duplex link, times", "{:.2f}")
    peak_gib: float = column("peak memory (GiB)", "{:.2f}")
    predicted_gib: float = column("4 phi + buffers + activations (GiB)", "{:.2f}")
    loss: float = column("loss", "{:.4f}")


@dataclass(frozen=True)
class LargestRow:
    """The most layers that fit, and one more."""

    layers: int = column("layers")
    parameters: float = column("parameters (billions)", "{:.2f}")
    fits: str = column("fits, by stretto plan")
    predicted_gib: float = column("GPU memory, predicted (GiB)", "{:.2f}")
    peak_gib: float = column("GPU memory, measured (GiB)", "{:.2f}")
    host_gib: float = column("host memory, predicted (GiB)", "{:.1f}")
    step_seconds: float = column("step (s)", "{:.2f}")
    loss: float = column("loss", "{:.4f}")
    error: str = column("refused or failed")


def run_parts(setting: OffloadSetting) -> Iterator[Measured]:
    """Measure the parts one after another, and write a result for each."""
    for name, (row, rows) in run_ranks(1, _measure, setting).items():
        title = f"Optimizer state on the host: {name}"
        yield Measured(rows, name=f"offload-{name}", title=title, row=row, is_drawn=not setting.cpu)


def _measure(setting: OffloadSetting) -> dict[str, Any]:
    device = torch.device("cpu" if setting.cpu else "cuda")
    grid = Grid(device=device)
    links = measure_links(device)
    found: dict[str, Any] = {"links": (LinkRow, [links])}
    duplex = links["both"] * 1e9
    parts: dict[str, tuple[type[Any], Callable[[], Iterator[Any]]]] = {
        "buckets": (BucketRow, partial(_buckets, setting, device, duplex)),
        "tiles": (TileRow, partial(_tiles, setting, device)),
        "train": (TrainRow, partial(_train, setting, grid, duplex)),
        "peers": (TrainRow, partial(_peers, setting, grid, duplex)),
        "largest": (LargestRow, partial(_largest, setting, grid, links)),
    }
    found |= {name: (row, list(measure())) for name, (row, measure) in parts.items() if name in setting.parts}
    return found


def measure_links(device: torch.device) -> dict[str, float]:
    """GB/s between pinned host memory and the device: each direction alone, and the sum of both at once."""
    if device.type != "cuda":
        return {"to_device": 10.0, "to_host": 10.0, "both": 20.0}  # there is no link: a try
    link = measure_host_link(device, partial(time_steps, warm_up=2, repeats=7))
    rates = (link.to_device_bandwidth, link.to_host_bandwidth, link.duplex_bandwidth)
    return {name: (rate or 0.0) / 1e9 for name, rate in zip(("to_device", "to_host", "both"), rates, strict=True)}


def _buckets(setting: OffloadSetting, device: torch.device, duplex: float) -> Iterator[BucketRow]:
    """Steps of AdamW over flat state, for each size of a bucket."""
    numbers = setting.numbers if not setting.cpu else 1 << 16
    scale = 1 if not setting.cpu else 1 << 10
    tried = [(True, size, 3, "device") for size in (1, 2, 4, 8, 16, 32, 64)]
    tried += [(True, 16, 1, "device"), (True, 16, 2, "device"), (True, 16, 4, "device")]
    tried += [(False, size, 3, "device") for size in (4, 16, 64)] + [(False, 16, 3, "host")]
    for is_split, size, buffers, place in tried:
        options = StateOptions(
            "host",
            bucket_size=(size << 20) // scale,
            buffer_sets=buffers,
            splits_weights=is_split,
            step_on=place,  # type: ignore[arg-type]
        )
        store = flat_store(numbers, device, adamw_update(betas=(0.9, 0.95), eps=1e-8), options)
        seconds = statistics.median(_time_step(store) for _ in range(3 + setting.repeats))
        bytes_each = 4 if place == "host" else 2 * (10 if is_split else 12)
        limit = numbers * bytes_each / duplex
        weights = "split" if is_split else "whole"
        yield BucketRow(place, weights, size, buffers, seconds, limit, ratio=seconds / limit)
        del store
        empty_memory()


def flat_store(
    numbers: int, device: torch.device, make: MakeUpdate, options: StateOptions, communicator: Any = None
) -> OptimizerStateStore:
    """State of so many numbers in one parameter, whose gradients have come. communicator: None for one rank."""
    parameter = StoredParameter("flat", torch.Size((numbers,)), (), 1, 0.0)
    store = build_store([parameter], make, torch.bfloat16, options, device, communicator or NoRanks())
    store.prepare()
    store.gradients.fill_(1e-3)
    return store


def _time_step(store: OptimizerStateStore) -> float:
    store.add(0, store.gradients[: store.parameters[0].shape.numel()])  # itself
    store.finish()
    synchronize(store.device)
    began = time.perf_counter()
    store.step(LEARNING_RATE)
    store.residence.synchronize()
    synchronize(store.device)
    return time.perf_counter() - began


def _tiles(setting: OffloadSetting, device: torch.device) -> Iterator[TileRow]:
    """SGD with momentum over bf16 gradients: in tiles, all at once, and by torch's optimizer over fp32 gradients."""
    numbers = 1_100_000_000 if not setting.cpu else 1 << 16  # of a rank of Singh's figure 7.4: 4.4 GB in fp32
    is_cuda = device.type == "cuda"

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.9, fused=is_cuda)

    sizes = (TILE, 1 << 22, 1 << 23, 1 << 24, 1 << 25, GPU_TILE, 1 << 27)
    tiles = [(f"tiles of {size / 1e6:.1f}M numbers", size) for size in sizes]
    for name, size in (("kernel", 0), *tiles, ("one tile", numbers)):
        options = StateOptions("device", bucket_size=max(1 << 24, -(-size // 64) * 64))
        update = tiled_update(make, tile=size) if size else sgd_update(momentum=0.9)
        store = flat_store(numbers, device, update, options)
        _time_step(store)  # the first one makes the momentum
        store.update._scratch = torch.empty(0)  # type: ignore[attr-defined]
        yield _tile_row(setting, device, name, partial(_time_step, store))
        del store
    master = torch.nn.Parameter(torch.zeros(numbers, device=device))
    gradient = torch.full((numbers,), 1e-3, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
    optimizer = make([master])

    def step() -> float:
        synchronize(device)
        began = time.perf_counter()
        master.grad = gradient.float()
        optimizer.step()
        weight.copy_(master.detach())
        master.grad = None
        synchronize(device)
        return time.perf_counter() - began

    step()
    yield _tile_row(setting, device, "torch.optim.SGD", step)


def _tile_row(setting: OffloadSetting, device: torch.device, name: str, step: Callable[[], float]) -> TileRow:
    """Measure steps. step: takes one, and returns its seconds."""
    added = _added_bytes(device, step)
    seconds = [step() for _ in range(3 + setting.repeats)]
    return TileRow(name, 1e3 * statistics.median(seconds), None if added is None else added / (1 << 20))


def _added_bytes(device: torch.device, run: Callable[[], Any]) -> int | None:
    """Bytes that `run` allocates at most in addition to those allocated before it; None on a CPU."""
    empty_memory()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    run()
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def _train(setting: OffloadSetting, grid: Grid, duplex: float) -> Iterator[dict[str, Any]]:
    """State on the host compared with state on the device, for each number of micro-batches."""
    for name, place in (("host, split", "host"), ("device", "device")):
        options = StateOptions(place)  # type: ignore[arg-type]
        yield from _or_errors(name, setting.micro_batches, _train_one(setting, grid, name, options, duplex))
        empty_memory()


def _train_one(
    setting: OffloadSetting, grid: Grid, name: str, options: StateOptions, duplex: float, layers: int | None = None
) -> Iterator[dict[str, Any]]:
    device, config = grid.device, setting.model()
    config = config if layers is None else replace(config, layers=layers)
    with torch.device("meta"):
        model = GPT(config)
    parallelize(model, grid, dtype=torch.bfloat16, recompute="full")
    optimizer = StoredOptimizer(
        model, grid, adamw_update(betas=(0.9, 0.95), eps=1e-8), name="adamw", clip=1.0, options=options
    )
    store = optimizer.store
    phi = store.layout.size
    state = sum(array.element_size() for array in store.residence.arrays.values())
    is_on_host = options.location == "host"
    tokens, targets = _draw(setting, config, device)

    def pass_once(count: int, is_last: bool) -> Tensor:
        with nullcontext() if is_last else no_sync(model):
            loss: Tensor = model(tokens, targets, targets.numel() * count)
            optimizer.scale_loss(loss).backward()
        return loss.detach() * count

    pass_once(1, True)
    store.step(0.0)
    fixed = 4 * phi + (options.buffer_sets * options.bucket_size * state if is_on_host else state * phi)
    activations = _added_bytes(device, lambda: pass_once(1, False))
    store.drop()
    pass_once(1, True)
    store.step(0.0)

    def update() -> None:
        optimizer.step(LEARNING_RATE)
        store.residence.synchronize()

    for count in setting.micro_batches:
        row = _time_micro_batches(setting, device, tokens, count, partial(pass_once, count), update)
        yield row | {
            "name": name,
            "parameters": phi / 1e9,
            "optimizer_ratio": row["optimizer_seconds"] / (2 * state * phi / duplex) if is_on_host else None,
            "predicted_gib": None if activations is None else (fixed + activations) / GIB,
        }


def _time_micro_batches(
    setting: OffloadSetting,
    device: torch.device,
    tokens: Tensor,
    count: int,
    run: Callable[[bool], Tensor],
    update: Callable[[], Any],
) -> dict[str, Any]:
    """Time steps of `count` micro-batches. run: one of them, told whether it is the last; update: the optimizer's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times, updates = [], []
    for _ in range(setting.repeats if count < LONG else 1):
        synchronize(device)
        began = time.perf_counter()
        for number in range(count):
            loss = run(number == count - 1)
        synchronize(device)
        passed = time.perf_counter()
        update()
        synchronize(device)
        ended = time.perf_counter()
        times.append(ended - began)
        updates.append(ended - passed)
    step = min(times)
    print(f"{count} micro-batches: {step:.2f} s a step, {min(updates):.2f} s of it the optimizer's", flush=True)
    return {
        "micro_batches": count,
        "tokens_per_second": count * tokens.numel() / step,
        "step_seconds": step,
        "optimizer_seconds": min(updates),
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None,
        "loss": float(loss),
    }


def _largest(setting: OffloadSetting, grid: Grid, links: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Train the most layers that the planner predicts to fit this machine; and one layer more, which it refuses."""
    machine = Cluster.detect()
    rates = (links[name] * 1e9 for name in ("to_device", "to_host", "both"))
    machine = replace(machine, host_link=HostLink(*rates))
    config, options = setting.model(), StateOptions("host")

    def plan(layers: int) -> GridPlan:
        return predict(
            replace(config, layers=layers),
            machine,
            grid={},
            batch=setting.micro_batch,
            micro_batch=setting.micro_batch,
            seq_len=config.max_seq_len,
            recompute="full",
            state=options,
        )

    layers = bisect_right(range(1, 4096), False, key=lambda count: not plan(count).fits)
    for count in (layers, layers + 1):
        planned = plan(count)
        row = {
            "layers": count,
            "fits": "yes" if planned.fits else "no",
            "parameters": read_architecture(replace(config, layers=count), config.max_seq_len).parameters / 1e9,
            "predicted_gib": planned.peak_memory / GIB,
            "host_gib": planned.host_memory_of_node / GIB,
        }
        if not planned.fits:
            yield row | {"error": planned.why}
            continue
        once = replace(setting, repeats=2, micro_batches=(1,))
        for measured in _or_errors("largest", (1,), _train_one(once, grid, "largest", options, 1.0, count)):
            yield row | {
                name: measured[name] for name in ("peak_gib", "step_seconds", "loss", "error") if name in measured
            }
        empty_memory()


def _peers(setting: OffloadSetting, grid: Grid, duplex: float) -> Iterator[dict[str, Any]]:
    """The same model by Stretto and by FSDP2 with CPUOffloadPolicy, each after the other."""
    ours, peer = "Stretto, host", "FSDP2, CPUOffloadPolicy"
    yield from _or_errors(ours, setting.micro_batches, _train_one(setting, grid, ours, StateOptions("host"), duplex))
    empty_memory()
    yield from _or_errors(peer, setting.micro_batches, _train_fsdp(setting, grid, peer))


def _or_errors(name: str, counts: tuple[int, ...], rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of all numbers of micro-batches; of those that fail, the error."""
    done: list[int] = []
    try:
        for row in rows:
            done.append(row["micro_batches"])
            yield row
    except FAILURES as error:
        failed = [count for count in counts if count not in done]
        yield from ({"name": name, "micro_batches": count, "error": in_one_line(error)} for count in failed)


def _train_fsdp(setting: OffloadSetting, grid: Grid, name: str) -> Iterator[dict[str, Any]]:
    device, config = grid.device, setting.model()
    model, optimizer = build_offloaded(config, device, learning_rate=LEARNING_RATE)
    tokens, targets = _draw(setting, config, device)
    phi = sum(parameter.numel() for parameter in model.parameters())

    def run(count: int, is_last: bool) -> Tensor:
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        loss: Tensor = model(tokens, targets, targets.numel() * count)
        loss.backward()
        return loss.detach() * count

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    run(1, True)
    update()  # a step to warm up
    for count in setting.micro_batches:
        row = _time_micro_batches(setting, device, tokens, count, partial(run, count), update)
        yield row | {"name": name, "parameters": phi / 1e9}


def _draw(setting: OffloadSetting, config: GPTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    length = config.max_seq_len if setting.cpu else setting.seq_len
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab, (setting.micro_batch, length + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def plot_buckets(data: dict[str, Any], picture: Path) -> None:
    """Draw the time of a step with state on the host, over the link's, against the size of buckets."""
    from lab.style import drawing
    from stretto.report.style import GUIDE, SERIES

    rows = [row for row in data["rows"] if row["step_on"] == "device"]
    sets = mode(row["buffers"] for row in rows)  # of the lines; other rows are single points
    with drawing(picture, 7.5, 3.2) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        panel.axhline(1, **GUIDE)
        limits = {row["weights"]: row["limit_seconds"] for row in rows}
        for weights, look in zip(limits, SERIES, strict=False):
            mine = sorted(select(rows, weights=weights, buffers=sets), key=lambda row: row["bucket"])
            label = f"{weights} fp32 weights, {_name_sets(sets)}"
            panel.plot(*points(mine, "bucket", "ratio"), label=label, **look.line)
        others = sorted({(row["buffers"], row["weights"]) for row in rows if row["buffers"] != sets})
        for (count, weights), look in zip(others, SERIES[len(limits) :], strict=False):
            mine = select(rows, weights=weights, buffers=count)
            hollow = look.line | {"linestyle": "", "markerfacecolor": "white", "markersize": 6}
            panel.plot(*points(mine, "bucket", "ratio"), label=f"{weights}, {_name_sets(count)}", **hollow)
        drawn.log_ticks(panel.xaxis, [row["bucket"] for row in rows])
        panel.set(xlabel="numbers of a bucket (millions)", ylabel="step time / link time")
        drawn.title = "A step of AdamW with state on the host, beside the time that its bytes take on the link"
        drawn.subtitle = describe_origin(data)
        times = ", ".join(f"{seconds:.3f} s ({weights})" for weights, seconds in limits.items())
        drawn.caption = f"Link time: all bytes over the bandwidth of copies both ways at once, {times}." + "".join(
            f" Not drawn: step on the host ({row['weights']}, {row['bucket']} million), {row['seconds']:.2f} s a step."
            for row in data["rows"]
            if row["step_on"] == "host"
        )


def _name_sets(count: int) -> str:
    return f"{count} set{'s' if count > 1 else ''} of buffers"


BENCH = Bench(
    "offload",
    "Optimizer state on the host: steps compared with the host link, state on the device, and FSDP2's offload.",
    OffloadSetting,
    run_parts,
    TrainRow,
    title="",
    plot={"offload-buckets": plot_buckets},
    needs=Needs.ONE_GPU,
)
