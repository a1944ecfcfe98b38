# SPDX-License-Identifier: Apache-2.0
"""Checks a run before any process starts or memory is taken: folder, device, data, model on its grid, checkpoint.

What numpy and the planner are needed for is imported when the other options have been found good.
"""

from collections import deque

from stretto.train.config.options import AnyConfig
from stretto.train.devices import resolve_device
from stretto.train.job import fit_started_ranks, resume_job
from stretto.train.kinds import kind_of
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
    metadata = kind_of(config).check(config)

    from stretto.train.smaller_grids import check_smaller_grids

    check_smaller_grids(whole.model_copy(update={"device": config.device}))
    if metadata is not None and has_history(config.out, metadata.step):
        deque(read_steps(config.out / METRICS_FILE), maxlen=0)  # raises for a line that cannot be kept
    return config
