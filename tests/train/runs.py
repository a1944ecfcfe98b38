# SPDX-License-Identifier: Apache-2.0
"""Functions that ranks run in the tests of training and of checkpoints: in a module, for a pool to import."""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from tests.faults.flips import FlipsSetting, bench_flips
from tests.processes import LIMIT
from tests.train.saving import save_checkpoint
from torch import Tensor, nn
from torch.optim import AdamW

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, parallelize
from stretto.train.checkpoint import checkpoint_path, load_checkpoint, training_state
from stretto.train.checkpoint import metadata as metadata_module
from stretto.train.checkpoint import writing as checkpoint_writing
from stretto.train.checkpoint.integrity import seal
from stretto.train.checkpoint.storage import StateSavePlanner
from stretto.train.checkpoint.weights import import_safetensors
from stretto.train.config import TrainConfig, config_to_toml, make_config
from stretto.train.data import Sampler
from stretto.train.optimizer import ShardOptimizer, local_shard
from stretto.train.stopping import StopRequest
from stretto.train.trainer import train

# 61 tokens: no axis divides them. Grouped-query attention, so that x divides groups and not features.
GPT_CONFIG = GPTConfig(layers=2, hidden=16, heads=8, kv_heads=4, vocab=61, max_seq_len=16)
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 40


def configure(out: Path, *overrides: str) -> TrainConfig:
    """A small run on `TEXT`, which it writes beside `out`."""
    text = out.parent / "text.txt"
    if not text.exists():
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(TEXT)
    values = {
        "out": str(out),
        "device": "cpu",
        "data": {"path": str(text)},
        "model": {"layers": 2, "hidden": 32, "heads": 8},
        "train": {"steps": 6, "batch": 8, "seq_len": 16, "lr": 1e-2, "warmup_steps": 1},
    }
    return make_config(values, list(overrides))


def write_config(config: TrainConfig) -> None:
    """Leave the configuration in the run's folder, as the command line does."""
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "config.toml").write_text(config_to_toml(config))


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def train_quietly(config: TrainConfig) -> None:
    train(config, display="none")


def train_and_listen(config: TrainConfig) -> list[str]:
    """Train; returns what this rank has logged of checkpoints, and its error, if there was one, at the end."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("stretto.train.checkpoint")
    logger.addHandler(handler)
    try:
        train(config, display="none")
    except Exception as error:  # noqa: BLE001  (it is returned)
        messages.append(f"{type(error).__name__}: {error}")
    finally:
        logger.removeHandler(handler)
    return messages


def flip_bit(file: Path, bit: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def train_and_stop(config: TrainConfig, step: int, rank: int) -> None:
    """Train; `rank` gets SIGTERM while it works on `step`."""
    indices = Sampler.indices

    def indices_and_signal(sampler: Sampler, number: int) -> Any:
        if number == step - 1 and rank == torch.distributed.get_rank():
            os.kill(os.getpid(), signal.SIGTERM)
        return indices(sampler, number)

    with mock.patch.object(Sampler, "indices", indices_and_signal):
        train(config, display="none")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the handler was not given back"


def look_at_stop_requests(folder: Path) -> list[bool]:
    """Look three times; rank 1 only once rank 0 is done with its first look, and it gets a signal after its own."""
    rank, done, found = torch.distributed.get_rank(), folder / "first look", []
    with StopRequest() as stop:
        while rank == 1 and not done.exists():
            time.sleep(0.01)
        found.append(stop.is_agreed())
        done.touch()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        found += [stop.is_agreed(), stop.is_agreed()]
    return found


def make_gpt() -> nn.Module:
    return GPT(GPT_CONFIG)


def make_hugging_face_gpt2() -> nn.Module:
    """GPT-2 fuses queries, keys and values: a shard of that weight is several pieces of it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 8, "vocab_size": 61, "n_positions": 16}
    none = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(**sizes, **none)
    return GPT2LMHeadModel(config)


def sharded(make: Any, grid: dict[str, int], seed: int) -> tuple[nn.Module, ShardOptimizer, Grid]:
    torch.manual_seed(seed)
    on_grid = Grid(**grid, device="cpu")
    model = parallelize(make(), on_grid)
    return model, ShardOptimizer(model, lambda groups: AdamW(groups, lr=0.1), weight_decay=0.1, average=0.9), on_grid


def save_trained(make: Any, grid: dict[str, int], out: Path) -> dict[str, Tensor]:
    """Train a model for two steps on a grid, with random gradients, and save it. Returns its whole weights."""
    model, optimizer, _ = sharded(make, grid, seed=1)
    for _ in range(2):
        tokens = torch.randint(61, (4, 16))
        for parameter in model.parameters():
            parameter.grad = None
        loss = model(tokens, labels=tokens).loss if make is make_hugging_face_gpt2 else model(tokens, tokens)
        loss.backward()
        optimizer.step(0.1)
    save(model, optimizer, out, 2)
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


def load_and_save(make: Any, grid: dict[str, int], source: Path, out: Path) -> dict[str, Tensor]:
    """Load a checkpoint into a model with other weights, and save it again. Returns its whole weights."""
    model, optimizer, _ = sharded(make, grid, seed=2)
    load_checkpoint(source, model, optimizer)
    save(model, optimizer, out, 2)
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


def save(model: nn.Module, optimizer: ShardOptimizer, out: Path, step: int, keep: int = 5) -> None:
    config = model.config if isinstance(model, GPT) else GPT_CONFIG
    save_checkpoint(out, step, model, optimizer, model_config=config, run={}, data={}, keep=keep)


def save_steps(out: Path, steps: list[int], keep: int) -> None:
    """Save the same model under several steps."""
    model, optimizer, _ = sharded(make_gpt, {}, seed=1)
    for step in steps:
        save(model, optimizer, out, step, keep)


def edit_index(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a checkpoint's index as somebody might who knows about its checksum."""
    content = json.loads((checkpoint / "metadata.json").read_text())
    change(content)
    content["checksum"] = "crc32:00000000"
    (checkpoint / "metadata.json").write_bytes(seal(json.dumps(content).encode()))


def as_format_1(checkpoint: Path) -> None:
    """Make of a checkpoint one as older versions wrote it, without checksums."""
    content = json.loads((checkpoint / "metadata.json").read_text()) | {"format": 1}
    del content["checksum"], content["files"]
    for entry in content["tensors"].values():
        for chunk in entry["chunks"]:
            del chunk["checksum"]
    (checkpoint / "metadata.json").write_text(json.dumps(content))


def save_with_a_small_index(out: Path, max_bytes: int) -> str:
    with mock.patch.object(checkpoint_writing, "MAX_METADATA_BYTES", max_bytes):
        try:
            save_steps(out, [1], keep=1)
        except OSError as error:
            return str(error)
    return ""


def load_weights(make: Any, grid: dict[str, int], file: Path) -> dict[str, Tensor]:
    """Import a safetensors file on a grid. Returns the whole weights.

    Each rank's shards are those of a plain model that imports the file and is then put on the grid.
    """
    model, _, on_grid = sharded(make, grid, seed=2)
    import_safetensors(model, str(file))
    plain = make()
    import_safetensors(plain, file)
    for ours, expected in zip(model.parameters(), parallelize(plain, on_grid).parameters(), strict=True):
        assert torch.equal(local_shard(ours), local_shard(expected))
    return {name: gather(parameter).detach() for name, parameter in model.named_parameters()}


def decay_only(grid: dict[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """One optimizer step without a gradient. Returns each parameter before and after, whole."""
    model, optimizer, _ = sharded(make_gpt, grid, seed=1)
    before = {name: gather(parameter).detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5)
    return {name: (before[name], gather(parameter).detach()) for name, parameter in model.named_parameters()}


def train_with_a_bad_index(config: TrainConfig, checkpoint: Path, rank: int) -> list[str]:
    """`train_and_listen`, where one rank reads a flipped bit in the index of a checkpoint that is not in the file."""
    read = metadata_module.read_bounded

    def misread(path: Path, *args: Any) -> bytes:
        text = read(path, *args)
        if path == checkpoint / "metadata.json" and torch.distributed.get_rank() == rank:
            return text[:500] + bytes([text[500] ^ 1]) + text[501:]
        return text

    with mock.patch.object(metadata_module, "read_bounded", misread):
        return train_and_listen(config)


def save_in_a_thread(out: Path, writers: int) -> None:
    """Save in a thread, with a process group of its own and several writer threads, while this thread uses another."""
    model, optimizer, _ = sharded(make_gpt, {"x": 2}, seed=1)
    group = torch.distributed.new_group(backend="gloo")
    description = {"step": 1, "torch": "", "optimizer": "adamw", "model": {}, "run": {}, "data": {}}
    writer = checkpoint_writing.CheckpointWriter(checkpoint_path(out, 1), description, threads=writers)
    failed: list[BaseException] = []

    def save_now() -> None:
        try:
            dcp.save(
                training_state(model, optimizer),
                storage_writer=writer,
                planner=StateSavePlanner(),
                process_group=group,
            )
        except BaseException as error:  # noqa: BLE001  (it is raised below)
            failed.append(error)

    thread = threading.Thread(target=save_now)
    thread.start()
    for _ in range(20):
        torch.distributed.all_reduce(torch.ones(1))
    thread.join(LIMIT)
    if failed or thread.is_alive():
        raise AssertionError(f"the thread did not save: {failed}")


def import_and_listen(grid: dict[str, int], file: Path) -> str:
    """Import weights on a grid; returns the error's message, if there is one."""
    model, _, _ = sharded(make_gpt, grid, seed=2)
    try:
        import_safetensors(model, file)
    except ValueError as error:
        return str(error)
    return ""


def flip_in_a_group(setting: FlipsSetting, out: Path) -> dict[str, Any]:
    """The bench of flips, which makes a process group of its own."""
    torch.distributed.destroy_process_group()
    return bench_flips(setting, out)
