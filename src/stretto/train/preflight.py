# SPDX-License-Identifier: Apache-2.0
"""Checks a run before any process starts or memory is taken: folder, device, data, model on its grid, checkpoint.

What numpy and the planner are needed for is imported when the other options have been found good.
"""

from collections import deque

from stretto.train.config.dlrm import DLRMTrainConfig
from stretto.train.config.gpt import TrainConfig
from stretto.train.config.options import AnyConfig
from stretto.train.devices import resolve_device
from stretto.train.job import fit_started_ranks, resume_job
from stretto.train.observe.metrics import METRICS_FILE, has_history, read_steps, require_loggers
from stretto.train.path_checks import check_folder


def preflight(config: AnyConfig) -> AnyConfig:
    """Check that a run can start. Returns the configuration with `device` decided.

    In a rank that torchrun has started, this is on the grid for the actual number of ranks, and it resumes what the job
    has trained before (`launch.elastic`).

    Raises ValueError with the option, its value, the rule, and what would do.
    """
    whole = config
    config = resume_job(resolve_device(fit_started_ranks(config)))
    check_folder(config.out)
    require_loggers(config.train)
    match config:
        case TrainConfig():
            from stretto.train.gpt.preflight import check_gpt

            metadata = check_gpt(config)
        case DLRMTrainConfig():
            from stretto.train.dlrm.preflight import check_dlrm

            metadata = check_dlrm(config)
        case _:
            raise TypeError(f"there is nothing to train a {type(config).__name__} with")

    from stretto.train.smaller_grids import check_smaller_grids

    check_smaller_grids(whole.model_copy(update={"device": config.device}))
    if metadata is not None and has_history(config.out, metadata.step):
        deque(read_steps(config.out / METRICS_FILE), maxlen=0)  # raises for a line that cannot be kept
    return config
