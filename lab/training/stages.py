# SPDX-License-Identifier: Apache-2.0
"""`python -m lab stages`: the overhead of a pipeline: several virtual stages on one rank, compared with accumulation.

On one rank a pipeline has no bubbles and sends nothing, so the difference to plain accumulation of micro-batches is the
price of cutting the model's forward into stages, and of their backward passes, which autograd runs one by one.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from lab.harness import Bench, column
from lab.peers import build_torch_pipeline
from lab.training.models import LLAMA_7B
from stretto.bench.harness import TORCH_DTYPES, run_ranks
from stretto.bench.settings import Option, Repeats, Rounds, SeqLen, WarmUp
from stretto.bench.training.runs import Step, Stepped, TrainingRun, compile_blocks, measure, meta_gpt
from stretto.execution import StageOptions
from stretto.memory import allocated_bytes
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, Pipeline, gradient_norm, no_sync, parallelize
from stretto.schedules import Action, PipelineOperation, PipelineSchedule, build_schedule


@dataclass(frozen=True)
class StagesSetting:
    """Settings of `python -m lab stages`. Raises ValueError for settings that cannot work."""

    layers: Annotated[int, Option("Transformer blocks of a Llama of width 4096.", least=1)] = 16
    seq_len: SeqLen = 4096
    batch: Annotated[int, Option("Micro-batches of a step, of one sequence each.", least=1)] = 8
    virtual_stages: Annotated[int, Option("Stages on the rank.", least=2)] = 4
    dtype: Annotated[str, Option("Of the computation: bf16, or fp32.")] = "bf16"
    compiled: Annotated[bool, Option("Also with compiled blocks.")] = True
    small: Annotated[bool, Option("A model of width 64, for a try without a GPU.")] = False
    warm_up: WarmUp = 2
    repeats: Repeats = 5
    rounds: Rounds = 2

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp32"):
            raise ValueError(f"dtype is {self.dtype!r}, but must be bf16 or fp32")
        if self.layers % self.virtual_stages:
            near = max(1, round(self.layers / self.virtual_stages)) * self.virtual_stages
            raise ValueError(f"{self.virtual_stages} stages do not divide {self.layers} layers; {near} would do")

    def model(self) -> GPTConfig:
        """The model that is trained."""
        whole = replace(LLAMA_7B, layers=self.layers, max_seq_len=self.seq_len)
        return replace(whole, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256) if self.small else whole


@dataclass(frozen=True)
class Row:
    """A step in stages, by accumulation, or by torch's pipelining."""

    name: str = column("run")
    step_milliseconds: float = column("step (ms)", "{:.1f}")
    to_accumulation: float = column("speed to accumulation", "{:.3f}")
    host_milliseconds: float = column("host, a stage call (ms)", "{:.2f}")
    peak_memory_gib: float = column("peak memory (GiB)", "{:.2f}")
    growth_mib: float = column("growth over 10 steps (MiB)", "{:.1f}")


STEPS_FOR_GROWTH = 10


def _measure(setting: StagesSetting) -> list[dict[str, Any]]:
    grid = Grid()
    runs: list[TrainingRun] = []
    for is_compiled in (False, True) if setting.compiled else (False,):
        suffix = ", compiled" if is_compiled else ""
        add = partial(_add, runs, is_compiled)
        add(f"accumulation{suffix}", partial(_accumulate, setting, grid, is_compiled=is_compiled))
        for splits in (False, True):
            name = "interleaved 1F1B, W split" if splits else "interleaved 1F1B"
            build = partial(_pipeline, setting, grid, is_compiled=is_compiled, splits=splits)
            add(f"{name}{suffix}", build)
        of_weights = partial(_pipeline, setting, grid, is_compiled=is_compiled, splits=False, has_masters=False)
        add(f"interleaved 1F1B, weights in {setting.dtype}{suffix}", of_weights)
        of_torch = partial(_torch_pipeline, setting, grid, is_compiled=is_compiled)
        add(f"torch's pipelining, weights in {setting.dtype}{suffix}", of_torch, True)
    rows = measure(runs, setting, grid.device, extra=partial(_inspect, grid.device))
    base = {is_compiled: _milliseconds(rows, f"accumulation{', compiled' * is_compiled}") for is_compiled in (0, 1)}
    for row in rows:
        whole = base["compiled" in row["name"]]
        if "error" not in row and whole is not None:
            row["to_accumulation"] = whole / row["step_milliseconds"]
    return rows


def _add(
    runs: list[TrainingRun], is_compiled: bool, name: str, build: Callable[[], Step], is_peer: bool = False
) -> None:
    runs.append(TrainingRun(name, build, is_peer, is_compiled))


def _milliseconds(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    return next((row.get("step_milliseconds") for row in rows if row["name"] == name), None)


def _draw(setting: StagesSetting, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (setting.batch, setting.seq_len + 1)
    tokens = torch.randint(0, setting.model().vocab, shape, generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _build(
    setting: StagesSetting,
    grid: Grid,
    *,
    is_compiled: bool,
    stages: StageOptions | None = None,
    has_masters: bool = True,
) -> nn.Module:
    """has_masters: weights and their gradients are fp32, otherwise of the compute dtype."""
    dtype = TORCH_DTYPES[setting.dtype]
    plain = meta_gpt(setting.model())
    model = parallelize(plain if has_masters else plain.to(dtype), grid, dtype=dtype, stages=stages or StageOptions())
    if is_compiled:
        compile_blocks(model)
    return model


def _accumulate(setting: StagesSetting, grid: Grid, *, is_compiled: bool) -> Step:
    model = _build(setting, grid, is_compiled=is_compiled)
    tokens, targets = _draw(setting, grid.device)
    count = targets.numel()

    def step() -> Stepped:
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), device=grid.device)
        for number in range(setting.batch):
            rows = slice(number, number + 1)
            if number < setting.batch - 1:
                with no_sync(model):
                    total += _pass(model, tokens[rows], targets[rows], count)
            else:
                total += _pass(model, tokens[rows], targets[rows], count)
        return Stepped(total, gradient_norm(model.parameters(), grid))

    return step


def _pass(model: nn.Module, tokens: Tensor, targets: Tensor, count: int) -> Tensor:
    loss = model(tokens, targets, num_targets=count)
    loss.backward()
    return loss.detach()


class _StagedStep:
    """A step through a pipeline, and the host's seconds in its actions."""

    def __init__(self, pipeline: Pipeline, tokens: Tensor, targets: Tensor) -> None:
        self.pipeline, self.tokens, self.targets = pipeline, tokens, targets

    def __call__(self) -> Stepped:
        model = self.pipeline.model
        model.zero_grad(set_to_none=True)
        loss = self.pipeline.step(self.tokens, self.targets)
        return Stepped(loss, gradient_norm(model.parameters(), self.pipeline.grid))

    def host_milliseconds(self) -> float:
        """The median of the host's time for one action of the last step."""
        return statistics.median(action.end - action.start for action in self.pipeline.computed) * 1e3


def _pipeline(setting: StagesSetting, grid: Grid, *, is_compiled: bool, splits: bool, has_masters: bool = True) -> Step:
    stages = StageOptions(setting.virtual_stages)
    model = _build(setting, grid, is_compiled=is_compiled, stages=stages, has_masters=has_masters)
    schedule = build_schedule("interleaved", 1, setting.batch, setting.virtual_stages)
    pipeline = Pipeline(model, grid, schedule=split_backward(schedule) if splits else schedule, micro_batch_size=1)
    return _StagedStep(pipeline, *_draw(setting, grid.device))


def split_backward(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule with each B as I and then W."""
    ranks = []
    for actions in schedule.ranks:
        made: list[Action] = []
        for action in actions:
            if action.operation is PipelineOperation.BACKWARD:
                parts = (PipelineOperation.BACKWARD_INPUT, PipelineOperation.BACKWARD_WEIGHT)
                made += [Action(action.stage, part, action.micro_batch) for part in parts]
            else:
                made.append(action)
        ranks.append(tuple(made))
    return PipelineSchedule(f"{schedule.name}, split", schedule.stage_ranks, schedule.micro_batches, tuple(ranks))


def _torch_pipeline(setting: StagesSetting, grid: Grid, *, is_compiled: bool) -> Step:
    """torch's own stages and schedule, with weights in the compute dtype."""
    torch.manual_seed(0)
    with torch.device(grid.device):
        model = GPT(setting.model()).to(TORCH_DTYPES[setting.dtype])
    if is_compiled:
        compile_blocks(model)
    return build_torch_pipeline(model, setting.virtual_stages, *_draw(setting, grid.device))


def _inspect(device: torch.device, step: Step) -> dict[str, Any]:
    """Return how much the memory grows over some steps, and the host's time for a stage."""
    found: dict[str, Any] = {}
    sizes = []
    for _ in range(STEPS_FOR_GROWTH):
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_allocated(device) + allocated_bytes(device))
    if sizes:
        found["growth_mib"] = (sizes[-1] - sizes[0]) / 2**20
    if isinstance(step, _StagedStep):
        step()
        found["host_milliseconds"] = step.host_milliseconds()
    return found


BENCH = Bench(
    "stages",
    "Several pipeline stages on one rank, compared with gradient accumulation and torch's pipelining.",
    StagesSetting,
    lambda setting: run_ranks(1, _measure, setting),
    Row,
    title=lambda setting: f"{setting.virtual_stages} virtual stages on one rank",
)
