# SPDX-License-Identifier: Apache-2.0
"""`python -m lab weight-changes`: an engine on one grid follows a fine-tuning on another by patches, in bits (CPU).

A Llama of transformers with fp32 master weights is trained by AdamW, at learning rates of reinforcement learning, on a
text of bytes. After each step the engine applies the step's patch (`stretto.inference.WeightChanges`), and a second one
copies all weights from shard to shard, which rounds them to bf16. Every number of both is then compared bit for bit;
after the last step also with the trainer's own weights, gathered and rounded.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import nn

from lab.harness import Bench, column
from stretto.bench.harness import run_ranks
from stretto.bench.settings import Option
from stretto.inference import Engine, WeightChanges
from stretto.inference.weights import weights_of
from stretto.parallel import Grid, gather, parallelize

TEXT = Path(__file__).parents[2] / "LICENSE"
TRAINING: dict[str, Any] = {"x": 2, "z": 2}
SERVING: dict[str, Any] = {"x": 4}
BATCH, SEQ_LEN = 4, 64


@dataclass(frozen=True)
class WeightChangesSetting:
    """Settings of `python -m lab weight-changes`. Raises ValueError for settings that cannot work."""

    steps: Annotated[int, Option("Steps of each run.", least=1)] = 100
    rates: Annotated[tuple[float, ...], Option("Learning rates.")] = (1e-6, 1e-5)
    hidden: Annotated[int, Option("Hidden size, in heads of 32.", least=128)] = 256
    layers: Annotated[int, Option("Layers.", least=1)] = 2


@dataclass(frozen=True)
class Row:
    """A run: means over its steps; and the steps after which any weight of the engine's was not the trainer's."""

    lr: float = column("learning rate", "{:g}")
    steps: int = column("steps")
    different: int = column("steps with a different bit")
    changed: float = column("weights changed a step", "{:.1%}")
    patch: float = column("patch (MB)", "{:.3f}")
    whole: float = column("all weights (MB)", "{:.2f}")
    share: float = column("patch / all", "{:.1%}")
    make_ms: float = column("make a patch (ms)", "{:.1f}")
    send_ms: float = column("all-gather it (ms)", "{:.1f}")
    apply_ms: float = column("apply it (ms)", "{:.1f}")
    load_ms: float = column("copy all instead (ms)", "{:.1f}")


def follow_all(setting: WeightChangesSetting) -> Iterator[Row]:
    """Train once for each learning rate."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for lr in setting.rates:
        yield run_ranks(4, follow, setting, lr)


def follow(setting: WeightChangesSetting, lr: float) -> Row:
    """A rank's part of a run."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    grid = Grid(**TRAINING)
    model = parallelize(_make(setting), grid, dtype=torch.float32)
    engines = [
        Engine(parallelize(_make(setting).to(torch.bfloat16), Grid(**SERVING)), max_batch=1, cache_tokens=16)
        for _ in range(2)
    ]
    follower, copier = engines
    follower.load(model)
    copier.load(model)
    changes = WeightChanges(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(1)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    before = _bits(copier.model)
    different, changed, size = 0, 0.0, 0
    seconds = [0.0] * 4
    for _ in range(setting.steps):
        starts = torch.randint(len(text) - SEQ_LEN, (BATCH,), generator=draw).tolist()
        ids = torch.stack([text[start : start + SEQ_LEN] for start in starts])
        rows = ids.chunk(grid.size("batch"))[grid.coordinate("batch")]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        marks = [time.perf_counter()]
        patch = changes.make_patch()
        marks.append(time.perf_counter())
        patches: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(patches, patch)
        marks.append(time.perf_counter())
        follower.apply_patches(patches)
        marks.append(time.perf_counter())
        copier.load(model)
        marks.append(time.perf_counter())
        seconds = [total + after - first for total, first, after in zip(seconds, marks, marks[1:], strict=False)]
        now, patched = _bits(copier.model), _bits(follower.model)
        found = torch.tensor([int((now != before).sum()), len(now), int((now != patched).sum())])
        dist.all_reduce(found)
        changed += float(found[0] / found[1])
        different += bool(found[2])
        size += sum(map(len, patches))
        before = now
    different += not all(
        torch.equal(gather(parameter).to(torch.bfloat16), gather(dict(follower.model.named_parameters())[name]))
        for name, parameter in model.named_parameters()
    )
    steps, whole = setting.steps, 2 * numbers / 1e6
    make, send, apply, load = (1e3 * total / steps for total in seconds)
    mean = size / steps / 1e6
    return Row(lr, steps, different, changed / steps, mean, whole, mean / whole, make, send, apply, load)


def _make(setting: WeightChangesSetting) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = setting.hidden // 32
    shape = LlamaConfig(
        hidden_size=setting.hidden,
        num_hidden_layers=setting.layers,
        intermediate_size=setting.hidden * 8 // 3 // 32 * 32,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=256,
        max_position_embeddings=SEQ_LEN,
        pad_token_id=0,
    )
    return LlamaForCausalLM(shape)


def _bits(model: nn.Module) -> torch.Tensor:
    """All numbers that this rank holds, as integers."""
    shards = (weight.parts for weight in weights_of(model).values())
    return torch.cat([part.numbers.flatten().view(torch.int16) for parts in shards for part in parts])


BENCH = Bench(
    "weight-changes",
    "An engine follows a fine-tuning on another grid by patches: bits, sizes and times beside sending all (CPU).",
    WeightChangesSetting,
    follow_all,
    Row,
    title="Patches of a fine-tuning on x=2 z=2, applied to an engine on x=4",
    about=lambda setting: {"setting": vars(setting), "training": TRAINING, "serving": SERVING, "dtype": "bf16"},
)
