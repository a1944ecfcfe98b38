# SPDX-License-Identifier: Apache-2.0
"""Training of families of transformers with optimizer state apart: in a module, for a pool to import."""

import warnings

import torch
from tests.parallel import zoo

from stretto.execution import StateOptions
from stretto.optim import AdamW
from stretto.parallel import Grid, clip_grad_norm_, parallelize
from stretto.train.optimizer import ShardOptimizer
from stretto.train.stored_optimizer import StoredOptimizer, adamw_update


def losses_of_family(family: str, task: str, sizes: dict[str, int]) -> dict[str, list[float]]:
    """Five steps in fp32 with state beside the parameters, on the device and on the host; clipped."""
    found = {}
    for location in ("fp32", "device", "host"):
        grid = Grid(**sizes, device="cpu")
        model = zoo.build(family, task)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = parallelize(model, grid)
        batch = zoo.make_batch(task)
        part, parts = grid.coordinate("batch"), grid.size("batch")
        mine = {name: value.chunk(parts)[part] for name, value in batch.items()}
        options = None if location == "fp32" else StateOptions(location, bucket_size=4096)  # type: ignore[arg-type]
        if options is None:
            beside = ShardOptimizer(model, lambda groups: AdamW(groups, lr=1e-3), weight_decay=0.01)
        else:
            make = adamw_update(betas=(0.9, 0.999), eps=1e-8)
            apart = StoredOptimizer(
                model, grid, make, name="adamw", weight_decay=0.01, clip=1.0, dtype=torch.float32, options=options
            )
        losses = []
        for _ in range(5):
            loss = model(**mine).loss
            loss.backward()
            losses.append(float(loss.detach()))
            if options is None:
                clip_grad_norm_(model.parameters(), 1.0, grid)
                beside.step(1e-3)
            else:
                apart.step(1e-3)
        found[location] = losses
    return found
