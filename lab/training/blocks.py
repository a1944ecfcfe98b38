# SPDX-License-Identifier: Apache-2.0
"""`python -m lab blocks`: models without roles, sharded block by block, compared with torch's FSDP2 of the same blocks.

Both train the same model from the same weights on the same samples, with torch's fused AdamW, bf16 compute and
gradients reduced in fp32, once with blocks that are freed after their forward pass and once with blocks that are kept.
Ranks may share one GPU (STRETTO_SHARE_GPUS=1): then all collectives of both are staged on the host.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from lab.harness import Bench, column
from stretto.bench.harness import run_ranks, shared_where_few
from stretto.bench.settings import Needs, Option, Repeats, Rounds, WarmUp, require_known
from stretto.bench.training.fsdp2 import clip_sharded_grad_norm_
from stretto.bench.training.runs import MAX_NORM, Step, Stepped, TrainingRun, measure
from stretto.cluster.detection import count_gpus
from stretto.execution import ReshardPolicy
from stretto.parallel import Grid, clip_grad_norm_, parallelize
from stretto.parallel.blocks import find_blocks

BLOCK_MODELS = ("translator", "vision-transformer", "u-net")


@dataclass(frozen=True)
class BlocksSetting:
    """Settings of `python -m lab blocks`. Raises ValueError for settings that cannot work."""

    models: Annotated[tuple[str, ...], Option("translator, vision-transformer, u-net, with commas.")] = BLOCK_MODELS
    ranks: Annotated[
        int | None, Option("Processes (default: the machine's GPUs); more than GPUs share these.", least=1)
    ] = None
    layers: Annotated[
        int | None,
        Option("Of an encoder or decoder, a third of a vision transformer's, blocks of a U-Net's level.", least=1),
    ] = None
    samples: Annotated[int | None, Option("Samples a rank (default: 8 pairs of sentences, 16 images).", least=1)] = None
    warm_up: WarmUp = 3
    repeats: Repeats = 5
    rounds: Rounds = 3

    def __post_init__(self) -> None:
        require_known("model", self.models, BLOCK_MODELS)


def run_blocks(setting: BlocksSetting) -> Iterator[dict[str, Any]]:
    """Measure each model. Raises ValueError where ranks share a GPU and there is no MPS."""
    assert setting.ranks is not None
    with shared_where_few(setting.ranks):
        for name in setting.models:
            found = run_ranks(setting.ranks, measure_model, setting, name, setting.ranks, not count_gpus())
            yield from ({"model": name} | row for row in _compare(found))


@dataclass(frozen=True)
class Row:
    """A model's step by Stretto or FSDP2."""

    model: str = column("model")
    name: str = column("run")
    step_milliseconds: float = column("step (ms)", "{:.1f}")
    time_ratio: float = column("ratio to FSDP2", "{:.3f}")
    peak_memory_gib: float = column("peak memory (GiB)", "{:.2f}")
    memory_ratio: float = column("ratio to FSDP2", "{:.3f}")
    loss: float = column("first loss", "{:.5f}")
    gradient_norm: float = column("gradient norm", "{:.4f}")
    last_loss: float = column("last loss", "{:.5f}")


class Translator(nn.Module):
    """Sequence to sequence: torch's own encoder and decoder layers, with an embedding for both."""

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        encoder = nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, 0.0, batch_first=True, norm_first=True)
        decoder = nn.TransformerDecoderLayer(width, width // 64 or 1, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(encoder, layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, layers)
        self.head = nn.Linear(width, vocab)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss of predicting each next token of target [batch, length] from source [batch, length]."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, target.device)
        memory = self.encoder(self.embed(source))
        logits = self.head(self.decoder(self.embed(target[:, :-1]), memory, mask.to(memory.dtype), tgt_is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())


class VisionTransformer(nn.Module):
    """Images to classes: patches, torch's encoder layers, the mean of all tokens."""

    def __init__(self, width: int, layers: int, classes: int, patch: int, patches: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(patches, width))
        layer = nn.TransformerEncoderLayer(width, width // 64 or 1, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """The loss of images [batch, 3, height, width]."""
        x = self.encoder(self.patches(images).flatten(2).mT + self.positions)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), classes)


class _Convolutions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (nn.GroupNorm(min(32, width), width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class UNet(nn.Module):
    """An image denoiser: a down-sampling and an up-sampling path of convolution blocks, with skip connections."""

    def __init__(self, width: int, levels: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(nn.Sequential(*(_Convolutions(each) for _ in range(depth))) for each in widths)
        self.up = nn.ModuleList(nn.Sequential(*(_Convolutions(each) for _ in range(depth))) for each in widths[-2::-1])
        pairs = list(itertools.pairwise(widths))
        self.shrink = nn.ModuleList(nn.Conv2d(less, more, 2, 2) for less, more in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(more, less, 2, 2) for less, more in pairs[::-1])

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """The loss of finding `noise` in images + noise, both [batch, 3, height, width]."""
        x, skips = self.enter(images + noise), []
        for blocks, shrink in zip(self.down, self.shrink, strict=False):
            x = blocks(x)
            skips.append(x)
            x = shrink(x)
        x = self.down[-1](x)
        for blocks, grow in zip(self.up, self.grow, strict=True):
            x = blocks(grow(x) + skips.pop())
        return F.mse_loss(self.leave(x).float(), noise.float())


@dataclass(frozen=True)
class _Workload:
    """A model, the inputs of a rank, and how it is timed."""

    make: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    batch: int
    warm_up: int
    repeats: int
    rounds: int
    seq_len: int = 1  # tokens/s are samples/s


def _models(
    is_small: bool, given_layers: int | None
) -> dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], int]]:
    """By name: the functions that make the model and draw `count` samples, and the samples a rank."""
    width, layers, vocab, length = (64, 2, 128, 8) if is_small else (1024, 8, 32_000, 512)
    layers = layers if given_layers is None else given_layers
    patch, side = (4, 8) if is_small else (14, 224)
    channels, levels, depth, pixels = (8, 2, 1, 8) if is_small else (128, 4, 3, 64)
    patches = (side // patch) ** 2

    def sentences(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(torch.randint(vocab, (count, length), generator=generator) for _ in range(2))

    def images(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        classes = torch.randint(10, (count,), generator=generator)
        return torch.randn(count, 3, side, side, generator=generator), classes

    def noise(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(torch.randn(count, 3, pixels, pixels, generator=generator) for _ in range(2))

    made: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], int]] = {
        "translator": (partial(Translator, width, layers, vocab), sentences, 2 if is_small else 8),
        "vision-transformer": (
            partial(VisionTransformer, width, 3 * layers, 10, patch, patches), images, 2 if is_small else 16,
        ),
        "u-net": (partial(UNet, channels, levels, given_layers or depth), noise, 2 if is_small else 16),
    }  # fmt: skip
    assert tuple(made) == BLOCK_MODELS
    return made


def _compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the ratios of Stretto's rows to FSDP2's."""
    peers = {row["name"].removeprefix("FSDP2"): row for row in rows if row["is_peer"]}
    for row in rows:
        peer = peers.get(row["name"].removeprefix("Stretto"), {})
        if not row["is_peer"] and "seconds" in row and "seconds" in peer:
            row["time_ratio"] = row["step_milliseconds"] / peer["step_milliseconds"]
            if row["peak_memory_gib"]:
                row["memory_ratio"] = row["peak_memory_gib"] / peer["peak_memory_gib"]
    return rows


def measure_model(setting: BlocksSetting, name: str, ranks: int, is_small: bool) -> list[dict[str, Any]]:
    world = Grid(z=ranks)
    make, draw, samples = _models(is_small, setting.layers)[name]
    samples = samples if setting.samples is None else setting.samples
    workload = _Workload(make, draw, samples * world.size("z"), setting.warm_up, setting.repeats, setting.rounds)
    mesh = init_device_mesh(world.device.type, (world.size("z"),))
    runs = []
    for frees in (True, False):
        label = "" if frees else ", weights kept"
        runs.append(TrainingRun(f"FSDP2{label}", partial(_build_fsdp2, workload, world, mesh, frees), is_peer=True))
        runs.append(TrainingRun(f"Stretto{label}", partial(_build_stretto, workload, world, frees)))
    return measure(runs, workload, world.device)


def _make(workload: _Workload, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return workload.make()


def _inputs(workload: _Workload, grid: Grid) -> list[Tensor]:
    whole = workload.draw(workload.batch, torch.Generator().manual_seed(0))
    return [each.chunk(grid.size("z"))[grid.coordinate("z")].to(grid.device) for each in whole]


def _build_fsdp2(workload: _Workload, grid: Grid, mesh: DeviceMesh, frees: bool) -> Step:
    model = _make(workload, grid.device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in find_blocks(model):
        fully_shard(model.get_submodule(block), mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return _step(workload, grid, model, partial(clip_sharded_grad_norm_, model, MAX_NORM))


def _build_stretto(workload: _Workload, grid: Grid, frees: bool) -> Step:
    dtypes: Mapping[str, Any] = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    policy: ReshardPolicy = "after_forward" if frees else "after_backward"
    model = parallelize(_make(workload, grid.device), grid, reshard=policy, **dtypes)
    return _step(workload, grid, model, lambda: clip_grad_norm_(model.parameters(), MAX_NORM, grid))


def _step(workload: _Workload, grid: Grid, model: nn.Module, clip: Callable[[], Tensor]) -> Step:
    inputs = _inputs(workload, grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Stepped:
        loss = model(*inputs)
        loss.backward()
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        return Stepped(loss.detach(), norm)

    return step


BENCH = Bench(
    "blocks",
    "Models without roles, sharded block by block, compared with torch's FSDP2 on the same blocks.",
    BlocksSetting,
    run_blocks,
    Row,
    title=lambda setting: f"Models without roles on {setting.ranks} ranks",
    needs=Needs.RANKS,
    about=lambda setting: {"ranks": setting.ranks, "gpus": count_gpus()},
)
