# SPDX-License-Identifier: Apache-2.0
"""Checks a DLRM's run before any process starts: data, implementation, memory, checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from stretto.cluster.host_memory import check_room
from stretto.recommendation import DLRMConfig
from stretto.recommendation.data import ClickDataset, CriteoClicks, SyntheticClicks
from stretto.recommendation.data.criteo import NUMBERS
from stretto.recommendation.table_planner import STATE_SIZES
from stretto.recommendation.training.config import DLRMTrainConfig, describe
from stretto.train.checkpoint import find_checkpoint
from stretto.train.checkpoint.metadata import CheckpointMetadata, differences, read_metadata
from stretto.train.path_checks import check_outside_data

DTYPES = {"fp32": "float32", "fp64": "float64"}  # torch's names, by train.dtype
_ITEMSIZE = {"fp32": 4, "fp64": 8}  # bytes of a number, by train.dtype


@dataclass(frozen=True)
class ClickData:
    """A run's data: it trains on the first `samples` of `training`, and evaluates on a range of `evaluation`."""

    training: ClickDataset
    samples: int
    evaluation: ClickDataset
    evaluation_start: int
    evaluation_samples: int


def check_dlrm(config: DLRMTrainConfig) -> CheckpointMetadata | None:
    """Check what only DLRMs have. Returns the index of the checkpoint to resume, if any. Raises ValueError."""
    for paths in (config.data.path, config.data.evaluation_path):
        check_outside_data(config.out, paths or [])
    model = config.model.to_dlrm()
    open_clicks(config)
    check_memory(config)
    checkpoint = find_checkpoint(config.out, config.train.resume)
    metadata = None if checkpoint is None else check_dlrm_checkpoint(checkpoint, config)

    import torch

    from stretto.recommendation.pooled_exchange import choose_operators

    dtype = getattr(torch, DTYPES[config.train.dtype])
    choose_operators(config.train.implementation, dtype, torch.device(config.device), [model.dim])
    return metadata


def open_clicks(config: DLRMTrainConfig) -> ClickData:
    """Open the samples of a run. Parses Criteo's text if no parsed file is cached. Raises ValueError for bad files."""
    model, data = config.model.to_dlrm(), config.data
    if data.format == "synthetic":
        count = data.samples + data.evaluation_samples
        clicks = SyntheticClicks(
            count, model.rows, model.pooling, dense=model.dense, seed=data.seed, is_jagged=data.jagged
        )
        return ClickData(clicks, data.samples, clicks, data.samples, data.evaluation_samples)
    if model.dense != NUMBERS:
        raise ValueError(
            f"model.dense is {model.dense}, but Criteo's samples have {NUMBERS} numbers; {NUMBERS} would do"
        )
    assert data.path is not None  # the configuration's own rule
    logs = CriteoClicks(data.path, model.rows, model.pooling)
    if data.evaluation_path is not None:
        others = CriteoClicks(data.evaluation_path, model.rows, model.pooling)
        return ClickData(logs, len(logs), others, 0, min(data.evaluation_samples, len(others)))
    left = len(logs) - data.evaluation_samples
    if left < 1:
        raise ValueError(
            f"data.evaluation_samples is {data.evaluation_samples}, but {data.path!r} has {len(logs)} samples, of "
            f"which at least 1 is to be trained on; {len(logs) // 10} would do"
        )
    return ClickData(logs, left, logs, left, data.evaluation_samples)


def optimizer_name(config: DLRMTrainConfig) -> str:
    """The optimizers' name in a checkpoint: the MLPs', then the tables'."""
    return f"{config.train.optimizer}, {config.train.table_optimizer}"


def whole_shapes(model: DLRMConfig) -> dict[str, tuple[int, ...]]:
    """The whole shape of every parameter of the model, whichever rank has it."""
    import torch

    from stretto.recommendation import DLRM

    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in DLRM(model).named_parameters()}


def check_dlrm_checkpoint(path: Path, config: DLRMTrainConfig) -> CheckpointMetadata:
    """Check that a run can resume a checkpoint, on any number of ranks. Returns its index. Raises ValueError."""
    metadata, wanted = read_metadata(path), describe(config)
    if (kind := metadata.model.get("kind", "gpt")) != "dlrm":
        raise ValueError(f"the checkpoint {path} is of another model: a {kind}, and model.kind is 'dlrm'")
    for name, value in wanted.items():
        if name != "pooling" and metadata.model.get(name) != value:  # weights do not depend on the sizes of bags
            raise ValueError(
                f"the checkpoint {path} is of another model: model.{name} is {metadata.model.get(name)!r} there and "
                f"{value!r} here"
            )
    if metadata.optimizer != optimizer_name(config):
        ours, theirs = (text.partition(", ")[::2] for text in (optimizer_name(config), metadata.optimizer))
        raise ValueError(
            f"the checkpoint {path} was written with {metadata.optimizer}, and this run has {', '.join(ours)}: set "
            f"train.optimizer={theirs[0]!r} and train.table_optimizer={theirs[1]!r}"
        )
    if difference := next(differences(metadata.parameter_shapes(), whole_shapes(config.model.to_dlrm())), None):
        raise ValueError(f"the checkpoint {path} is of another model: {difference}")
    return metadata


def check_memory(config: DLRMTrainConfig) -> None:
    """Raise ValueError if the tables do not fit into this machine's memory.

    Only for CPUs: a GPU immediately raises an out-of-memory error.
    """
    if config.device != "cpu":
        return
    model = config.model.to_dlrm()
    numbers = sum(rows * model.dim for rows in model.rows)
    of_row, of_number = STATE_SIZES[config.train.table_optimizer]
    state = of_row * sum(model.rows) + of_number * numbers
    check_room(
        (numbers + state) * _ITEMSIZE[config.train.dtype] / config.ranks,
        config.ranks,
        f"a model with tables of {numbers:,} numbers",
        "model.max_rows",
    )
