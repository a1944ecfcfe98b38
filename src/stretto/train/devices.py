# SPDX-License-Identifier: Apache-2.0
"""Selects the devices of a run's ranks before any is started, without torch if there is no GPU."""

from stretto.cluster.detection import count_gpus
from stretto.cluster.local_ranks import count_ranks_here
from stretto.train.config.options import AnyConfig


def resolve_device(config: AnyConfig) -> AnyConfig:
    """Replace device "auto" by "cuda", if there is a GPU for each rank of this machine, or else by "cpu".

    Where a launcher does not set the number of ranks on this machine, one GPU is enough: `Grid` counts them later, and
    raises if there are too few. Raises ValueError if "cuda" was asked for and there are too few GPUs, and for options
    that need a GPU on a CPU.
    """
    ranks_here = count_ranks_here(config.ranks)
    gpus = count_gpus()
    if gpus:
        from stretto.memory import shared_gpus  # imports torch, as counting GPUs has

        if shared_gpus.is_enabled():
            gpus = max(gpus, ranks_here)  # any number of ranks may share the GPUs
    if config.device == "cuda" and gpus < ranks_here:
        remedy = f"ranks={gpus} or device='cpu'" if gpus else "device='cpu'"
        raise ValueError(
            f"device is 'cuda', which needs a GPU for each of {ranks_here} ranks, but there are {gpus}; "
            f"{remedy} would do"
        )
    device = config.device if config.device != "auto" else "cuda" if gpus >= ranks_here else "cpu"
    if device != "cuda":
        for name in ("cuda_graph", "writes_copies"):
            if getattr(config.train, name, False):
                raise ValueError(f"train.{name} is on, but this run's device is the CPU; train.{name}=false would do")
    return config.model_copy(update={"device": device})
