# SPDX-License-Identifier: Apache-2.0
"""The training of a language model on its grid: model, optimizer, steps, data and checkpoints."""

import logging
import math
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from stretto.axes import BATCH
from stretto.cluster import Cluster
from stretto.counters import advance, note
from stretto.execution import IGNORED_TARGET
from stretto.models.moe import routers, update_biases
from stretto.optim.sparse import EarlyBird, Masks
from stretto.parallel import Grid, Pipeline, clip_scale, gradient_norm, parallelize
from stretto.parallel.pipeline.stages import names_on_other_stages, whole_model
from stretto.train.checkpoint import load_checkpoint, load_masks, load_optimizer_state, training_state
from stretto.train.checkpoint.metadata import check_description, persistent_buffers
from stretto.train.checkpoint.storage import ShardedState
from stretto.train.checkpoint.torch_format import read_index
from stretto.train.config import TrainConfig
from stretto.train.data import SequenceDataset, rank_rows
from stretto.train.gpt.preflight import (
    build_source,
    check_state_fits,
    open_data,
    open_folder,
    open_held_out,
    predict_run,
)
from stretto.train.observe.experts import NUMBERS_OF_ROUTER, pack
from stretto.train.optimizer import ShardOptimizer, build_optimizer
from stretto.train.pruning import prune
from stretto.train.step_executor import PipelineExecutor, StepExecutor, StepFunctions, build_executor
from stretto.train.stored_optimizer import StoredOptimizer, build_stored_optimizer
from stretto.train.task import Evaluation, TrainTask

logger = logging.getLogger(__name__)

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,  # of what is not in fp8
    "fp16": torch.float16,
    "fp64": torch.float64,
}


class GPTTask(TrainTask):
    """A GPT or a Hugging Face language model on its grid, its optimizer, and its data in the order of the run."""

    def __init__(self, config: TrainConfig, grid: Grid) -> None:
        super().__init__(config, grid)
        self.config: TrainConfig = config
        options = config.train
        self.dataset = open_data(config)
        self.source = build_source(config, self.dataset, open_folder(config))
        torch.manual_seed(options.seed)  # for dropout; weights are seeded by their names
        self.held_out = open_held_out(config, self.dataset)
        if grid.coordinate("world") == 0:
            others = () if self.held_out is None else self.held_out.dataset.notes
            for note in dict.fromkeys((*self.dataset.notes, *others)):
                logger.warning("%s", note)
        self._trained_on = len(self.dataset) if self.held_out is None else self.held_out.trained_on
        until = options.sequences_until
        self.sampler = self.dataset.order(options.batch, options.seed, count=self._trained_on, until=until)
        model = self.source.build()
        self._routers = tuple(name for name, _ in routers(model))
        self._routing: Tensor | None = None
        if grid.device.type == "cuda":
            known = self.source.architecture(options.seq_len)
            count = sum(parameter.numel() for parameter in model.parameters())
            memory = torch.cuda.get_device_properties(grid.device).total_memory
            check_state_fits(config, count if known is None else known, memory)
        dtype = COMPUTE_DTYPES[options.dtype]
        self.model = parallelize(
            model.double() if dtype == torch.float64 else model,
            grid,
            dtype=dtype,
            seed=options.seed if self.source.starts_from_seed else None,
            options=config.execution,
        )
        self._batch_size = options.batch
        self.skips_overflows = options.dtype == "fp16"
        self.keeps_state_apart = options.optimizer_state != "fp32"
        self.optimizer: ShardOptimizer | StoredOptimizer | None = None
        if not self.keeps_state_apart:  # else it is created from the initial weights of training
            copies, average = options.writes_copies, options.ema
            self.optimizer = build_optimizer(self.model, options, writes_copies=copies, average=average, grid=grid)
        # A graph's replay cannot wait inside it, and buffers (but those of routers) may change in the forward pass.
        buffers = [name for name in persistent_buffers(self.model) if not name.startswith(self._routers)]
        self._early_bird = EarlyBird()
        self._changes_state_early = options.cuda_graph or bool(buffers)
        functions = StepFunctions(self.model, self._compute_loss, self._update, self._scale_loss)
        self.pipeline: Pipeline | None = None
        self._executor: StepExecutor
        if config.is_pipelined:
            self.pipeline = self._build_pipeline(options.micro_batch or options.batch // grid.size(BATCH))
            self._executor = PipelineExecutor(functions, self.pipeline, self._arguments)
        else:
            self._executor = build_executor(
                functions,
                micro_batch=options.micro_batch,
                cuda_graph=options.cuda_graph,
                gathers_once=config.execution.gathers_once,
            )

    def _build_pipeline(self, micro_batch: int) -> Pipeline:
        options = self.config.pipeline
        return Pipeline(
            self.model,
            self.grid,
            schedule=options.schedule,
            micro_batch_size=micro_batch,
            limit=options.limit,
            serve_first=options.serve_first,
            extra_warm_up=options.extra_warm_up,
        )

    def start(self) -> Path | None:
        self.source.load_weights(self.model)
        if self.keeps_state_apart:
            self._take_over(self._draw_masks() if self._prunes_after(0) else None)
        return self.source.weights_file

    def resume(self, checkpoint: Path) -> int:
        check_description(checkpoint, read_index(checkpoint), self.source.description(), None)
        if not self.keeps_state_apart:
            assert isinstance(self.optimizer, ShardOptimizer)
            metadata = load_checkpoint(checkpoint, self.model, self.optimizer)
        else:
            metadata = load_checkpoint(checkpoint, self.model)
            masks = load_masks(checkpoint, metadata, self.model, self.config.train.sparsity)
            if masks is None and self._prunes_after(metadata.step):
                masks = self._draw_masks()
            load_optimizer_state(
                checkpoint, metadata, self._take_over(masks), other_stages=names_on_other_stages(self.model)
            )
        self.compare_data(metadata)
        return metadata.step

    def _take_over(self, masks: Masks | None) -> StoredOptimizer:
        """Create the optimizer with separate state, from the model's current weights."""
        optimizer = build_stored_optimizer(self.model, self.grid, self.config.train, masks)
        self.optimizer = optimizer
        return optimizer

    def _prunes_after(self, step: int) -> bool:
        """True if the model, which has not been pruned, may be after this step."""
        options = self.config.train
        if not options.sparsity:
            return False
        if options.prune_method == "early-bird":
            return step > 0 and step % options.prune_at == 0
        return step >= options.prune_at

    def _draw_masks(self) -> Masks | None:
        options, stored = self.config.train, self.optimizer
        method: EarlyBird | Literal["magnitude"] = "magnitude"
        if options.prune_method == "early-bird":
            method = self._early_bird
        weights = stored.weight if isinstance(stored, StoredOptimizer) else None
        return prune(self.model, options.sparsity, method, scope=options.prune_scope, weights=weights)

    def step(self, step: int, lr: float) -> tuple[Tensor, Tensor]:
        stored, options = self.optimizer, self.config.train
        is_dense = isinstance(stored, StoredOptimizer) and stored.masks is None
        if is_dense and self._prunes_after(step - 1) and (masks := self._draw_masks()) is not None:
            assert isinstance(stored, StoredOptimizer)
            stored.prune(masks)
        batch = self._batch(step)
        self._batch_size = options.batch_at(step)
        note("step", step)
        if self._changes_state_early:
            self.before_update()
        return self._executor.run(batch, lr, self._dropout_seed(step))

    def evaluation(self, step: int) -> Evaluation | None:
        """The evaluation on held-out sequences, if there are any: every `evaluate_every` steps, and after the last."""
        options = self.config.train
        is_due = options.evaluate_every is not None and step % options.evaluate_every == 0
        return self.evaluate if self.held_out is not None and (is_due or step == options.steps) else None

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float | None]:
        """Compute the loss on the held-out sequences, in nats per token and without dropout, and the perplexity.

        Of the weights' moving averages (`train.ema`), if the run keeps any.
        Every target counts once, on any grid: batches are weighted by their numbers of targets, in float64. The
        last batch is filled up with rows that have no target. Values that are not finite are None. Collective.
        """
        assert self.held_out is not None
        options, dataset, sequences = self.config.train, self.held_out.dataset, self.held_out.sequences
        parts, coordinate = self.grid.size(BATCH), self.grid.coordinate(BATCH)
        rows = options.micro_batch or options.batch // parts
        if self.pipeline is not None:  # enough at a time to keep all stages busy
            rows = options.batch // parts
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        num_targets = 0
        was_training = self.model.training
        self.model.eval()
        with ExitStack() as stack:
            stack.callback(self.model.train, was_training)
            if self.optimizer is not None:
                stack.enter_context(self.optimizer.averaged())
            for first in range(0, len(sequences), parts * rows):
                batch = np.array(sequences[first : first + parts * rows], dtype=np.int64)
                places = coordinate * rows + np.arange(rows)
                tokens, targets, *documents = self._read(dataset, batch[np.minimum(places, len(batch) - 1)])
                targets[max(0, len(batch) - coordinate * rows) :] = IGNORED_TARGET
                count = dataset.num_targets(batch)
                total += self._loss_of(tokens, targets, count, *documents).double() * count
                num_targets += count
                advance()
        loss = float(total) / num_targets
        return {"evaluation_loss": _finite(loss), "perplexity": _finite(math.exp(loss) if loss < 700 else math.inf)}

    def _loss_of(self, tokens: Tensor, targets: Tensor, count: int, places: Tensor | None = None) -> Tensor:
        if self.pipeline is None:
            return self.source.compute_loss(self.model, tokens, targets, count, places)
        return self.pipeline.evaluate(**self.source.arguments(tokens, targets, count, places))

    def close(self) -> None:
        self._executor.close()

    def state(self) -> dict[str, ShardedState]:
        return training_state(self.model, self.optimizer)

    def description(self) -> dict[str, Any]:
        assert self.optimizer is not None
        return {
            "optimizer": self.optimizer.name,
            "model": self.source.description(),
            "run": self.config.model_dump(mode="json"),
            "data": self.data_description(),
        }

    def data_description(self) -> dict[str, Any]:
        options = self.config.train
        return {
            "fingerprint": self.dataset.fingerprint,
            "seed": options.seed,
            "batch": options.batch,
            **({} if options.batch_ramp is None else {"batch_ramp": options.batch_ramp}),
            "seq_len": options.seq_len,
            **self.dataset.description(),
        } | ({} if self._trained_on == len(self.dataset) else {"sequences": self._trained_on})

    def read_batch(self, step: int) -> dict[str, NDArray[Any]]:
        sequences = self._rows(step)
        inputs, targets = zip(*map(self.dataset.read, sequences), strict=True)
        return {"sequences": sequences, "tokens": np.stack(inputs), "targets": np.stack(targets)}

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_parameters())

    def masters(self) -> Mapping[str, Tensor]:
        return self.optimizer.masters_on_device() if isinstance(self.optimizer, StoredOptimizer) else {}

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in whole_model(self.model).parameters())

    def full_rate(self) -> float | None:
        if self.grid.device.type != "cuda":
            return None
        options = self.config.train
        peak: float | None = getattr(Cluster.detect().gpu.peak_flops, options.dtype)
        flops = self.source.flops_per_token(options.seq_len)
        return None if peak is None or flops is None else self.grid.size("world") * peak / flops

    def routing(self) -> Tensor | None:
        return self._routing

    def count_layers(self) -> int:
        return len({found[0] for name in self.weights() if (found := re.match(r".*?\.\d+\.", name))})

    def layout(self) -> str | None:
        return self.optimizer.describe() if isinstance(self.optimizer, StoredOptimizer) else None

    def predict(self) -> dict[str, Any] | None:
        return predict_run(self.config, self.source)

    def _compute_loss(
        self, tokens: Tensor, targets: Tensor, num_targets: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        return self.source.compute_loss(self.model, tokens, targets, self._count(num_targets), places)

    def _arguments(
        self, tokens: Tensor, targets: Tensor, num_targets: Tensor | None = None, places: Tensor | None = None
    ) -> dict[str, Any]:
        return self.source.arguments(tokens, targets, self._count(num_targets), places)

    def _count(self, num_targets: Tensor | None) -> Tensor | int:
        """The valid targets of the global batch."""
        return self._batch_size * self.config.train.seq_len if num_targets is None else num_targets[0]

    def _update(self, lr: float | Tensor, loss: Tensor) -> Tensor:
        self.before_update()
        clip, skip = self.config.train.clip, None
        if isinstance(self.optimizer, StoredOptimizer):
            grad_norm = self.optimizer.step(lr, loss)
            skip = self._skip(grad_norm, loss)
        else:
            assert self.optimizer is not None
            grad_norm = gradient_norm(self.model.parameters(), self.grid)
            skip = self._skip(grad_norm, loss)
            self.optimizer.step(lr, None if clip is None else clip_scale(grad_norm, clip), skip)
        if self._routers:
            self._routing = self._update_routers(skip)
        return grad_norm

    def _skip(self, grad_norm: Tensor, loss: Tensor) -> Tensor | None:
        """True if the step changes nothing, bool, 0-dim, on the device; the same on all ranks, as its arguments are."""
        if not self.config.train.skips_nonfinite:
            return None
        return ~(grad_norm.isfinite() & loss.isfinite())

    def _update_routers(self, skip: Tensor | None) -> Tensor:
        """Update the routers' biases, and collect what all of them did, also those of other pipeline stages."""
        numbers = torch.zeros(len(self._routers), NUMBERS_OF_ROUTER, dtype=torch.float64, device=self.grid.device)
        biases = [router.expert_bias for _, router in routers(self.model) if router.expert_bias is not None]
        before = [] if skip is None else [bias.clone() for bias in biases]
        statistics = update_biases(self.model)
        if skip is not None:
            for bias, old in zip(biases, before, strict=True):
                bias.copy_(torch.where(skip, old, bias))
        if statistics is not None:
            for name, row in zip(statistics.names, pack(statistics), strict=True):
                numbers[self._routers.index(name)] = row
        if self.grid.size("pipe") > 1:
            dist.all_reduce(numbers, group=self.grid.group("pipe"))
        return numbers

    def _scale_loss(self, loss: Tensor) -> Tensor:
        return self.optimizer.scale_loss(loss) if isinstance(self.optimizer, StoredOptimizer) else loss

    def _dropout_seed(self, step: int) -> int | None:
        """The seed of a step's dropout masks; None with a CUDA graph, with which options allow no dropout."""
        if self.config.train.cuda_graph:
            return None
        sequence = np.random.SeedSequence((self.config.train.seed, step))
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)

    def _batch(self, step: int) -> tuple[Tensor, ...]:
        """Read this rank's rows of a step's batch to the device: tokens and targets, int64 [rows, seq_len].

        Where some targets are ignored, also how many of the global batch are not, int64 [rows]: the same number for
        each row, so that each micro-batch has it; and where sequences have several documents, the tokens' places in
        these, int64 [rows, seq_len], on the host.
        """
        note("data", step)
        tokens, targets, *places = self._read(self.dataset, self._rows(step))
        if not self.dataset.has_ignored_targets:
            return tokens, targets
        count = np.int64(max(1, self.dataset.num_targets(self.sampler.indices(step - 1))))
        return tokens, targets, self._to_device(np.full(len(tokens), count)), *places

    def _rows(self, step: int) -> NDArray[np.int64]:
        """The indices of this rank's sequences in a step's batch."""
        rows = rank_rows(self.config.train.batch_at(step), self.grid.coordinate(BATCH), self.grid.size(BATCH))
        return self.sampler.indices(step - 1)[rows]

    def _read(self, dataset: SequenceDataset, indices: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """Read inputs and targets of sequences to the device, and with documents places, which stay on the host, where
        attention's blocks are planned by them: int64 [rows, seq_len] each."""
        inputs, targets = zip(*map(dataset.read, indices), strict=True)
        found = tuple(self._to_device(np.stack([np.stack(inputs), np.stack(targets)])).unbind())
        if dataset.has_documents:
            found += (self._pin(np.stack([dataset.read_places(index) for index in indices])),)
        return found

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return self._pin(array).to(self.grid.device, non_blocking=True)

    def _pin(self, array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.grid.device.type == "cuda" else tensor


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
