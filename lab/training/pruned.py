# SPDX-License-Identifier: Apache-2.0
"""`python -m lab pruned`: models pruned to 90% beside dense ones: memory, steps, and what is sent (Singh, chapter 4).

state     bytes of state a parameter over sparsity, measured beside the formulas, and where they break even (one GPU)
largest   7B and 13B on a GPU that is held to 80 GB: state, steps, and the share of the kernels that compress and expand
steps     tokens/s and bytes sent with all ranks over data, over z, and in a pipeline
networks  WideResNet-101 and VGG-19 for 50 steps over data (torchvision)
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.harness import Bench, Measured, column, keep_rows, setting_of
from lab.pictures import describe_origin
from stretto.bench.harness import FAILURES, empty_memory, in_one_line, run_ranks
from stretto.bench.settings import Needs, Option, Ranks, require_known
from stretto.execution import SparseIndexKind, StateOptions
from stretto.memory.failures import synchronize
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, count_collectives, parallelize
from stretto.train.pruning import prune
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update

PARTS = ("state", "largest", "steps", "networks")
AXES = ("data", "z", "pipe")
# Layers and tokens of a sequence, by width: eager steps of the first wait for the host, those of the second do not.
SHAPES = {2048: (24, 1024), 4096: (8, 2048)}
LIMIT = 80e9  # bytes of the GPU
PRUNED = 0.9


@dataclass(frozen=True)
class PrunedSetting:
    """Settings of `python -m lab pruned`. Raises ValueError for parts that there are not."""

    parts: Annotated[tuple[str, ...], Option("state, largest, steps, networks, with commas.")] = PARTS[:2]
    ranks: Ranks = None
    widths: Annotated[tuple[int, ...], Option("Of the GPTs whose steps are measured: 2048, 4096, with commas.")] = (
        4096,
    )
    axes: Annotated[tuple[str, ...], Option("Over which the ranks of a step are: data, z, pipe, with commas.")] = AXES
    batch: Annotated[int, Option("Sequences of a step.", least=1)] = 16
    images: Annotated[int, Option("Of a rank, in a step of the networks.", least=1)] = 64
    steps: Annotated[int, Option("Steps of the networks.", least=2)] = 50
    cpu: Annotated[bool, Option("Small sizes on the CPU: a try, no figure.")] = False

    def __post_init__(self) -> None:
        require_known("part", self.parts, PARTS)
        require_known("axis", self.axes, AXES)
        require_known("width", [str(width) for width in self.widths], [str(width) for width in SHAPES])


@dataclass(frozen=True)
class Row:
    """One model, dense or pruned."""

    part: str = column("part")
    name: str = column("model")
    sparsity: float = column("sparsity")
    index: str | None = column("index", default=None)
    parameters: float | None = column("parameters (billions)", "{:.3f}", default=None)
    state_bytes: float | None = column("state (bytes a parameter)", "{:.3f}", default=None)
    formula_bytes: float | None = column("by the formula", "{:.3f}", default=None)
    peak_gigabytes: float | None = column("peak memory (GB)", "{:.1f}", default=None)
    step_milliseconds: float | None = column("step (ms)", "{:.1f}", default=None)
    per_second: float | None = column("tokens or images a second", "{:,.0f}", default=None)
    kernel_share: float | None = column("of it compressing and expanding", "{:.2%}", default=None)
    megabytes_sent: float | None = column("sent by a rank (MB)", "{:,.1f}", default=None)
    loss: float | None = column("last loss", "{:.4f}", default=None)


Step = Callable[[], Tensor]
Keep = Callable[[list[dict[str, Any]]], None]


def measure_parts(setting: PrunedSetting, out: Path) -> Iterator[Measured]:
    """A result for each part; its rows are written as they come."""
    for part in setting.parts:
        ranks, name = (setting.ranks or 1) if part in ("steps", "networks") else 1, f"pruned-{part}"
        keep = partial(keep_rows, out, name, Row, setting_of(setting))
        found = run_ranks(ranks, _measure_part, part, setting, keep)
        yield Measured(found, name=name, title=f"Pruned models: {part}")


def _measure_part(part: str, setting: PrunedSetting, keep: Keep) -> list[dict[str, Any]]:
    rows = []
    for row in _MEASURES[part](setting):
        rows.append({"part": part} | row)
        if dist.get_rank() == 0:
            keep(rows)
        empty_memory()
    return rows


def _attempt(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return what was measured, or why nothing was."""
    try:
        return measure(*arguments)
    except FAILURES as error:
        return {"error": in_one_line(error)}


def _take_over(model: nn.Module, grid: Grid, sparsity: float, index: SparseIndexKind = "bitmap") -> StoredOptimizer:
    masks = prune(model, sparsity) if sparsity else None
    options = StateOptions("device", index=index)
    return StoredOptimizer(
        model, grid, adamw_update(betas=(0.9, 0.95), eps=1e-8), name="adamw", clip=1.0, options=options, masks=masks
    )


def _build(config: GPTConfig, grid: Grid, **options: Any) -> nn.Module:
    with torch.device("meta"):
        model = GPT(config)
    return parallelize(model, grid, dtype=torch.bfloat16, **options)


def _draw(config: GPTConfig, samples: int, device: torch.device) -> Tensor:
    return torch.randint(config.vocab, (samples, config.max_seq_len), generator=torch.Generator().manual_seed(1)).to(
        device
    )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def formula(stored: StoredOptimizer, phi: int) -> float:
    """Bytes of state a parameter: 16 of one that is dense, and 14 f + 2 of one that is pruned, and its index."""
    if stored.masks is None:
        return 16.0
    pruned = sum(mask.shape.numel() for mask in stored.masks.masks.values())
    left = 1 - stored.masks.sparsity
    of_index = 0.129 if stored.options.index == "bitmap" else 4 * left
    return (16 * (phi - pruned) + (14 * left + 2 + of_index) * pruned) / phi


def _measure_state(
    config: GPTConfig, grid: Grid, sparsity: float, index: SparseIndexKind, samples: int, **options: Any
) -> tuple[dict[str, Any], Step]:
    """Measures a model's state after its first step, and its step."""
    product = torch.ones(64, 64, device=grid.device, dtype=torch.bfloat16, requires_grad=True)
    (product @ product).sum().backward()  # cuBLAS keeps 32 MiB for each thread that multiplies: no state
    del product
    empty_memory()
    before, device = _allocated(grid.device), grid.device
    model = _build(config, grid, **options)
    phi = sum(parameter.numel() for parameter in model.parameters())
    stored = _take_over(model, grid, sparsity, index)
    tokens = _draw(config, samples, device)

    def step() -> Tensor:
        loss: Tensor = model(tokens, tokens, tokens.numel())
        loss.backward()
        stored.step(1e-4)
        return loss.detach()

    step()
    synchronize(device)
    buffer = 2 * stored.options.bucket_size if sparsity else 0  # of one bucket, whatever the model
    measured = {
        "sparsity": sparsity,
        "index": index if sparsity else None,
        "parameters": phi / 1e9,
        "state_bytes": (_allocated(device) - before - buffer) / phi if device.type == "cuda" else None,
        "formula_bytes": formula(stored, phi),
    }
    return measured, step


def measure_curve(setting: PrunedSetting) -> Iterator[dict[str, Any]]:
    """Part `state`."""
    grid = Grid(device="cpu" if setting.cpu else None)
    config = GPTConfig(layers=12, hidden=2048, heads=16, vocab=512, max_seq_len=64, bias=False)
    if setting.cpu:
        config = replace(config, layers=1, hidden=64, heads=4)
    for sparsity in (0.0, 0.25, 0.5, 0.75, 0.9, 0.95):
        for index in get_args(SparseIndexKind) if sparsity else ("bitmap",):
            yield {"name": "GPT of width 2048"} | _measure_state(config, grid, sparsity, index, 1)[0]


def measure_largest(setting: PrunedSetting) -> Iterator[dict[str, Any]]:
    """Part `largest`."""
    grid = Grid(device="cpu" if setting.cpu else None)
    if not setting.cpu:
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, LIMIT / torch.cuda.get_device_properties(grid.device).total_memory)
        )
    small: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "max_seq_len": 32}
    for name, layers, hidden, samples in (("7B, 8192 tokens", 32, 4096, 4), ("13B, 2048 tokens", 40, 5120, 1)):
        config = GPTConfig(layers=layers, hidden=hidden, heads=hidden // 128, vocab=50304, max_seq_len=2048, bias=False)
        config = replace(config, **small) if setting.cpu else config
        yield {"name": name, "sparsity": PRUNED} | _attempt(_measure_one, config, grid, samples)


def _measure_one(config: GPTConfig, grid: Grid, samples: int) -> dict[str, Any]:
    row, step = _measure_state(config, grid, PRUNED, "bitmap", samples, recompute="full")
    row |= _time(step, grid.device, 2, samples * config.max_seq_len)
    if grid.device.type == "cuda":
        row["peak_gigabytes"] = torch.cuda.max_memory_allocated(grid.device) / 1e9
        row["kernel_share"] = _profile(step)
    return row


def _time(step: Step, device: torch.device, steps: int, items: int) -> dict[str, Any]:
    """The mean time of so many steps, after one, and the last loss."""
    step()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    synchronize(device)
    seconds = (time.perf_counter() - began) / steps
    return {"step_milliseconds": seconds * 1e3, "per_second": items / seconds, "loss": float(loss)}


def _profile(step: Step) -> float:
    """The part of the time of a step's kernels that compressing and expanding takes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = [(event.key, event.self_device_time_total) for event in profiler.key_averages()]
    return sum(taken for name, taken in events if name in ("_compress", "_expand")) / sum(taken for _, taken in events)


def measure_steps(setting: PrunedSetting) -> Iterator[dict[str, Any]]:
    """Part `steps`: dense and pruned, in turn."""
    ranks = setting.ranks or 1
    for width, axis, sparsity in product(setting.widths, setting.axes, (0.0, PRUNED)):
        layers, tokens = SHAPES[width]
        shape: dict[str, Any] = {
            "layers": layers,
            "hidden": width,
            "heads": width // 128,
            "vocab": 50304,
            "max_seq_len": tokens,
        }
        if setting.cpu:
            shape = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 256, "max_seq_len": 32}
        row = {"name": f"width {width}, {axis}={ranks}", "sparsity": sparsity}
        yield row | _attempt(_measure_grid, setting, GPTConfig(bias=False, **shape), axis, ranks, sparsity)


def _measure_grid(setting: PrunedSetting, config: GPTConfig, axis: str, ranks: int, sparsity: float) -> dict[str, Any]:
    sizes: dict[str, Any] = {axis: ranks}
    grid = Grid(**sizes, device="cpu" if setting.cpu else None)
    model = _build(config, grid)
    stored = _take_over(model, grid, sparsity)
    tokens = _draw(config, setting.batch, grid.device)
    own = tokens.chunk(grid.size("batch"))[grid.coordinate("batch")]
    pipeline = Pipeline(model, grid, micro_batch_size=2) if axis == "pipe" else None

    def step() -> Tensor:
        if pipeline is not None:
            loss: Tensor = pipeline.step(tokens, tokens)
        else:
            loss = model(own, own, tokens.numel())
            loss.backward()
        stored.step(1e-4)
        return loss.detach()

    found = _time(step, grid.device, 3, tokens.numel())
    if grid.device.type == "cuda":
        found["peak_gigabytes"] = torch.cuda.max_memory_allocated(grid.device) / 1e9
    with count_collectives(grid) as counts:
        step()
    return found | {"megabytes_sent": counts.bytes_by_axis().get(axis, 0) / 1e6}


class _Classifier(nn.Module):
    """A network of images with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(images).float(), labels, reduction="sum")


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3, stride=4), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def measure_networks(setting: PrunedSetting) -> Iterator[dict[str, Any]]:
    """Part `networks`: images of noise, whose labels the networks learn by heart."""
    ranks = setting.ranks or 1
    networks: dict[str, Callable[[], nn.Module]] = {"tiny": _tiny}
    if not setting.cpu:
        from torchvision import models

        networks = {"WideResNet-101": models.wide_resnet101_2, "VGG-19": models.vgg19_bn}
    for (name, make), sparsity in product(networks.items(), (0.0, PRUNED)):
        row = {"name": f"{name}, data={ranks}", "sparsity": sparsity}
        yield row | _attempt(_train_network, setting, make, ranks, sparsity)


def _train_network(
    setting: PrunedSetting, make: Callable[[], nn.Module], ranks: int, sparsity: float
) -> dict[str, Any]:
    grid, width = Grid(data=ranks, device="cpu" if setting.cpu else None), 32 if setting.cpu else 224
    torch.manual_seed(0)
    network = make()
    network(torch.zeros(2, 3, width, width))  # lazy layers
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # torch refuses fp32 running statistics of bf16 weights
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    model = parallelize(_Classifier(network).train(), grid, dtype=torch.bfloat16)
    stored = _take_over(model, grid, sparsity)
    generator = torch.Generator(grid.device).manual_seed(grid.coordinate("batch"))
    shape = (setting.images, 3, width, width)
    images = torch.randn(shape, generator=generator, device=grid.device).to(torch.bfloat16)
    labels = torch.randint(10, (setting.images,), generator=generator, device=grid.device)
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e9

    def step() -> Tensor:
        loss: Tensor = model(images, labels) / (setting.images * ranks)
        loss.backward()
        stored.step(1e-4)
        return loss.detach() * ranks

    with count_collectives(grid) as counts:
        step()
    found = _time(step, grid.device, setting.steps - 2, setting.images * ranks)
    sent = counts.bytes_by_axis()
    return found | {"parameters": parameters, "megabytes_sent": sent.get("data", sent.get("batch", 0)) / 1e6}


_MEASURES: dict[str, Callable[[PrunedSetting], Iterator[dict[str, Any]]]] = {
    "state": measure_curve, "largest": measure_largest, "steps": measure_steps, "networks": measure_networks,
}  # fmt: skip


def plot_state(data: dict[str, Any], picture: Path) -> None:
    """Draw measured bytes a parameter over sparsity, the formulas, and where they break even with dense state."""
    import numpy as np

    from lab.style import drawing
    from stretto.report.style import GREEN, GREY, SKY, VERMILION

    rows, sparsities = data["rows"], np.linspace(0, 1)
    with drawing(picture, 7, 4.2) as drawn:
        panel = drawn.panels(1, 1)[0, 0]
        lines = {"the paper's layout": (VERMILION, 24, 2), "int32": (GREEN, 18, 2), "bitmap": (SKY, 14, 2.129)}
        for name, (colour, of_left, rest) in lines.items():
            sizes = of_left * (1 - sparsities) + rest
            panel.plot(sparsities, sizes, color=colour, label=name)
            measured = [(row["sparsity"], row["state_bytes"]) for row in rows if row.get("index") == name]
            if measured:
                panel.plot(*zip(*measured, strict=True), "o", color=colour)
        panel.axhline(16, color=GREY, ls="--", label="dense state")
        panel.set(xlim=(0, 1), ylim=(0, 27), xlabel="sparsity", ylabel="bytes a parameter")
        drawn.title = "Memory of a pruned model's state"
        drawn.subtitle = describe_origin(data)
        drawn.caption = (
            "Lines: formulas, for weights that are all pruned. Dots: measured. The bitmap breaks even with dense state "
            f"at a sparsity of {1 - (16 - 2.129) / 14:.1%}, int32 positions at {1 - 14 / 18:.1%}."
        )


BENCH = Bench(
    "pruned",
    "Models pruned to 90% beside dense ones: memory over sparsity, 13B on 80 GB, steps over data and in pipelines.",
    PrunedSetting,
    measure_parts,
    Row,
    title="Pruned models",
    plot={"pruned-state": plot_state},
    needs=Needs.RANKS,
)
