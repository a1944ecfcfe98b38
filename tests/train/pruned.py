# SPDX-License-Identifier: Apache-2.0
"""Pruned training beside dense training under the mask, on any grid: in a module, for a pool to import."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from stretto.execution import StateOptions
from stretto.models import GPT, GPTConfig
from stretto.optim.sparse import Masks
from stretto.parallel import Grid, no_sync, parallelize
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
            GPT(GPTConfig(**SHAPE)),
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
        )  # fmt: skip
        results.append(_train(model, stored, masks, grid, is_pruned, case))
    (dense, numbers), (pruned, others) = results
    differences = {key: float((dense[key].double() - pruned[key].double()).abs().max()) for key in dense}
    differences["losses"] = max(abs(a - b) for a, b in zip(numbers["losses"], others["losses"], strict=True))
    return {"differences": differences, "dense": numbers, "pruned": others}


def _train(
    model: nn.Module, stored: StoredOptimizer, masks: Masks, grid: Grid, is_pruned: bool, case: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(64, (ROWS, 8), generator=generator)
        mine = tokens.chunk(grid.size("batch"))[grid.coordinate("batch")]
        total = 0.0
        for number, part in enumerate(mine.chunk(2)):
            with nullcontext() if number == 1 else no_sync(model):
                loss = model(part, part, tokens.numel())
                loss.backward()
            total += float(loss.detach())
        losses.append(total)
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
            store.gradients[place.start : place.stop] *= masks.masks[name].unpacked().flatten()
