# SPDX-License-Identifier: Apache-2.0
"""The training of a DLRM: model, optimizers, steps, evaluation, data and checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stretto.cluster.local_ranks import count_local_ranks
from stretto.counters import advance, note
from stretto.parallel import Grid
from stretto.parallel.comm.collectives import all_reduce
from stretto.recommendation import DLRM, ShardedTables, distribute_tables
from stretto.recommendation.data import BatchPrefetcher, ClickBatch
from stretto.recommendation.index_exchange import IndexExchange, begin_exchange, on_stream, side_stream
from stretto.recommendation.pooled_exchange import TableLookups
from stretto.recommendation.table_planner import plan_tables
from stretto.recommendation.table_state import table_state
from stretto.recommendation.training.config import DLRMTrainConfig, describe, sizes_of, table_options
from stretto.recommendation.training.evaluation import evaluate
from stretto.recommendation.training.preflight import DTYPES, check_dlrm_checkpoint, open_clicks, optimizer_name
from stretto.train.checkpoint import allocate_slots, load_state, training_state
from stretto.train.checkpoint.storage import ShardedState
from stretto.train.data import Sampler, rank_rows
from stretto.train.optimizer import build_optimizer
from stretto.train.step_executor import StepFunctions, build_executor
from stretto.train.task import Evaluation, TrainTask


class _SentBatch(NamedTuple):
    """A batch whose indices are on their way."""

    dense: Tensor
    labels: Tensor
    exchange: IndexExchange

    def receive(self) -> tuple[Tensor, Tensor, TableLookups]:
        """Dense features, labels, and look-ups, for the current stream."""
        lookups = self.exchange.wait()
        for tensor in (self.dense, self.labels):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.dense, self.labels, lookups


class DLRMTask(TrainTask):
    """A DLRM whose tables are distributed over the ranks, an optimizer for them, one for the MLPs, and the data."""

    def __init__(self, config: DLRMTrainConfig, grid: Grid) -> None:
        super().__init__(config, grid)
        self.config: DLRMTrainConfig = config
        options = config.train
        self.data = open_clicks(config)
        self.model_config = config.model.to_dlrm()
        self.sampler = Sampler(self.data.samples, options.batch, options.seed)
        self._prefetcher = BatchPrefetcher(self._read_step, last=options.steps)
        self.dtype = getattr(torch, DTYPES[options.dtype])
        with torch.device("meta"):
            self.model = DLRM(self.model_config).to(self.dtype)
        plan = None
        if options.sharding == "auto":
            here = count_local_ranks() or config.ranks
            sizes = sizes_of(self.model_config)
            plan = plan_tables(sizes, config.ranks, ranks_per_node=here, **table_options(options))
        self.placement = distribute_tables(
            self.model,
            grid,
            placement=None if plan is None else plan.placement,
            pooling=self.model_config.pooling,
            implementation=options.implementation,
            seed=options.seed,
        )
        self.mlps = nn.ModuleDict({"bottom": self.model.bottom, "top": self.model.top})
        self.optimizer = build_optimizer(self.mlps, options)
        assert isinstance(self.model.tables, ShardedTables)
        tables = self.model.tables
        self.tables = {
            f"tables.{shard.table}.weight": weight for shard, weight in zip(tables.shards, tables.weights, strict=True)
        }
        self.table_optimizer = tables.fuse_update(
            options.table_optimizer,
            lr=options.table_lr,
            eps=options.table_eps,
            weight_decay=options.table_weight_decay,
            max_norm=options.table_clip or math.inf,
        )
        self._ahead: tuple[int, _SentBatch] | None = None  # the next step's
        self._executor = build_executor(
            StepFunctions(self.model, self._compute_loss, self._update), cuda_graph=options.cuda_graph
        )

    def step(self, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Run a step. The norm that it returns is of the MLPs' gradient.

        While the device runs it, the indices of the next one are exchanged on a stream of their own. A rank's errors of
        data are raised by all ranks, at their own step.
        """
        options = self.config.train
        note("data", step)
        expected, self._ahead = self._ahead, None
        sent = expected[1] if expected is not None and expected[0] == step else self._send(step)
        if step < options.steps:
            self._ahead = step + 1, self._send(step + 1)
        dense, labels, self._lookups = sent.receive()
        batch = dense, self._lookups.indices, self._lookups.offsets, labels
        if options.cuda_graph and self._ahead is not None:  # a replay's collectives come first, or last
            self._ahead[1].exchange.issue()
        note("step", step)
        self.before_update()  # the backward pass may update the tables
        self.table_optimizer.set_lr(options.table_lr * lr / options.lr)
        self.table_optimizer.set_steps(step - 1)
        loss, grad_norm = self._executor.run(batch, lr)
        return all_reduce(loss, self.grid.group("data")), grad_norm

    def evaluation(self, step: int) -> Evaluation | None:
        """The evaluation on held-out samples, if there are any: every `evaluate_every` steps, and after the last."""
        options = self.config.train
        is_due = options.evaluate_every is not None and step % options.evaluate_every == 0
        return self.evaluate if self.data.evaluation_samples and (is_due or step == options.steps) else None

    def evaluate(self) -> Mapping[str, float | None]:
        """Compute AUC and mean loss over all held-out samples. Collective. Returns {} on ranks other than 0."""

        def score(samples: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
            advance()
            dense, indices, offsets, labels = self._to_device(self.data.evaluation.read(samples))
            return self.model(dense, indices, offsets), labels

        start = self.data.evaluation_start
        held_out = range(start, start + self.data.evaluation_samples)
        return evaluate(score, held_out, self.config.train.batch, self.grid)

    def resume(self, checkpoint: Path) -> int:
        """Load a checkpoint, whatever number of ranks wrote it. Returns its step. Collective."""
        metadata = check_dlrm_checkpoint(checkpoint, self.config)
        allocate_slots(checkpoint, metadata, self.optimizer, exclude=("tables.",))
        load_state(checkpoint, metadata, self.state())
        self.compare_data(metadata)
        return metadata.step

    def description(self) -> dict[str, Any]:
        return {
            "optimizer": optimizer_name(self.config),
            "model": describe(self.config),
            "run": self.config.model_dump(mode="json"),
            "data": self.data_description(),
        }

    def data_description(self) -> dict[str, Any]:
        options = self.config.train
        return {
            "fingerprint": self.data.training.fingerprint,
            "samples": self.data.samples,
            "seed": options.seed,
            "batch": options.batch,
        }

    def read_batch(self, step: int) -> dict[str, NDArray[Any]]:
        return {"samples": self._rows(step)} | vars(self._read_step(step))

    def weights(self) -> Mapping[str, Tensor]:
        """All of the MLPs, which every rank has, and this rank's tables, or its parts of them."""
        return dict(self.mlps.named_parameters()) | self.tables

    def replicated(self) -> Mapping[str, Tensor]:
        shared = {
            f"tables.{table}.weight": self.tables[f"tables.{table}.weight"] for table in self.placement.replicated
        }
        return dict(self.mlps.named_parameters()) | shared

    def num_parameters(self) -> int:
        return sum(size.numbers for size in self.placement.tables) + sum(p.numel() for p in self.mlps.parameters())

    def layout(self) -> str | None:
        """Describe which tables are on which rank."""
        return self.placement.explain(self.dtype.itemsize) if self.config.ranks > 1 else None

    def close(self) -> None:
        self._prefetcher.close()
        self._executor.close()

    def _compute_loss(self, dense: Tensor, indices: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        """This rank's part of the mean loss over the global batch. indices, offsets: of the step's look-ups."""
        lookups = replace(self._lookups, indices=indices, offsets=offsets)
        loss = self.model(dense, lookups, None, labels=labels, num_samples=self.config.train.batch)
        if self._ahead is not None:  # before the collectives of the backward pass
            self._ahead[1].exchange.issue()
        return loss

    def _update(self, lr: float | Tensor, loss: Tensor) -> Tensor:
        gradients = [parameter.grad for parameter in self.mlps.parameters() if parameter.grad is not None]
        grad_norm = torch.stack(torch._foreach_norm(gradients, 2)).double().square().sum().sqrt()
        self.optimizer.step(lr)
        return grad_norm

    def state(self) -> dict[str, ShardedState]:
        """This rank's part of the training state: all of the MLPs, and its own tables, or its parts of them."""
        assert isinstance(self.model.tables, ShardedTables)
        return training_state(self.mlps, self.optimizer) | table_state(self.model.tables)

    def _send(self, step: int) -> "_SentBatch":
        """Read a step's batch, and begin to exchange its indices. A batch that cannot be read is refused."""
        tables, stream = self.model.tables, side_stream(self.grid.device)
        assert isinstance(tables, ShardedTables)
        nothing = torch.zeros(1, device="cpu")
        dense, indices, offsets, labels, refused = nothing, nothing.long()[:0], nothing.long(), nothing, None
        with on_stream(stream):
            try:
                dense, indices, offsets, labels = self._to_device(self._prefetcher.read(step))
            except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must learn of it)
                refused = error
            return _SentBatch(dense, labels, begin_exchange(tables, indices, offsets, refused))

    def _read_step(self, step: int) -> ClickBatch:
        """Read this rank's samples of a step's batch."""
        return self.data.training.read(self._rows(step))

    def _rows(self, step: int) -> NDArray[np.int64]:
        rows = rank_rows(self.config.train.batch, self.grid.coordinate("data"), self.grid.size("data"))
        return self.sampler.indices(step - 1)[rows]

    def _to_device(self, batch: ClickBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copy a batch to the device and return dense, indices, offsets, labels.

        Offsets are kept on the CPU, where the exchange reads them.
        """
        dense, indices, labels = (torch.from_numpy(array) for array in (batch.dense, batch.indices, batch.labels))
        if self.grid.device.type == "cuda":
            dense, indices, labels = (
                tensor.pin_memory().to(self.grid.device, non_blocking=True) for tensor in (dense, indices, labels)
            )
        return dense.to(self.dtype), indices, torch.from_numpy(batch.offsets), labels
