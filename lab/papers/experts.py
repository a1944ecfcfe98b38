# SPDX-License-Identifier: Apache-2.0
"""Chapter 7 of Singh's dissertation, mixtures of experts on Summit: plans for its runs, and the measured results.

Four tables: the largest models that fit (figure 7.9), steps with and without the optimizations of communication
(figures 7.8, 7.10 and 7.11, Table 7.1), the saving of each (figure 7.5), and plans of two current models on H100
compared with the layout that DeepSeek-V3's authors published.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lab.harness import Measured, column
from lab.papers import Compared, by_number, model_flops, read_paper
from stretto.axes import GridSizes
from stretto.cluster import Cluster
from stretto.execution import ExecutionOptions, StateOptions
from stretto.models import GPTConfig
from stretto.planner import GridPlan, plan, predict, read_architecture
from stretto.planner.experts.ted import list_memory
from stretto.planner.memory import max_allocated, peak, step_memory, whole_logits
from stretto.planner.search_space import PredictKeywords
from stretto.planner.workload import StepConfig, StepWorkload

SEQ_LEN, MICRO_BATCH, PEAK, GPU_BYTES = 2048, 1, 125e12, 16e9
# Table 4.1's base models, with GPT-3's sizes (Brown et al., table 2.1; 13B has 5120 there 5140), and its batches.
BASES = {
    "1.3B": (24, 2048, 16, 512),
    "2.7B": (32, 2560, 32, 512),
    "6.7B": (32, 4096, 32, 1024),
    "13B": (40, 5120, 40, 2048),
}
TENSOR = {"1.3B": 1, "2.7B": 2, "6.7B": 4, "13B": 8}  # section 7.4.4
EXPERTS, MAX_TENSOR = (4, 8, 16, 32, 64, 128), 6
# Section 7.2: upper bound of fp32 gradients of an optimizer tile. Without tiles, all parameters of a GPU have them.
TILE_BYTES = 1e9
STATE = StateOptions("device")  # 16-bit weights and gradients, as there
STEPS: list[tuple[Any, ...]] = [tuple(run) for run in read_paper("singh")["chapter-7"]["steps"]]
PUBLISHED_RATIO = by_number(read_paper("singh")["figure-7-9"]["ratio"])

MODERN_SEQ_LEN, CONFIGS = 4096, read_paper("models")
# DeepSeek-V3's batch of 15,360 sequences (its report, section 4.2); the others are chosen for as many a GPU.
MODERN_RUNS = (
    ("Qwen3-30B-A3B", 64, 512),
    ("Qwen3-30B-A3B", 2048, 16384),
    ("DeepSeek-V3", 64, 512),
    ("DeepSeek-V3", 2048, 15360),
)
# Section 3.2 of DeepSeek-V3's report: 16 stages, 64 ranks for experts over 8 nodes, ZeRO-1, no tensor parallelism. z
# stands for ZeRO-1, for a pipeline stage gathers its weights once a step; z=128 does not divide its 576 latent rows.
AUTHORS = GridSizes(pipe=16, data=2, z=64, expert=64)
AUTHORS_OPTIONS: PredictKeywords = {"schedule": "1f1b", "recompute": "full"}


@dataclass(frozen=True)
class SizeRow:
    """The largest mixtures that fit a number of GPUs (figure 7.9)."""

    gpus: int = column("GPUs")
    largest: str = column("largest with x up to 6")
    billions: float = column("parameters (10^9)", "{:.1f}")
    gigabytes: float = column("memory (GB)", "{:.1f}")
    largest_alone: str = column("largest with x = 1")
    billions_alone: float = column("parameters (10^9)", "{:.1f}")
    gigabytes_alone: float = column("memory (GB)", "{:.1f}")
    ratio: float = column("ratio", "{:.2f}")
    published_ratio: float | None = column("published", "{:.2f}")
    ratio_by_equation: float = column("eq. 7.5 alone", "{:.2f}")


@dataclass(frozen=True)
class StepRow:
    """A run with and without DTD and CAC: planned and published."""

    figure: str = column("figure")
    base: str = column("base")
    gpus: int = column("GPUs")
    experts: int = column("experts")
    grid: str = column("grid")
    baseline_seconds: float = column("baseline (s)", "{:.2f}")
    seconds: float = column("DTD + CAC (s)", "{:.2f}")
    gain: float = column("gain", "{:.0%}")
    published_gain: str = column("published")
    peak_share: float = column("of the peak", "{:.1%}")
    published_peak: float | None = column("published", "{:.1%}")


@dataclass(frozen=True)
class BarRow:
    """A bar of figure 7.5: planned and published savings."""

    bar: str = column("run")
    seconds: float = column("step (s)", "{:.2f}")
    saved: float | None = column("saved", "{:.1%}")
    published_saved: float | None = column("published", "{:.1%}")
    all_to_all_seconds: float = column("all-to-alls (s)", "{:.2f}")
    all_to_all_saved: float | None = column("saved", "{:.1%}")
    published_all_to_all_saved: float | None = column("published", "{:.1%}")
    over_x_seconds: float = column("over x (s)", "{:.2f}")
    all_to_all_share: float = column("all-to-alls of the step", "{:.0%}")


@dataclass(frozen=True)
class ModernRow:
    """A plan of a current model, ours or its authors'."""

    model: str = column("model")
    gpus: int = column("H100")
    whose: str = column("plan")
    grid: str = column("grid")
    schedule: str | None = column("schedule")
    micro_batch: int = column("micro-batch")
    recompute: str = column("recompute")
    step_seconds: float = column("step (s)", "{:.2f}")
    tokens_per_second: float = column("tokens/s a GPU", "{:,.0f}")
    all_to_all_seconds: float = column("all-to-alls (s)", "{:.2f}")
    memory_gigabytes: float = column("memory (GB)", "{:.1f}")
    plan_seconds: float | None = column("planned in (s)", "{:.1f}")


def study_experts() -> Iterator[Measured | Compared]:
    """Plan sizes, steps, the bars of figure 7.5, and current models."""
    about = {"micro_batch": MICRO_BATCH, "seq_len": SEQ_LEN}
    sizes = [plan_sizes(gpus) for gpus in (32, 64, 128, 256, 512)]
    steps = [plan_steps(*run) for run in STEPS]
    bars = plan_bars()
    yield Measured(sizes, about, name="experts-sizes", title="Figure 7.9: the largest mixture")
    yield Measured(steps, about, name="experts-steps", title="Figures 7.8, 7.10, 7.11 and Table 7.1")
    yield Measured(bars, about, name="experts-bars", title="Figure 7.5: 6.7B, 32 experts, 128 GPUs")
    yield Measured(list(plan_modern()), about, name="experts-modern", title="Mixtures of today on H100")
    for size in sizes:
        if size.published_ratio is not None:
            run, published = f"{size.gpus} GPUs of Summit", f"{size.published_ratio}"
            yield Compared("Singh", "figure 7.9", run, "largest mixture, ratio", published, size.ratio)
    for bar in bars:
        if bar.published_saved is not None:
            published = f"{bar.published_saved:.3f}"
            yield Compared("Singh", "figure 7.5", bar.bar, "part of the step saved", published, bar.saved)
    for step in steps:
        run = f"{step.base}, {step.experts} experts on {step.gpus} GPUs of Summit"
        yield Compared("Singh", f"figure {step.figure}", run, "gain (%)", step.published_gain, 100 * step.gain)


def mixture(base: str, experts: int) -> GPTConfig:
    """A base model with top-1 experts in every second block, and dropout, as of `pipelines`."""
    layers, hidden, heads, _ = BASES[base]
    dense = GPTConfig(layers=layers, hidden=hidden, heads=heads, max_seq_len=SEQ_LEN, dropout=0.1)
    return replace(dense, num_experts=experts, experts_per_token=1, moe_layers="every:2")


@dataclass(frozen=True)
class Fit:
    """A mixture that fits: its base, experts and ranks of x, its parameters in billions, and GB of a GPU."""

    base: str
    experts: int
    tensor: int
    billions: float
    gigabytes: float

    def __str__(self) -> str:
        return f"{self.base}, {self.experts} experts" + (f", x={self.tensor}" if self.tensor > 1 else "")


def plan_sizes(gpus: int) -> SizeRow:
    """The largest mixture that fits with tensor parallelism and without it, on `gpus` GPUs of Summit."""
    cut, alone = _largest(gpus, MAX_TENSOR), _largest(gpus, 1)
    return SizeRow(
        gpus,
        *(str(cut), cut.billions, cut.gigabytes),
        *(str(alone), alone.billions, alone.gigabytes),
        ratio=cut.billions / alone.billions,
        published_ratio=PUBLISHED_RATIO.get(gpus),
        ratio_by_equation=_largest_by_equation(gpus, MAX_TENSOR) / _largest_by_equation(gpus, 1),
    )


def _candidates(gpus: int, most_tensor: int) -> Iterator[tuple[str, int, int]]:
    """Base, experts and x: one expert a rank at most (the paper has G_expert = E), within a node."""
    for base, (_, _, heads, batch) in BASES.items():
        for experts in EXPERTS:
            for tensor in range(1, most_tensor + 1):
                fits_grid = gpus % tensor == 0 and heads % tensor == 0 and gpus // tensor % experts == 0
                if fits_grid and batch % (gpus // tensor) == 0:
                    yield base, experts, tensor


def _largest(gpus: int, most_tensor: int) -> Fit:
    fitting = []
    for base, experts, tensor in _candidates(gpus, most_tensor):
        num_bytes = ted_bytes(base, experts, gpus, tensor, is_tiled=most_tensor > 1)
        if num_bytes <= max_allocated(GPU_BYTES):
            parameters = read_architecture(mixture(base, experts), SEQ_LEN).parameters
            fitting.append(Fit(base, experts, tensor, parameters / 1e9, num_bytes / 1e9))
    return max(fitting, key=lambda fit: (fit.billions, -fit.gigabytes))


def ted_bytes(base: str, experts: int, gpus: int, tensor: int, *, is_tiled: bool) -> float:
    """Bytes of a GPU: equation 7.4, and the larger of the optimizer's fp32 gradients and the checkpointed activations
    of one sequence with the loss. Logits are sharded over x, but not computed in slices as in Stretto, since neither
    system does that. is_tiled: whether the optimizer steps tiles (section 7.2)."""
    grid = GridSizes(data=gpus // tensor, x=tensor, expert=experts)
    model = read_architecture(mixture(base, experts), SEQ_LEN)
    states = list_memory(model, grid)
    # Optimizer state is 12 bytes a parameter, so the 4 bytes of its fp32 gradient are a third of that.
    gradients = states["optimizer"] / 3
    workload = StepWorkload(model, grid.batch_parts, SEQ_LEN, dtype="fp16")
    in_step = step_memory(workload, StepConfig(grid, 1, ExecutionOptions(recompute="full"), STATE))
    loss = in_step["activations"] + whole_logits(workload, SEQ_LEN) / tensor
    passes = max(loss, in_step["activations"] + in_step["logits"] + in_step["temporary"])
    return peak(states) + max(passes, min(gradients, TILE_BYTES) if is_tiled else gradients)


def min_memory(base: float, experts: int, gpus: int, tensor: int) -> float:
    """Equation 7.5: bytes of a GPU at least, with `tensor` ranks of x, for a base model of so many parameters."""
    return 4 * base * (1 / tensor + (experts + 2) / gpus)


def _largest_by_equation(gpus: int, most_tensor: int) -> float:
    """Billions of parameters of the largest mixture by equation 7.5 alone, with the rounded sizes of the bases."""
    return max(
        float(base[:-1]) * (2 + experts) / 3
        for base, experts, tensor in _candidates(gpus, most_tensor)
        if min_memory(float(base[:-1]) * 1e9, experts, gpus, tensor) <= GPU_BYTES
    )


def plan_steps(
    figure: str, base: str, gpus: int, experts: int, low: float, high: float, peak: float | None = None
) -> StepRow:
    """Predict one run with full checkpointing and duplicates, and with communication kept and no duplicates.

    low, high: the published range of gains, in percent. peak: the published percent of the peak.
    """
    grid = GridSizes(data=gpus // TENSOR[base], x=TENSOR[base], expert=experts)
    baseline = _predict(base, experts, grid, "full", drops_duplicates=False).step_time
    improved = _predict(base, experts, grid, "communication", drops_duplicates=True).step_time
    # Top-1 experts do not change the model FLOPs.
    flops = model_flops(mixture(base, experts), BASES[base][3], SEQ_LEN)
    return StepRow(
        *(figure, base, gpus, experts, str(grid), baseline, improved),
        gain=baseline / improved - 1,
        published_gain=f"{low:g}%" if low == high else f"{low:g} to {high:g}%",
        peak_share=flops / improved / gpus / PEAK,
        published_peak=None if peak is None else peak / 100,
    )


def plan_bars() -> list[BarRow]:
    """Predict the three bars of figure 7.5: 6.7B with 32 experts on 128 GPUs, x = 4."""
    predicted = partial(_predict, "6.7B", 32, GridSizes(data=32, x=4, expert=32))
    bars = {
        "baseline": predicted("full", drops_duplicates=False),
        "DTD": predicted("full", drops_duplicates=True),
        "DTD + CAC": predicted("communication", drops_duplicates=True),
    }
    first, published = bars["baseline"], read_paper("singh")["figure-7-5"]
    exchanged = first.communication["all_to_all"]
    return [
        BarRow(
            bar,
            found.step_time,
            saved=None if found is first else 1 - found.step_time / first.step_time,
            published_saved=published["saved"].get(bar),
            all_to_all_seconds=found.communication["all_to_all"],
            all_to_all_saved=None if found is first else 1 - found.communication["all_to_all"] / exchanged,
            published_all_to_all_saved=published["saved_all_to_all"].get(bar),
            over_x_seconds=found.communication["all_reduce_x"],
            all_to_all_share=found.communication["all_to_all"] / found.step_time,
        )
        for bar, found in bars.items()
    ]


def _predict(base: str, experts: int, grid: GridSizes, recompute: str, *, drops_duplicates: bool) -> GridPlan:
    return predict(
        mixture(base, experts),
        Cluster.preset("summit"),
        grid=grid.sizes(),
        batch=BASES[base][3],
        seq_len=SEQ_LEN,
        micro_batch=MICRO_BATCH,
        dtype="fp16",
        state=STATE,
        recompute=recompute,
        drop_duplicates=drops_duplicates,
        imbalance=1.0,
    )


def plan_modern() -> Iterator[ModernRow]:
    """The best plan of each run, with and without stages, and that of DeepSeek-V3's authors."""
    cluster = Cluster.preset("dgx-h100")
    for model, gpus, batch in MODERN_RUNS:
        began = time.process_time()
        options: dict[str, Any] = {"seq_len": MODERN_SEQ_LEN, "pipe": "auto", "shard_sequence": False}
        best = plan(CONFIGS[model], cluster, gpus=gpus, batch=batch, **options)[0]
        yield _modern_row(model, batch, "fastest", best, time.process_time() - began)
    model, _, batch = MODERN_RUNS[-1]
    options = {"batch": batch, "seq_len": MODERN_SEQ_LEN, "micro_batch": 1, **AUTHORS_OPTIONS}
    authors = predict(CONFIGS[model], cluster, grid=AUTHORS.sizes(), **options)
    yield _modern_row(model, batch, "its authors'", authors, None)


def _modern_row(model: str, batch: int, whose: str, found: GridPlan, plan_seconds: float | None) -> ModernRow:
    grid, stages = GridSizes(**found.grid), f", {found.virtual_stages} stages a rank"
    return ModernRow(
        model,
        grid.ranks,
        whose if found.fits else f"{whose}, does not fit",
        str(grid),
        f"{found.schedule}{stages}" if found.schedule == "interleaved" else found.schedule,
        found.micro_batch,
        found.recompute,
        found.step_time,
        tokens_per_second=batch * MODERN_SEQ_LEN / found.step_time / grid.ranks,
        all_to_all_seconds=found.communication.get("all_to_all", 0.0),
        memory_gigabytes=found.peak_memory / 1e9,
        plan_seconds=plan_seconds,
    )
