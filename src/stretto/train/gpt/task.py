"""What training needs of a GPT on its grid: a step, its checkpoints, its data."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.models import GPT
from stretto.parallel import (
    CapturedStep,
    Grid,
    Overlap,
    checkpoint_activations,
    clip_scale,
    gradient_norm,
    micro_batch_of,
    no_sync,
    parallelize,
)
from stretto.train.checkpoint import load_checkpoint, save_checkpoint
from stretto.train.config import TrainConfig
from stretto.train.data import Sampler, rank_rows
from stretto.train.gpt.prediction import predict_run
from stretto.train.optimizer import build_optimizer
from stretto.train.preflight import build_model_config, open_data
from stretto.train.task import TrainTask

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class GPTTask(TrainTask):
    """The model on its grid, the optimizer, and the data in its order."""

    def __init__(self, config: TrainConfig, grid: Grid) -> None:
        super().__init__(config, grid)
        self.config: TrainConfig = config
        options = config.train
        self.dataset = open_data(config)
        self.model_config = build_model_config(config, self.dataset)
        torch.manual_seed(options.seed)  # for dropout; weights are seeded by their names
        self.sampler = Sampler(len(self.dataset), options.batch, options.seed)
        with torch.device("meta"):
            model = GPT(self.model_config)
        dtype = COMPUTE_DTYPES[options.dtype]
        self.model = parallelize(
            model.double() if dtype == torch.float64 else model,
            grid,
            dtype=dtype,
            keep_gathered=options.keep_gathered,
            overlap=Overlap(**dict(config.overlap)),
            tune_matmuls=options.tune_matmuls,
            shard_sequence=options.shard_sequence,
            seed=options.seed,
        )
        if options.checkpoint_activations:
            checkpoint_activations(self.model)
        self.optimizer = build_optimizer(self.model, options, writes_copies=options.writes_copies)
        self._captured = CapturedStep(self._compute) if options.cuda_graph else None

    def resume(self, checkpoint: Path) -> int:
        """Load a checkpoint. Returns its step."""
        metadata = load_checkpoint(checkpoint, self.model, self.optimizer)
        self.compare_data(metadata)
        return metadata.step

    def step(self, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Step `step` (1 is the first): the global mean loss and the gradient's norm, 0-dim, on the device."""
        options = self.config.train
        tokens, targets = self._batch(step)
        if self._captured is not None:
            rate = torch.tensor(lr, dtype=torch.float32).pin_memory().to(self.grid.device, non_blocking=True)
            loss, grad_norm = self._captured(tokens, targets, rate)
            return loss, grad_norm
        dropout_seed = int(np.random.SeedSequence((options.seed, step)).generate_state(1, np.uint64)[0] >> 1)
        return self._compute(tokens, targets, lr, dropout_seed)

    def _compute(
        self, tokens: Tensor, targets: Tensor, lr: float | Tensor, dropout_seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """A step on this rank's rows of the batch. `dropout_seed=None`: nothing is drawn."""
        options = self.config.train
        micro_batches = list(zip(*(t.split(options.micro_batch or len(t)) for t in (tokens, targets)), strict=True))
        # All targets of a token stream are valid, so their number needs no counting.
        num_targets = options.batch * options.seq_len
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        done = 0
        for inputs, wanted in micro_batches:
            is_last = done + len(inputs) == len(tokens)
            # Every rank draws the same dropout seeds for each micro-batch, and a resumed run those that it would have
            # drawn: masks are told apart by the rows of the global batch.
            if dropout_seed is not None:
                torch.manual_seed(dropout_seed)
            with (
                nullcontext() if is_last else no_sync(self.model),
                micro_batch_of(self.model, len(tokens), done),
            ):
                loss = self.model(inputs, wanted, num_targets=num_targets)
                loss.backward()
            total += loss.detach()
            done += len(inputs)
        grad_norm = gradient_norm(self.model.parameters(), self.grid)
        self.optimizer.step(lr, None if options.clip is None else clip_scale(grad_norm, options.clip))
        return total, grad_norm

    def close(self) -> None:
        """Let go of what would outlive the process group."""
        if self._captured is not None:
            self._captured.close()

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`."""
        save_checkpoint(
            self.config.out,
            step,
            self.model,
            self.optimizer,
            model_config=self.model_config,
            run=self.config.model_dump(mode="json"),
            data=self.data_description(),
            keep=self.config.train.keep_checkpoints,
        )

    def data_description(self) -> dict[str, Any]:
        """What a resumed run must share to see the same sequences in the same order."""
        options = self.config.train
        return {
            "fingerprint": self.dataset.fingerprint,
            "seed": options.seed,
            "batch": options.batch,
            "seq_len": options.seq_len,
        }

    def parameters(self) -> int:
        """How many numbers the whole model has."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def predict(self) -> dict[str, Any] | None:
        """What the planner expects of the run, where a cluster is given."""
        return predict_run(self.config, self.model_config)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's rows of the step's batch, on the device: tokens and targets, int64 [rows, seq_len]."""
        rows = rank_rows(self.config.train.batch, self.grid.coordinate("batch"), self.grid.size("batch"))
        sequences = np.stack([self.dataset[index] for index in self.sampler.indices(step - 1)[rows]])
        batch = torch.from_numpy(sequences)
        if self.grid.device.type == "cuda":
            batch = batch.pin_memory().to(self.grid.device, non_blocking=True)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
