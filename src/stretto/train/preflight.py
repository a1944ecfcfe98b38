"""What can be checked before any process starts or memory is taken: data, model on its grid, checkpoint, folder."""

import os
import tempfile
from collections import deque
from pathlib import Path

import torch

from stretto.models import GPT, GPTConfig
from stretto.parallel import validate
from stretto.train.checkpoint import check_checkpoint, find_checkpoint
from stretto.train.data import TokenDataset, open_dataset, write_demo_corpus
from stretto.train.launch import check_started_ranks, resolve_device
from stretto.train.memory import check_fits_machine
from stretto.train.metrics import METRICS_FILE, has_history, read_steps, require_tensorboard
from stretto.train.options import TrainConfig
from stretto.train.prediction import predict_run

PYTHON_DOCS = "python-docs"


def preflight(config: TrainConfig) -> TrainConfig:
    """Check that a run can start. Returns the configuration with `device` decided.

    Raises ValueError with the option, its value, the rule, and what would do.
    """
    check_started_ranks(config)
    config = resolve_device(config)
    _check_folder(config.out)
    _check_apart(config)
    if config.train.tensorboard:
        require_tensorboard()
    model = build_model_config(config, open_data(config))
    check_fits_machine(config, model)
    with torch.device("meta"):
        validate(GPT(model), config.grid.sizes())
    predict_run(config, model)
    if checkpoint := find_checkpoint(config.out, config.train.resume):
        step = check_checkpoint(checkpoint, model, config.train.optimizer).step
        if has_history(config.out, step):
            deque(read_steps(config.out / METRICS_FILE), maxlen=0)  # raises for a line that cannot be kept
    return config


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


def _check_apart(config: TrainConfig) -> None:
    """Refuse a run's folder inside a folder of data: what the run writes would be taken for data when it resumes."""
    if config.data.format in ("nanogpt", "megatron"):  # these look for files by their names, and a run has none such
        return
    out = Path(os.path.realpath(config.out))
    for path in [config.data.path] if isinstance(config.data.path, str) else config.data.path:
        folder = Path(os.path.realpath(os.path.expanduser(path)))
        if path == PYTHON_DOCS or not folder.is_dir() or not out.is_relative_to(folder):
            continue
        if not any(part.startswith(".") for part in out.relative_to(folder).parts):  # hidden folders are not read
            raise ValueError(
                f"out is {str(config.out)!r}, which lies in the folder of data {path!r}: the run's files would be "
                f"taken for data; out={str(folder.with_name(f'{folder.name}-run'))!r} would do"
            )
