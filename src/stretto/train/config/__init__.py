# SPDX-License-Identifier: Apache-2.0
"""A run's configuration: read from TOML and `--set key=value`, checked, and written back.

config = load_config("run.toml", ["grid.x=2", "out=runs/mine"])
config = make_config({"out": "runs/mine", "model": {...}, "data": {...}, "train": {...}})
"""

from stretto.train.config.gpt import DataConfig, RunConfig, TrainConfig
from stretto.train.config.loading import (
    ConfigError,
    config_to_toml,
    job_from_json,
    load_config,
    make_config,
    on_grid,
    options_by_key,
)
from stretto.train.config.model import ModelConfig
from stretto.train.config.options import GridConfig, JobConfig

__all__ = [
    "ConfigError",
    "DataConfig",
    "GridConfig",
    "JobConfig",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "config_to_toml",
    "job_from_json",
    "load_config",
    "make_config",
    "on_grid",
    "options_by_key",
]
