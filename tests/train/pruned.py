# SPDX-License-Identifier: Apache-2.0
"""Pruned training beside dense training under the mask, on any grid: in a module, for a pool to import."""

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from tests.differences import largest
from torch import Tensor, nn

from stretto.execution import StateOptions
from stretto.models import GPT, GPTConfig
from stretto.optim.sparse import Masks, index
from stretto.optim.state.loss_scale import LossScaleOptions
from stretto.parallel import Grid, Pipeline, count_collectives, no_sync, parallelize
from stretto.parallel.layout import gather, layout_of, place_like
from stretto.train.pruning import prune
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update, sgd_update, tiled_update

SHAPE = {"layers": 2, "hidden": 32, "heads": 8, "vocab": 64, "max_seq_len": 8}
STEPS, ROWS = 3, 16


def make_optimizer(kind: str) -> Any:
    if kind == "adamw":
        return adamw_update(betas=(0.9, 0.95), eps=1e-8, tile=300)
    if kind == "tiled":
        return tiled_update(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), tile=300)
    return sgd_update(momentum=0.9)


def odd_masks(model: nn.Module) -> dict[str, Tensor]:
    """Of a GPT: one layer empty, one full, one with a single number, one whose first rows alone are left."""
    from stretto.parallel.pipeline.stages import whole_model

    found = {}
    shapes = {name: p.shape for name, p in whole_model(model).named_parameters() if "blocks" in name and p.dim() == 2}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        mask = torch.zeros(shape, dtype=torch.bool)
        match number % 4:
            case 1:
                mask[:] = True
            case 2:
                mask[-1, 3] = True
            case 3:
                mask[: shape[0] // 4 + 1] = True
        found[name] = mask
    return found


def train_both(sizes: dict[str, int], case: dict[str, Any]) -> dict[str, Any]:
    """Differences between the pruned and the dense run: of weights, of state, of losses and norms; and what is kept."""
    grid = Grid(**sizes, device="cpu")
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    options = StateOptions(
        case.get("location", "device"), bucket_size=512, coarsening=2, step_on=case.get("step_on", "device"),
        index=case.get("index", "bitmap"), splits_weights=case.get("splits", True),
        accumulates_fp32=case.get("accumulates_fp32", False),
    )  # fmt: skip
    results = []
    for is_pruned in (False, True):
        torch.manual_seed(0)
        model = parallelize(
            GPT(GPTConfig(**SHAPE | {"layers": max(SHAPE["layers"], grid.size("pipe"))})),
            grid,
            dtype=dtype,
            recompute=case.get("recompute", "none"),
            **case.get("parallel", {}),
        )
        masks = prune(model, None, odd_masks(model)) if case.get("odd") else prune(model, case.get("sparsity", 0.75))
        assert masks is not None
        stored = StoredOptimizer(
            model, grid, make_optimizer(case.get("optimizer", "adamw")), name="any", weight_decay=0.1,
            clip=case.get("clip"), dtype=dtype, options=options, masks=masks if is_pruned else None,
            loss_scale=LossScaleOptions(2.0**19) if dtype == torch.float16 else None,
        )  # fmt: skip
        results.append(_train(model, stored, masks, grid, is_pruned, case))
    (dense, numbers), (pruned, others) = results
    differences = {key: float((dense[key].double() - pruned[key].double()).abs().max()) for key in dense}
    differences["losses"] = largest(abs(a - b) for a, b in zip(numbers["losses"], others["losses"], strict=True))
    return {"differences": differences, "dense": numbers, "pruned": others}


def _train(
    model: nn.Module, stored: StoredOptimizer, masks: Masks, grid: Grid, is_pruned: bool, case: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    losses = []
    pipeline = Pipeline(model, grid, micro_batch_size=ROWS // grid.size("batch") // 2)
    for _ in range(STEPS):
        tokens = torch.randint(64, (ROWS, 8), generator=generator)
        mine = tokens.chunk(grid.size("batch"))[grid.coordinate("batch")]
        if grid.size("pipe") > 1:
            losses.append(float(pipeline.step(mine, mine, scale_loss=stored.scale_loss)))
        else:
            losses.append(0.0)
            for number, part in enumerate(mine.chunk(2)):
                with nullcontext() if number == 1 else no_sync(model):
                    loss = model(part, part, tokens.numel())
                    stored.scale_loss(loss).backward()
                losses[-1] += float(loss.detach())
        if not is_pruned:
            _mask_gradients(stored, masks)
        stored.step(1e-2)
    found = {}
    for name, parameter in stored.parameters.items():
        layout = layout_of(parameter)
        found[name] = gather(place_like(stored.weight(name).clone(), parameter), layout)
        shard = parameter.to_local().float()
        found[f"{name} computed with"] = gather(place_like(shard, parameter), layout)
        for key in stored.store.update.slots:
            found[f"{name}.{key}"] = gather(place_like(stored.read_later(name, key)().clone(), parameter), layout)
    store = stored.store
    left = sum(int(mask.unpacked().sum()) for mask in masks.masks.values())
    return found, {"losses": losses, "numbers": store.layout.size, "left": left, "gradients": store.gradients.numel()}


def _mask_gradients(stored: StoredOptimizer, masks: Masks) -> None:
    """Zero the gradients of what is pruned, once they are summed over ranks."""
    store = stored.store
    for reduction in store._step.started.values():
        reduction.wait()
    for number, name in enumerate(stored.parameters):
        if name in masks.masks:
            place = store.layout.places[number]
            is_pruned = ~masks.masks[name].unpacked().flatten()
            store.gradients[place.start : place.stop].masked_fill_(is_pruned, 0)


class Bank(nn.Module):
    """Linears of several shapes, one of a single number; their gradients are integers where inputs are."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((1, 1), (7, 5), (16, 8), (3, 40))
        self.layers = nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in shapes)

    def forward(self, rows: Tensor) -> Tensor:
        total = rows.new_zeros(())
        for layer in self.layers:
            out = layer(rows[:, : layer.in_features].to(layer.weight.dtype))
            total = total + (out * torch.arange(1, layer.out_features + 1)).float().sum()
        return total


def train_bank(sizes: dict[str, int]) -> dict[str, Any]:
    """A model without roles whose gradients are integers, on any ranks: pruned beside dense, and bytes sent over z."""
    grid = Grid(**sizes, device="cpu")
    results, sent = [], []
    for is_pruned in (False, True):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = parallelize(Bank(), grid, dtype=torch.bfloat16, blocks=["layers.*"])
        drawn = torch.Generator().manual_seed(3)
        shapes = {f"layers.{number}.weight": layer for number, layer in enumerate(((1, 1), (7, 5), (16, 8), (3, 40)))}
        given = {name: torch.rand(shape, generator=drawn) < 0.4 for name, shape in shapes.items()}
        given["layers.2.weight"][4:] = False  # what is left of it is on z's first rank alone
        masks = prune(model, None, given)
        assert masks is not None
        make = sgd_update(momentum=0.5)
        stored = StoredOptimizer(
            model, grid, make, name="sgd", options=StateOptions("device", bucket_size=64),
            masks=masks if is_pruned else None,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        for step in range(2):
            rows = torch.randint(-2, 3, (16, 40), generator=generator).float()
            with count_collectives(grid) as counts:
                model(rows.chunk(grid.size("batch"))[grid.coordinate("batch")]).backward()
            if step == 1:
                sent.append(counts.bytes_by_axis())
            if not is_pruned:
                _mask_gradients(stored, masks)
            stored.step(0.25)
        found = {}
        for name, parameter in stored.parameters.items():
            for key in (None, "momentum_buffer"):
                tensor = stored.read_later(name, key)().clone()
                found[f"{name}.{key}"] = gather(place_like(tensor, parameter), layout_of(parameter))
            shard = parameter.to_local().float()
            found[f"{name} computed with"] = gather(place_like(shard, parameter), layout_of(parameter))
        results.append(found)
        numbers = stored.store.layout.places
    equal = all(torch.equal(results[0][key], results[1][key]) for key in results[0])
    return {"equal": equal, "sent": sent, "shares": [place.size for place in numbers], "changed": len(results[0])}


def train_bank_by_kernels(sizes: dict[str, int]) -> dict[str, Any]:
    """`train_bank` with the interpreted kernels."""
    with mock.patch.object(index, "runs_kernels", return_value=True):
        return train_bank(sizes)


def count_launches() -> list[int]:
    """Launches after the backward passes of two micro-batches, the first under `no_sync`; none is run."""
    from stretto.optim.sparse import kernels

    launched: list[Any] = []
    with (
        mock.patch.object(index, "runs_kernels", return_value=True),
        mock.patch.object(kernels, "launch_cached", lambda kernel, *_, **__: launched.append(kernel)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        model = parallelize(Bank(), Grid(device="cpu"), dtype=torch.bfloat16, blocks=["layers.*"])
        masks = prune(model, 0.5)
        StoredOptimizer(
            model, Grid(device="cpu"), sgd_update(), name="sgd", options=StateOptions("device"), masks=masks
        )
        launched.clear()
        counts = []
        for is_last in (False, True):
            with nullcontext() if is_last else no_sync(model):
                model(torch.ones(2, 40)).backward()
            counts.append(len(launched))
    return counts


class Convolutions(nn.Sequential):
    """Of images: a plain convolution, one in groups, one of depth alone, and a linear; returns its loss."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.ReLU(), nn.Conv2d(8, 12, 3, padding=1, groups=2), nn.ReLU(),
            nn.Conv2d(12, 12, 3, groups=12), nn.Flatten(), nn.Linear(12, 5),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.to(self[0].weight.dtype)).float().square().sum()


def train_convolutions(sizes: dict[str, int]) -> dict[str, Any]:
    """Largest differences between the pruned and the dense run, and what is left of each weight."""
    grid, results, left = Grid(**sizes, device="cpu"), [], {}
    for is_pruned in (False, True):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = parallelize(Convolutions().to(memory_format=torch.channels_last), grid, dtype=torch.bfloat16)
        masks = prune(model, 0.75)
        assert masks is not None
        stored = StoredOptimizer(
            model, grid, adamw_update(betas=(0.9, 0.95), eps=1e-8), name="adamw", weight_decay=0.1,
            options=StateOptions("device", bucket_size=128), masks=masks if is_pruned else None,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            images = torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
            model(images.chunk(grid.size("batch"))[grid.coordinate("batch")]).backward()
            if not is_pruned:
                _mask_gradients(stored, masks)
            stored.step(1e-2)
        found = {}
        for name, parameter in stored.parameters.items():
            for key in (None, "exp_avg"):
                tensor = stored.read_later(name, key)().clone()
                found[f"{name}.{key}"] = gather(place_like(tensor, parameter), layout_of(parameter))
            if name in masks.masks:
                left[name] = int((found[f"{name}.None"] != 0).sum()) / found[f"{name}.None"].numel()
        results.append(found)
    differences = {key: float((results[0][key] - results[1][key]).abs().max()) for key in results[0]}
    return {"differences": differences, "left": left}
