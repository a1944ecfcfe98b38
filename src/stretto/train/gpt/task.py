# SPDX-License-Identifier: Apache-2.0
"""The training of a GPT on its grid: model, optimizer, steps, data and checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.axes import BATCH
from stretto.cluster import Cluster
from stretto.models import GPT
from stretto.parallel import Grid, clip_scale, gradient_norm, parallelize
from stretto.train.checkpoint import load_checkpoint, save_checkpoint
from stretto.train.config import TrainConfig
from stretto.train.data import Sampler, rank_rows
from stretto.train.gpt.preflight import build_model_config, open_data, predict_run
from stretto.train.optimizer import build_optimizer
from stretto.train.step_executor import StepFunctions, build_executor
from stretto.train.task import TrainTask

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class GPTTask(TrainTask):
    """A GPT on its grid, its optimizer, and its data in the order of the run."""

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
            seed=options.seed,
            options=config.execution,
        )
        self.optimizer = build_optimizer(self.model, options, writes_copies=options.writes_copies)
        self._executor = build_executor(
            StepFunctions(self.model, self._compute_loss, self._update),
            micro_batch=options.micro_batch,
            cuda_graph=options.cuda_graph,
        )

    def resume(self, checkpoint: Path) -> int:
        metadata = load_checkpoint(checkpoint, self.model, self.optimizer)
        self.compare_data(metadata)
        return metadata.step

    def step(self, step: int, lr: float) -> tuple[Tensor, Tensor]:
        return self._executor.run(self._batch(step), lr, self._dropout_seed(step))

    def close(self) -> None:
        self._executor.close()

    def save(self, step: int) -> None:
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
        options = self.config.train
        return {
            "fingerprint": self.dataset.fingerprint,
            "seed": options.seed,
            "batch": options.batch,
            "seq_len": options.seq_len,
        }

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def full_rate(self) -> float | None:
        if self.grid.device.type != "cuda":
            return None
        options = self.config.train
        peak: float | None = getattr(Cluster.detect().gpu.peak_flops, options.dtype)
        flops = self.model_config.flops_per_token(options.seq_len)
        return None if peak is None else self.grid.size("world") * peak / flops

    def predict(self) -> dict[str, Any] | None:
        return predict_run(self.config, self.model_config)

    def _compute_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # All targets of a token stream are valid, so their number needs no counting.
        options = self.config.train
        return self.model(tokens, targets, num_targets=options.batch * options.seq_len)

    def _update(self, lr: float | Tensor) -> Tensor:
        clip = self.config.train.clip
        grad_norm = gradient_norm(self.model.parameters(), self.grid)
        self.optimizer.step(lr, None if clip is None else clip_scale(grad_norm, clip))
        return grad_norm

    def _dropout_seed(self, step: int) -> int | None:
        """The seed of a step's dropout masks; None with a CUDA graph, with which options allow no dropout."""
        if self.config.train.cuda_graph:
            return None
        sequence = np.random.SeedSequence((self.config.train.seed, step))
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Read this rank's rows of a step's batch to the device: tokens and targets, int64 [rows, seq_len]."""
        rows = rank_rows(self.config.train.batch, self.grid.coordinate(BATCH), self.grid.size(BATCH))
        sequences = np.stack([self.dataset[index] for index in self.sampler.indices(step - 1)[rows]])
        batch = torch.from_numpy(sequences)
        if self.grid.device.type == "cuda":
            batch = batch.pin_memory().to(self.grid.device, non_blocking=True)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
