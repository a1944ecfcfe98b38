"""Training throughput of a GPT on every grid of the machine's ranks, beside torch's FSDP2 of the same model.

Same model, same global batch, same optimizer (fused AdamW, fp32 parameters, bf16 compute). FSDP2 reduces gradients in
fp32, its usual setting; Stretto's travel in bf16 unless --reduce-fp32. All runs share one job; rounds interleave them.
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stretto.bench.harness import Column, print_table, run_ranks, time_steps, write_result
from stretto.bench.plots import plot_train
from stretto.models import GPT, GPTConfig
from stretto.parallel import AXES, Grid, checkpoint_activations, clip_grad_norm_, parallelize

COLUMNS = (
    Column("name", "run"),
    Column("tokens_per_second_per_gpu", "tokens/s/GPU", "{:,.0f}"),
    Column("mfu", "MFU", "{:.1%}"),
    Column("step_milliseconds", "step (ms)", "{:.0f}"),
    Column("peak_memory_gib", "peak memory (GiB)", "{:.1f}"),
    Column("loss", "loss", "{:.4f}"),
    Column("error", "error", "{}"),
)


@dataclass(frozen=True)
class Workload:
    """What is trained: the model, the global batch in sequences, and how it is timed."""

    model: GPTConfig
    batch: int
    seq_len: int
    warm_up: int
    repeats: int
    rounds: int
    checkpointing: bool
    reduce_fp32: bool
    learning_rate: float = 1e-4

    def flops(self) -> float:
        """Model FLOPs of a step, by Narayanan et al.'s formula: 72 B s l h^2 (1 + s / 6h + V / 12lh).

        Matrix products of forward and backward pass, attention counted whole (not halved for causality), nothing for
        recomputation. The formula has ffn = 4h and as many KV heads as heads, as Table 5.1's models have.
        """
        b, s, layers, h, v = self.batch, self.seq_len, self.model.layers, self.model.hidden, self.model.vocab
        return 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))


def grids_of(ranks: int) -> list[dict[str, int]]:
    """Every factorization of `ranks` into data, x, y and z."""
    sizes = range(1, ranks + 1)
    return [dict(zip(AXES, f, strict=True)) for f in itertools.product(sizes, repeat=4) if prod(f) == ranks]


def bench_train(
    workload: Workload, ranks: int, out: Path, peak_flops: float | None, with_peers: bool
) -> list[dict[str, Any]]:
    """Measure, print the table, and write train.json and train.png to `out`."""
    rows = run_ranks(ranks, _measure_all, workload, ranks, peak_flops, with_peers)
    columns = COLUMNS if any("error" in row for row in rows) else COLUMNS[:-1]
    rows.sort(key=lambda row: -row.get("tokens_per_second_per_gpu", 0.0))
    print_table(f"{workload.model.layers} layers of hidden {workload.model.hidden}, {ranks} ranks", columns, rows)
    formula = "72 B s l h^2 (1 + s/6h + V/12lh) / (step x GPUs x peak)"
    path = write_result(
        out, "train", columns, rows, workload=asdict(workload), mfu_formula=formula, peak_flops=peak_flops
    )
    plot_train(path, path.with_suffix(".png"))
    return rows


def _measure_all(workload: Workload, ranks: int, peak_flops: float | None, with_peers: bool) -> list[dict[str, Any]]:
    grid = Grid(data=ranks)  # joins the job, so that peers and grids share its process group
    runs: dict[str, Callable[[], Any]] = {}
    if with_peers:
        runs["FSDP2"] = partial(_fsdp2, workload, grid, is_compiled=False, frees=True)
        runs["FSDP2, compiled"] = partial(_fsdp2, workload, grid, is_compiled=True, frees=True)
        runs["FSDP2, compiled, weights kept"] = partial(_fsdp2, workload, grid, is_compiled=True, frees=False)
    for sizes in grids_of(ranks):
        name = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one rank"
        runs[name] = partial(_stretto, workload, sizes)
    rows: dict[str, dict[str, Any]] = {name: {"name": name, "seconds": []} for name in runs}
    for _, (name, build) in itertools.product(range(workload.rounds), runs.items()):
        row = rows[name]
        if "error" in row:
            continue
        try:
            with _memory_of_one_run():
                step = build()
                loss = step()
                row["seconds"].append(time_steps(step, warm_up=workload.warm_up, repeats=workload.repeats))
                row["loss"] = float(loss)
                row["peak_memory_gib"] = _peak_memory(grid) / 2**30
                del step
        except (ValueError, torch.OutOfMemoryError) as error:
            row["error"] = str(error).splitlines()[0][:100]
            continue
        seconds = min(row["seconds"])
        row["step_milliseconds"] = seconds * 1e3
        row["tokens_per_second_per_gpu"] = workload.batch * workload.seq_len / seconds / ranks
        row["mfu"] = workload.flops() / seconds / ranks / peak_flops if peak_flops else None
        if dist.get_rank() == 0:
            print(f"{name}: {row['tokens_per_second_per_gpu']:,.0f} tokens/s/GPU", flush=True)
    dist.destroy_process_group()
    return list(rows.values())


@contextmanager
def _memory_of_one_run() -> Iterator[None]:
    """Start from an empty allocator, and leave one."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _peak_memory(grid: Grid) -> int:
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    highest = torch.tensor(peak, dtype=torch.int64, device=grid.device)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return int(highest)


def _batch(workload: Workload, part: int, parts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's rows of one fixed random batch."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, workload.model.vocab, (workload.batch, workload.seq_len + 1), generator=generator)
    if workload.batch % parts:
        raise ValueError(f"{parts} shards do not divide a batch of {workload.batch}")
    rows = tokens.chunk(parts)[part].to(device)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _optimizer(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=True)


def _meta_gpt(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _stretto(workload: Workload, sizes: dict[str, int]) -> Callable[[], Tensor]:
    grid = Grid(sizes["data"], sizes["x"], sizes["y"], sizes["z"])
    tokens, targets = _batch(workload, grid.coordinate("batch"), grid.size("batch"), grid.device)
    reduce_dtype = torch.float32 if workload.reduce_fp32 else None
    model = parallelize(_meta_gpt(workload.model), grid, dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    if workload.checkpointing:
        checkpoint_activations(model)
    optimizer = _optimizer(model, workload)

    def step() -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0, grid)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _fsdp2(workload: Workload, grid: Grid, is_compiled: bool, frees: bool) -> Callable[[], Tensor]:
    ranks = grid.size("world")
    tokens, targets = _batch(workload, grid.coordinate("world"), ranks, grid.device)
    model = _meta_gpt(workload.model)
    if workload.checkpointing:
        checkpoint_activations(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if is_compiled:
            block.compile()
        fully_shard(block, mp_policy=policy, reshard_after_forward=frees)
    fully_shard(model, mp_policy=policy, reshard_after_forward=frees)
    model.to_empty(device=grid.device)
    torch.manual_seed(0)
    with torch.no_grad():
        model.apply(model._init_weights)
    optimizer = _optimizer(model, workload)

    def step() -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
