"""What training needs of a DLRM: a step, its evaluation, its checkpoints, its data."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.models import DLRM
from stretto.parallel import Grid, ShardedTables, distribute_tables
from stretto.parallel.comm.collectives import all_reduce
from stretto.train.checkpoint import allocate_slots, load_state, save_state, training_state
from stretto.train.checkpoint.storage import LocalBox, ShardedState
from stretto.train.config.dlrm import DLRMTrainConfig, describe
from stretto.train.data import Sampler, rank_rows
from stretto.train.data.clicks import ClickBatch
from stretto.train.data.clicks.batch import BatchPrefetcher
from stretto.train.dlrm.auc import roc_auc
from stretto.train.dlrm.preflight import DTYPES, check_dlrm_checkpoint, open_clicks, optimizer_name
from stretto.train.optimizer import TableOptimizer, build_optimizer
from stretto.train.task import Evaluation, TrainTask


class DLRMTask(TrainTask):
    """The model with its tables spread over the ranks, an optimizer for them and one for the MLPs, and the data."""

    def __init__(self, config: DLRMTrainConfig, grid: Grid) -> None:
        super().__init__(config, grid)
        self.config: DLRMTrainConfig = config
        options = config.train
        self.data = open_clicks(config)
        self.model_config = config.model.to_dlrm()
        self.sampler = Sampler(self.data.samples, options.batch, options.seed)
        self._prefetcher = BatchPrefetcher(self._read_step, last=options.steps)
        self.dtype = DTYPES[options.dtype]
        with torch.device("meta"):
            self.model = DLRM(self.model_config).to(self.dtype)
        self.placement = distribute_tables(
            self.model,
            grid,
            pooling=self.model_config.pooling,
            implementation=options.implementation,
            seed=options.seed,
        )
        self.mlps = nn.ModuleDict({"bottom": self.model.bottom, "top": self.model.top})
        self.optimizer = build_optimizer(self.mlps, options)
        self.tables = {
            f"tables.{table}.weight": self.model.get_parameter(f"tables.{table}.weight")
            for table in self.placement.owned[grid.coordinate("data")]
        }
        assert isinstance(self.model.tables, ShardedTables)
        self.table_optimizer = TableOptimizer(
            self.model.tables, options.table_optimizer, eps=options.table_eps, device=grid.device
        )

    def step(self, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Step `step` (1 is the first): the global mean loss and the norm of the MLPs' gradient."""
        options = self.config.train
        dense, indices, offsets, labels = self._to_device(self._prefetcher.read(step))
        self.table_optimizer.set_lr(options.table_lr * lr / options.lr)
        loss = self.model(dense, indices, offsets, labels=labels, num_samples=options.batch)
        loss.backward()
        total = all_reduce(loss.detach().double(), self.grid.group("data"))
        gradients = [parameter.grad for parameter in self.mlps.parameters() if parameter.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients, 2)).double().square().sum().sqrt()
        self.optimizer.step(lr)
        self.table_optimizer.step()
        return total, norm

    def evaluation(self, step: int) -> Evaluation | None:
        """The AUC, where there is data for it: every so often, and after the last step."""
        options = self.config.train
        is_due = options.evaluate_every is not None and step % options.evaluate_every == 0
        return self.evaluate if self.data.evaluation_samples and (is_due or step == options.steps) else None

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float | None]:
        """AUC and mean loss over all samples that are not trained on. Collective; on ranks other than 0, nothing."""
        scores, labels = [], []
        for samples, is_real in self._evaluation_batches():
            dense, indices, offsets, wanted = self._to_device(self.data.evaluation.read(samples))
            scores.append(self.model(dense, indices, offsets)[is_real])
            labels.append(wanted[is_real])
        every_score, every_label = self._gather(torch.cat(scores)), self._gather(torch.cat(labels))
        if every_score is None or every_label is None:
            return {}
        loss = F.binary_cross_entropy_with_logits(every_score.double(), every_label.double())
        return {"auc": roc_auc(every_score, every_label), "evaluation_loss": float(loss)}

    def resume(self, checkpoint: Path) -> int:
        """Load a checkpoint, whatever number of ranks wrote it. Returns its step."""
        metadata = check_dlrm_checkpoint(checkpoint, self.config)
        allocate_slots(checkpoint, metadata, self.optimizer, but=("tables.",))
        load_state(checkpoint, metadata, self._state())
        self.compare_data(metadata)
        return metadata.step

    def save(self, step: int) -> None:
        """Write the checkpoint of `step`."""
        description = {
            "optimizer": optimizer_name(self.config),
            "model": describe(self.config),
            "run": self.config.model_dump(mode="json"),
            "data": self.data_description(),
        }
        save_state(self.config.out, step, self._state(), description, keep=self.config.train.keep_checkpoints)

    def data_description(self) -> dict[str, Any]:
        """What a resumed run must share to see the same samples in the same order."""
        options = self.config.train
        return {
            "fingerprint": self.data.training.fingerprint,
            "samples": self.data.samples,
            "seed": options.seed,
            "batch": options.batch,
        }

    def parameters(self) -> int:
        """How many numbers the whole model has."""
        return sum(size.numbers for size in self.placement.tables) + sum(p.numel() for p in self.mlps.parameters())

    def layout(self) -> str | None:
        """Which tables lie on which rank."""
        return self.placement.explain(self.dtype.itemsize) if self.config.ranks > 1 else None

    def _state(self) -> dict[str, ShardedState]:
        """What this rank holds of the training state: all of the MLPs, and its own tables whole."""
        state = training_state(self.mlps, self.optimizer)
        for name, table in self.tables.items():
            state[f"model.{name}"] = _whole(table.detach())
        for name, sums in zip(self.tables, self.table_optimizer.states, strict=False):  # SGD has none
            state[f"optimizer.{name}.sum"] = _whole(sums)
        return state

    def close(self) -> None:
        """Stop reading ahead."""
        self._prefetcher.close()

    def _read_step(self, step: int) -> ClickBatch:
        """This rank's samples of a step's batch."""
        rows = rank_rows(self.config.train.batch, self.grid.coordinate("data"), self.grid.size("data"))
        return self.data.training.read(self.sampler.indices(step - 1)[rows])

    def _to_device(self, batch: ClickBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Numbers, indices and labels on the device; offsets stay on the CPU, where the exchange wants them."""
        dense, indices, labels = (torch.from_numpy(array) for array in (batch.dense, batch.indices, batch.labels))
        if self.grid.device.type == "cuda":
            dense, indices, labels = (
                tensor.pin_memory().to(self.grid.device, non_blocking=True) for tensor in (dense, indices, labels)
            )
        return dense.to(self.dtype), indices, torch.from_numpy(batch.offsets), labels

    def _evaluation_batches(self) -> Iterator[tuple[NDArray[np.int64], slice]]:
        """This rank's samples of each batch, and which of them are real: the last batch is filled up with its first."""
        size = self.config.train.batch // self.config.ranks
        count, start = self.data.evaluation_samples, self.data.evaluation_start
        for first in range(0, count, self.config.train.batch):
            places = first + self.grid.coordinate("data") * size + np.arange(size)
            yield start + np.minimum(places, count - 1), slice(0, int((places < count).sum()))

    def _gather(self, mine: Tensor) -> Tensor | None:
        """The ranks' tensors [any] one after another, on rank 0; None elsewhere."""
        world, group = self.grid.size("data"), self.grid.group("data")
        if world == 1:
            return mine
        sizes = [torch.zeros(1, dtype=torch.int64, device=mine.device) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=mine.device), group=group)
        longest = max(int(size) for size in sizes)
        is_first = self.grid.coordinate("data") == 0
        parts = [mine.new_empty(longest) for _ in range(world)] if is_first else None
        dist.gather(F.pad(mine, (0, longest - len(mine))), parts, group_dst=0, group=group)
        if parts is None:
            return None
        return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def _whole(tensor: Tensor) -> ShardedState:
    return ShardedState(tuple(tensor.shape), (LocalBox((0,) * tensor.dim(), tensor),))
