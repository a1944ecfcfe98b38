# SPDX-License-Identifier: Apache-2.0
"""Has an Accelerator of Hugging Face's accelerate train a parallelized model."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stretto.axes import BATCH, axes_of
from stretto.parallel import Grid, clip_grad_norm_, no_sync


def follow_grid(accelerator: Any, model: nn.Module, grid: Grid) -> None:
    """Have an Accelerator feed, reduce and clip as the grid does, and leave the model unwrapped.

    Sets attributes of this one object. Ranks that share rows get the same ones from its data loaders, and what it
    gathers has them once.
    """
    from accelerate.data_loader import prepare_data_loader
    from accelerate.utils import recursively_apply

    ranks, gather_all = grid.size("world") // grid.size(BATCH), accelerator.gather

    def prepare_rows(loader: Any, *_: Any, **__: Any) -> Any:
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=grid.size(BATCH),
            process_index=grid.coordinate(BATCH),
            split_batches=accelerator.split_batches,
            put_on_device=accelerator.device_placement,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def gather_once_each(data: Any) -> Any:
        def drop_copies(tensor: Tensor) -> Tensor:
            parts = tensor.chunk(grid.size("world"))
            return torch.cat([parts[rank] for rank in grid.partition(axes_of(BATCH))[0]])

        return recursively_apply(drop_copies, gather_all(data))

    def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        accelerator.unscale_gradients()
        return clip_grad_norm_(list(parameters), max_norm, grid, norm_type=norm_type)

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError(
            "Accelerate's save_state and save_model would write one rank's shards, and load_state would read them on "
            "all: save get_state_dict(model, optimizer) by torch.distributed.checkpoint, or call save_pretrained "
            "within stretto.full_parameters(model)"
        )

    accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)  # without DDP around it
    accelerator.prepare_data_loader = prepare_rows
    accelerator.no_sync = lambda *_, **__: no_sync(model)
    accelerator.clip_grad_norm_ = clip
    accelerator.save_state = accelerator.load_state = accelerator.save_model = refuse
    if ranks > 1:
        accelerator.gather = gather_once_each
