# SPDX-License-Identifier: Apache-2.0
"""`python -m lab offload`: tokens/s and memory of a model with optimizer state on the host, on one GPU.

The same model is trained with state on the device, where that fits. The optimizer's time is compared with that of its
bytes over the host link, both directions together, which is measured first.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from lab.harness import Bench, Measured, column
from stretto.bench.harness import FAILURES, empty_memory, in_one_line, run_ranks, time_steps
from stretto.bench.settings import Needs, Option, Repeats, SeqLen
from stretto.cluster.probe import measure_host_link
from stretto.execution import StateOptions
from stretto.memory.failures import synchronize
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, no_sync, parallelize
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update

# The 7.24 billion parameters of a Llama-3-8B with Llama-2's vocabulary.
LLAMA_7B = GPTConfig(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32_000,
    max_seq_len=4096,
    positions="rotary",
    activation="swiglu",
    norm="rmsnorm",
    bias=False,
    tie_embeddings=False,
)


@dataclass(frozen=True)
class OffloadSetting:
    """Settings of `python -m lab offload`."""

    layers: Annotated[int, Option("Of the model that is trained, a Llama of width 4096.", least=1)] = 32
    seq_len: SeqLen = 4096
    micro_batch: Annotated[int, Option("Sequences of a micro-batch.", least=1)] = 2
    micro_batches: Annotated[tuple[int, ...], Option("How many a step has, with commas.")] = (1, 4, 16)
    repeats: Repeats = 2
    cpu: Annotated[bool, Option("Small sizes on the CPU: a try, no figure.")] = False

    def model(self) -> GPTConfig:
        if self.cpu:
            return replace(LLAMA_7B, layers=2, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=256, max_seq_len=64)
        return replace(LLAMA_7B, layers=self.layers, max_seq_len=self.seq_len)


GIB = 1 << 30
LEARNING_RATE = 1e-5
LONG = 32  # micro-batches of a step that is timed once


@dataclass(frozen=True)
class Row:
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


def measure_states(setting: OffloadSetting) -> Measured:
    """The job of the one rank: the link, then state on the host and on the device."""
    device = torch.device("cpu" if setting.cpu else "cuda")
    grid, duplex = Grid(device=device), 20e9  # of a CPU, which has no link: a try
    if not setting.cpu:
        link = measure_host_link(device, partial(time_steps, warm_up=2, repeats=7))
        duplex = link.duplex_bandwidth or duplex
    rows: list[dict[str, Any]] = []
    for name, options in (("host, split", StateOptions("host")), ("device", StateOptions("device"))):
        count = len(rows)
        try:
            for row in _train(setting, grid, options, duplex):
                rows.append({"name": name} | row)
        except FAILURES as error:
            failed = setting.micro_batches[len(rows) - count :]
            rows += [{"name": name, "micro_batches": each, "error": in_one_line(error)} for each in failed]
        empty_memory()
    return Measured(rows, {"duplex_bandwidth": duplex})


def _train(setting: OffloadSetting, grid: Grid, options: StateOptions, duplex: float) -> Iterator[dict[str, Any]]:
    """A row for each number of micro-batches."""
    device, config = grid.device, setting.model()
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


def _added_bytes(device: torch.device, run: Callable[[], Any]) -> int | None:
    """Bytes that `run` allocates at most in addition to those allocated before it; None on a CPU."""
    empty_memory()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    run()
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def _draw(setting: OffloadSetting, config: GPTConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    length = config.max_seq_len if setting.cpu else setting.seq_len
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab, (setting.micro_batch, length + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


BENCH = Bench(
    "offload",
    "Training with optimizer state on the host, compared with the host link and with state on the device.",
    OffloadSetting,
    lambda setting: run_ranks(1, measure_states, setting),
    Row,
    title="Optimizer state on the host",
    needs=Needs.ONE_GPU,
)
