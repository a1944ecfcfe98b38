# SPDX-License-Identifier: Apache-2.0
"""Chapter 7 of Singh's dissertation, mixtures of experts on Summit: plans for its runs, and the measured results.

The bench writes four tables: the largest models that fit (figure 7.9), steps with and without the
optimizations of communication (figures 7.8, 7.10 and 7.11, Table 7.1), the saving of each (figure 7.5), and plans of
two current models compared with their authors' layouts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from lab.papers import by_number, read_paper
from lab.planning.modern_experts import ModernRow, plan_modern
from stretto.axes import GridSizes
from stretto.bench.settings import Option
from stretto.cluster import Cluster
from stretto.execution import ExecutionOptions, StateOptions
from stretto.models import GPTConfig
from stretto.planner import GridPlan, predict, read_architecture
from stretto.planner.capacity import max_allocated, peak
from stretto.planner.experts.ted import list_memory
from stretto.planner.memory import step_memory, whole_logits
from stretto.planner.workload import StepConfig, StepWorkload


@dataclass(frozen=True)
class PublishedExpertsSetting:
    """The micro-batch that `python -m lab published-experts` assumes for the runs of chapter 7."""

    micro_batch: Annotated[int, Option("Micro-batch of the steps on Summit, in sequences of 2048 tokens.")] = 1

    def __post_init__(self) -> None:
        if self.micro_batch not in (1, 2, 4, 8):
            near = min((1, 2, 4, 8), key=lambda size: abs(size - self.micro_batch))
            raise ValueError(
                f"--micro-batch is {self.micro_batch}, which does not divide the sequences of a rank in all runs; "
                f"{near} would do"
            )


SEQ_LEN, PEAK, GPU_BYTES = 2048, 125e12, 16e9
# Table 4.1's base models, with GPT-3's sizes (Brown et al., table 2.1; 13B has 5120 there 5140), and its batches.
BASES = {
    "1.3B": (24, 2048, 16, 512),
    "2.7B": (32, 2560, 32, 512),
    "6.7B": (32, 4096, 32, 1024),
    "13B": (40, 5120, 40, 2048),
}
TENSOR = {"1.3B": 1, "2.7B": 2, "6.7B": 4, "13B": 8}  # section 7.4.4
EXPERTS = (4, 8, 16, 32, 64, 128)
MAX_TENSOR = 6
# Section 7.2: upper bound of fp32 gradients of an optimizer tile. Without tiles, all parameters of a GPU have them.
TILE_BYTES = 1e9
STATE = StateOptions("device")  # 16-bit weights and gradients, as there


def mixture(base: str, experts: int) -> GPTConfig:
    """A base model with top-1 experts in every second block."""
    layers, hidden, heads, _ = BASES[base]
    return GPTConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        max_seq_len=SEQ_LEN,
        num_experts=experts,
        experts_per_token=1,
        moe_layers="every:2",
        dropout=0.1,  # as of published_pipelines
    )


# Figure 7.9: which models fit.


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
    published_ratio: float = column("published", "{:.2f}")
    ratio_by_equation: float = column("eq. 7.5 alone", "{:.2f}")


PUBLISHED_RATIO = by_number(read_paper("singh")["figure-7-9"]["ratio"])


@dataclass(frozen=True)
class Fit:
    """A mixture that fits: its base, experts and ranks of x, its parameters in billions, and bytes of a GPU."""

    base: str
    experts: int
    tensor: int
    billions: float
    num_bytes: float

    def __str__(self) -> str:
        return f"{self.base}, {self.experts} experts" + (f", x={self.tensor}" if self.tensor > 1 else "")


def plan_sizes(gpus: int) -> dict[str, Any]:
    """The largest mixture that fits with tensor parallelism and without it, on `gpus` GPUs of Summit."""
    with_tensor = _largest(gpus, MAX_TENSOR)
    alone = _largest(gpus, 1)
    by_equation = [_largest_by_equation(gpus, most) for most in (MAX_TENSOR, 1)]
    return {
        "gpus": gpus,
        "largest": str(with_tensor),
        "billions": with_tensor.billions,
        "gigabytes": with_tensor.num_bytes / 1e9,
        "largest_alone": str(alone),
        "billions_alone": alone.billions,
        "gigabytes_alone": alone.num_bytes / 1e9,
        "ratio": with_tensor.billions / alone.billions,
        "published_ratio": PUBLISHED_RATIO.get(gpus),
        "ratio_by_equation": by_equation[0] / by_equation[1],
    }


def _candidates(gpus: int, most_tensor: int) -> Iterator[tuple[str, int, int]]:
    """Base, experts and x: one expert a rank at most (the paper has G_expert = E), within a node."""
    for base, (_, _, heads, batch) in BASES.items():
        for experts in EXPERTS:
            for tensor in range(1, most_tensor + 1):
                fits_grid = gpus % tensor == 0 and heads % tensor == 0 and gpus // tensor % experts == 0
                if fits_grid and batch % (gpus // tensor) == 0:
                    yield base, experts, tensor


def _largest(gpus: int, most_tensor: int) -> Fit:
    limit = max_allocated(GPU_BYTES)
    fitting = []
    for base, experts, tensor in _candidates(gpus, most_tensor):
        num_bytes = ted_bytes(base, experts, gpus, tensor, is_tiled=most_tensor > 1)
        if num_bytes <= limit:
            parameters = read_architecture(mixture(base, experts), SEQ_LEN).parameters
            fitting.append(Fit(base, experts, tensor, parameters / 1e9, num_bytes))
    return max(fitting, key=lambda fit: (fit.billions, -fit.num_bytes))


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
    sizes = {"1.3B": 1.3, "2.7B": 2.7, "6.7B": 6.7, "13B": 13.0}
    return max(
        sizes[base] * (2 + experts) / 3
        for base, experts, tensor in _candidates(gpus, most_tensor)
        if min_memory(sizes[base] * 1e9, experts, gpus, tensor) <= GPU_BYTES
    )


# Figures 7.8, 7.10 and 7.11, and Table 7.1: steps.


@dataclass(frozen=True)
class PublishedSteps:
    """Steps of one figure with and without DTD and CAC. gain: the published range, in percent; peak: percent."""

    figure: str
    base: str
    gpus: int
    experts: int
    gain: tuple[float, float]
    peak: float | None = None


STEPS = tuple(
    PublishedSteps(figure, base, gpus, experts, (low, high), *peak)
    for figure, base, gpus, experts, low, high, *peak in read_paper("singh")["chapter-7"]["steps"]
)


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
    published_peak: float = column("published", "{:.1%}")


def plan_steps(steps: PublishedSteps, micro_batch: int) -> dict[str, Any]:
    """Predict one run with full checkpointing and duplicates, and with communication kept and no duplicates."""
    batch, tensor = BASES[steps.base][3], TENSOR[steps.base]
    grid = GridSizes(data=steps.gpus // tensor, x=tensor, expert=steps.experts)
    baseline, improved = (
        _predict(steps.base, steps.experts, grid, batch, micro_batch, *options)
        for options in (("full", False), ("communication", True))
    )
    low, high = steps.gain
    return {
        "figure": steps.figure,
        "base": steps.base,
        "gpus": steps.gpus,
        "experts": steps.experts,
        "grid": str(grid),
        "baseline_seconds": baseline.step_time,
        "seconds": improved.step_time,
        "gain": baseline.step_time / improved.step_time - 1,
        "published_gain": f"{low:g}%" if low == high else f"{low:g} to {high:g}%",
        "peak_share": _model_flops(steps.base, batch) / improved.step_time / steps.gpus / PEAK,
        "published_peak": None if steps.peak is None else steps.peak / 100,
    }


# Figure 7.5: the saving of each optimization.


@dataclass(frozen=True)
class BarRow:
    """A bar of figure 7.5: planned and published savings."""

    bar: str = column("run")
    seconds: float = column("step (s)", "{:.2f}")
    saved: float = column("saved", "{:.1%}")
    published_saved: float = column("published", "{:.1%}")
    all_to_all_seconds: float = column("all-to-alls (s)", "{:.2f}")
    all_to_all_saved: float = column("saved", "{:.1%}")
    published_all_to_all_saved: float = column("published", "{:.1%}")
    over_x_seconds: float = column("over x (s)", "{:.2f}")
    all_to_all_share: float = column("all-to-alls of the step", "{:.0%}")


BARS = {"baseline": ("full", False), "DTD": ("full", True), "DTD + CAC": ("communication", True)}


def plan_bars(micro_batch: int) -> list[dict[str, Any]]:
    """Predict the three bars: 6.7B with 32 experts on 128 GPUs, x = 4."""
    grid = GridSizes(data=32, x=4, expert=32)
    plans = {
        bar: _predict("6.7B", 32, grid, 1024, micro_batch, recompute, drops) for bar, (recompute, drops) in BARS.items()
    }
    first = plans["baseline"]
    exchanged = first.communication["all_to_all"]
    rows = []
    published = read_paper("singh")["figure-7-5"]
    for bar in BARS:
        found = plans[bar]
        is_first = bar == "baseline"
        rows.append(
            {
                "bar": bar,
                "seconds": found.step_time,
                "saved": None if is_first else 1 - found.step_time / first.step_time,
                "published_saved": published["saved"].get(bar),
                "all_to_all_seconds": found.communication["all_to_all"],
                "all_to_all_saved": None if is_first else 1 - found.communication["all_to_all"] / exchanged,
                "published_all_to_all_saved": published["saved_all_to_all"].get(bar),
                "over_x_seconds": found.communication["all_reduce_x"],
                "all_to_all_share": found.communication["all_to_all"] / found.step_time,
            }
        )
    return rows


def _predict(
    base: str, experts: int, grid: GridSizes, batch: int, micro_batch: int, recompute: str, drops_duplicates: bool
) -> GridPlan:
    return predict(
        mixture(base, experts),
        Cluster.preset("summit"),
        grid=grid.sizes(),
        batch=batch,
        seq_len=SEQ_LEN,
        micro_batch=micro_batch,
        dtype="fp16",
        state=STATE,
        recompute=recompute,
        drop_duplicates=drops_duplicates,
        imbalance=1.0,
    )


def _model_flops(base: str, batch: int) -> float:
    """Narayanan et al.'s model FLOPs of a step of the base model, which top-1 experts do not change."""
    layers, hidden, _, _ = BASES[base]
    vocab = mixture(base, 4).vocab
    return 96 * batch * SEQ_LEN * layers * hidden**2 * (1 + SEQ_LEN / (6 * hidden) + vocab / (16 * layers * hidden))


def plan_published(setting: PublishedExpertsSetting) -> Iterator[Measured]:
    """Plan all runs: sizes, steps, the bars of figure 7.5, and current models."""
    sizes = [plan_sizes(gpus) for gpus in (32, 64, 128, 256, 512)]
    yield Measured(sizes, name="experts-sizes", title="Figure 7.9: the largest mixture", row=SizeRow)
    steps = [plan_steps(each, setting.micro_batch) for each in STEPS]
    yield Measured(steps, name="experts-steps", title="Figures 7.8, 7.10, 7.11 and Table 7.1")
    title = "Figure 7.5: 6.7B, 32 experts, 128 GPUs"
    yield Measured(plan_bars(setting.micro_batch), name="experts-bars", title=title, row=BarRow)
    yield Measured(plan_modern(), name="experts-modern", title="Mixtures of today on H100", row=ModernRow)


BENCH = Bench(
    "published-experts",
    "Plans for the mixtures of experts of Singh's chapter 7 on Summit, and the published figures (needs no GPU).",
    PublishedExpertsSetting,
    plan_published,
    StepRow,
    title="",
    about=lambda setting: {"micro_batch": setting.micro_batch, "seq_len": SEQ_LEN},
)
