"""What can be checked before any process starts or memory is taken: data, model on its grid, checkpoint, folder."""

import os
import tempfile
from collections import deque
from pathlib import Path

import torch

from stretto.models import GPT, GPTConfig
from stretto.parallel import validate
from stretto.train.checkpoint import check_checkpoint, find_checkpoint
from stretto.train.checkpoint.metadata import CheckpointMetadata
from stretto.train.config.dlrm import DLRMTrainConfig
from stretto.train.config.gpt import TrainConfig
from stretto.train.config.options import AnyConfig
from stretto.train.data import TokenDataset, open_dataset, write_demo_corpus
from stretto.train.dlrm.preflight import check_dlrm
from stretto.train.gpt.prediction import predict_run
from stretto.train.host_memory import check_fits_machine
from stretto.train.launch import check_started_ranks, resolve_device
from stretto.train.observe.metrics import METRICS_FILE, has_history, read_steps, require_tensorboard
from stretto.train.path_checks import PYTHON_DOCS, check_apart


def preflight(config: AnyConfig) -> AnyConfig:
    """Check that a run can start. Returns the configuration with `device` decided.

    Raises ValueError with the option, its value, the rule, and what would do.
    """
    check_started_ranks(config)
    config = resolve_device(config)
    _check_folder(config.out)
    if config.train.tensorboard:
        require_tensorboard()
    match config:
        case TrainConfig():
            metadata = _check_gpt(config)
        case DLRMTrainConfig():
            metadata = check_dlrm(config)
        case _:
            raise TypeError(f"there is nothing to train a {type(config).__name__} with")
    if metadata is not None and has_history(config.out, metadata.step):
        deque(read_steps(config.out / METRICS_FILE), maxlen=0)  # raises for a line that cannot be kept
    return config


def _check_gpt(config: TrainConfig) -> CheckpointMetadata | None:
    """What is particular to GPTs. Returns the index of the checkpoint to resume."""
    check_apart(config.out, config.data.path, reads_all=config.data.format not in ("nanogpt", "megatron"))
    model = build_model_config(config, open_data(config))
    check_fits_machine(config, model)
    with torch.device("meta"):
        validate(GPT(model), config.grid.sizes())
    predict_run(config, model)
    checkpoint = find_checkpoint(config.out, config.train.resume)
    return None if checkpoint is None else check_checkpoint(checkpoint, model, config.train.optimizer)


def open_data(config: TrainConfig) -> TokenDataset:
    """The data set of a run. The text that Python ships, if asked for, is written to `out` first.

    Raises ValueError for files that cannot be trained on.
    """
    paths = [config.data.path] if isinstance(config.data.path, str) else config.data.path
    return open_dataset(
        [str(_python_docs(config.out)) if path == PYTHON_DOCS else path for path in paths],
        format=config.data.format,
        tokenizer=config.data.tokenizer,
        token_dtype=config.data.token_dtype,
        seq_len=config.train.seq_len,
        vocab=config.model.known_vocab(),
    )


def build_model_config(config: TrainConfig, dataset: TokenDataset) -> GPTConfig:
    """The model of a run on its data. Raises ValueError where they do not fit."""
    model = config.model.to_gpt(data_vocab=dataset.vocab_size, seq_len=config.train.seq_len)
    if config.train.seq_len > model.max_seq_len:
        raise ValueError(
            f"train.seq_len is {config.train.seq_len}, but the model's max_seq_len is {model.max_seq_len}; "
            f"train.seq_len={model.max_seq_len} would do, or a larger model.max_seq_len"
        )
    return model


def _python_docs(out: Path) -> Path:
    path = out / f"{PYTHON_DOCS}.txt"
    return path if path.exists() else write_demo_corpus(path)


def _check_folder(out: Path) -> None:
    """Refuse a run's folder that cannot be made or written to. Nothing of it is made yet."""
    try:
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists() or folder.is_symlink())
        if not there.is_dir():
            raise ValueError(f"out is {str(out)!r}, but {there} is not a folder")
        # Permissions do not tell all: a file system may be read-only, full, or none to write in, such as /proc.
        os.rmdir(tempfile.mkdtemp(prefix=".stretto-", dir=there))
    except OSError as error:
        raise ValueError(f"out is {str(out)!r}, where nothing can be written: {error.strerror or error}") from error
    if (checkpoints := out / "checkpoints").exists() and not checkpoints.is_dir():
        raise ValueError(f"out is {str(out)!r}, but {checkpoints} is not a folder: checkpoints would go there")
