# SPDX-License-Identifier: Apache-2.0
"""`trainer_plugin`: a Trainer of transformers, or one built on it, that trains a parallelized model.

Trainer assumes that every rank has rows of its own and a loss of its own, that Accelerate wraps the model, and that one
rank can write what it holds. The subclass made here changes these assumptions, through the trainer's Accelerator where
it can, and through the fewest of Trainer's methods otherwise.
"""

import contextlib
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stretto.axes import BATCH, LOSS
from stretto.execution import IGNORED_TARGET
from stretto.huggingface.accelerator import follow_grid
from stretto.huggingface.folder import find_weights
from stretto.huggingface.optimizer_state import load_optimizer, save_optimizer
from stretto.memory import exchange, group_timeout
from stretto.parallel import Grid, gather
from stretto.parallel.comm.collectives import all_reduce
from stretto.parallel.layers.embedding import ParallelEmbedding, ParallelPositions
from stretto.parallel.layers.loss import is_mean_over_batch
from stretto.parallel.layers.norm import ParallelNorm
from stretto.parallel.state import require_state, state_of
from stretto.train.checkpoint.weights import import_safetensors

TrainerType = TypeVar("TrainerType", bound=type)

# Minor versions whose methods the subclass was tried with: these are no public interface, and change between them.
KNOWN_VERSIONS = {"transformers": ("5.23",), "accelerate": ("1.15",), "trl": ("1.16",)}
_OPTIMIZER, _STOCK_OPTIMIZER = "optimizer", ("optimizer.pt", "optimizer.bin")
_RANDOM_STATES = "rng_state.pth"


def trainer_plugin(trainer: TrainerType) -> TrainerType:
    """Return a subclass of `trainer` that trains a model that `parallelize` has returned.

        trainer = trainer_plugin(SFTTrainer)(model=parallelize(model, grid), args=args, train_dataset=dataset)

    trainer: transformers.Trainer, TRL's SFTTrainer, or a subclass of either (Axolotl's and LLaMA-Factory's are); one
    that overrides `compute_loss` must call the inherited method, or use `stretto.parallel.mean_over_batch`. Start the
    script with torchrun. `per_device_train_batch_size` is the batch of a rank along the grid's batch axes; ranks that
    differ only in x or y get the same rows. Losses, gradient norms and clipping are those of one process with the whole
    batch. Checkpoints have the weights as transformers saves them and the optimizer's state for any grid, and appear
    once they are complete; all ranks must see the same file system.

    Raises ValueError for a class that is no Trainer, and for versions of transformers, accelerate or trl that it was
    not tried with; the subclass raises it for a model that is not on a grid, and for arguments without support.
    """
    _check_version("transformers")
    import transformers

    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise ValueError(f"trainer_plugin takes transformers.Trainer or a subclass of it, but was given {trainer!r}")
    _check_version("accelerate")
    of_trl = next((base for base in trainer.__mro__ if base.__module__.startswith("trl.trainer.")), None)
    if of_trl is not None:
        _check_version("trl")
        if not any(base.__name__ == "SFTTrainer" for base in trainer.__mro__):
            raise ValueError(
                f"trainer_plugin supports SFTTrainer of trl, but not {of_trl.__name__}, whose loss is computed from "
                "each rank's own rows"
            )
        if not trainer.compute_loss.__module__.startswith("trl."):
            raise ValueError(
                f"{trainer.__name__} overrides SFTTrainer's compute_loss, in whose place the model's own loss is used: "
                "derive it from transformers.Trainer instead"
            )
    return type(f"{trainer.__name__}OnGrid", (_OnGrid, trainer), {"__module__": __name__})  # type: ignore[return-value]


def _check_version(package: str) -> None:
    """Raise ValueError for a version that the subclass was not tried with."""
    known = KNOWN_VERSIONS[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        raise ValueError(f"trainer_plugin needs {package}, which is not installed") from None
    if ".".join(found.split(".")[:2]) not in known:
        raise ValueError(
            f"trainer_plugin replaces methods of {package} that change between versions; it was tried with "
            f"{package} {', '.join(known)}, and {found} is installed: pip install '{package}=={known[-1]}.*'"
        )


class _OnGrid:
    """Methods that `trainer_plugin` puts before the methods of a Trainer."""

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    _sharded: nn.Module
    _grid: Grid
    _unfinished: Path | None = None
    _needs_logits = False

    # Set up.

    def create_accelerator_and_postprocess(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(
                "trainer_plugin takes model=stretto.parallelize(...), and no model_init or name of a model"
            )
        found = next(((module, state) for module in self.model.modules() if (state := state_of(module))), None)
        if found is None:
            raise ValueError(
                f"trainer_plugin: this {type(self.model).__name__} is not on a grid: pass stretto.parallelize(model, "
                "grid)"
            )
        self._sharded, self._grid = found[0], found[1].grid
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self._refuse_options()
        # Trainer would multiply each rank's loss by the number of ranks, for DDP to average gradients. Ours is that of
        # the global batch already, and `_get_num_items_in_batch` counts its tokens.
        self.args.average_tokens_across_devices = False
        follow_grid(self.accelerator, self._sharded, self._grid)

    def _refuse_options(self) -> None:
        """Raise ValueError for the first argument that is not supported."""
        args, grid, kind = self.args, self._grid, self.accelerator.distributed_type.value
        shares_rows = grid.size("world") > grid.size(BATCH)
        refusals = {
            f"a grid with pipe={grid.size('pipe')}, whose stages stretto.parallel.Pipeline runs": grid.size("pipe") > 1,
            f"{args.world_size} ranks, where the grid has {grid.size('world')} (start the script with torchrun)": (
                args.world_size != grid.size("world")
            ),
            f"args.device {args.device}, where the grid is on {grid.device}": args.device.type != grid.device.type,
            "fp16 (its loss scale looks at each rank's gradients alone): bf16=True with parallelize(dtype=bfloat16)": (
                args.fp16
            ),
            f"distributed_type {kind}, which would shard the model again: remove its options": (
                kind not in ("NO", "MULTI_CPU", "MULTI_GPU") or self.accelerator.parallelism_config is not None
            ),
            "n_gpu > 1 (start the script with torchrun)": args.n_gpu > 1,
            "accelerator_config's dispatch_batches=True": args.accelerator_config.dispatch_batches is True,
            "train_sampling_strategy='batch_rebalance' with x, y or context > 1, whose ranks take the same rows": (
                shares_rows and args.train_sampling_strategy == "batch_rebalance"
            ),
            "eval_use_gather_object on a grid with x, y or context > 1": shares_rows and args.eval_use_gather_object,
            "loss_type='dft' of SFTTrainer: the model's own loss is used": getattr(args, "loss_type", None) == "dft",
        }
        for what, is_asked in refusals.items():
            if is_asked:
                raise ValueError(f"trainer_plugin does not support {what}")

    def get_total_train_batch_size(self, args: Any) -> int:
        ranks = self._grid.size("world") // self._grid.size(BATCH)
        return super().get_total_train_batch_size(args) // ranks  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> float:
        # As transformers' models, which recognize embeddings by their class. Summed over all ranks, of which those of x
        # and y divide the work on the same rows.
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if tokens is None:
            return 0
        embeddings = (nn.Embedding, ParallelEmbedding, ParallelPositions)
        left_out = {f"{name}.weight" for name, module in self.model.named_modules() if isinstance(module, embeddings)}
        parameters = sum(p.numel() for name, p in self.model.named_parameters() if name not in left_out)
        ranks = self._grid.size("world") // self._grid.size(BATCH)
        return 6 * tokens.numel() * parameters / ranks

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        # Trainer recognizes some norms by their class, nn.LayerNorm, which `parallelize` has replaced.
        norms = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, ParallelNorm) and module.is_centred
        }
        return [name for name in super().get_decay_parameter_names(model) if name not in norms]  # type: ignore[misc]

    # Loss and gradients.

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        if batch_samples:
            self._ignore_repeated_rows(batch_samples[-1])
        count = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        if count is None:
            return None
        return all_reduce(torch.as_tensor(count, device=device).long(), self._grid.communicator(BATCH))

    def _ignore_repeated_rows(self: Any, inputs: Any) -> None:
        """Remove the targets of rows that Accelerate repeats where ranks would have fewer in an epoch's last batch, and
        warn of those that losses cannot leave out."""
        progress, ranks = self.accelerator.gradient_state, self._grid.size(BATCH)
        for name in self.label_names if progress.end_of_dataloader and progress.remainder > 0 else ():
            targets = inputs.get(name)
            if not isinstance(targets, Tensor) or progress.remainder >= ranks * len(targets):
                continue
            if targets.is_floating_point():
                warnings.warn(
                    f"the last batch of an epoch has {progress.remainder} rows for {ranks} ranks of {len(targets)}: "
                    f"the first ones are repeated, and count in the loss, as {name} are no numbers of classes. "
                    "dataloader_drop_last=True leaves this batch out",
                    stacklevel=2,
                )
                continue
            own = max(progress.remainder - self._grid.coordinate(BATCH) * len(targets), 0)
            # The models take positions beyond the sequence for none, and -100 for the first one.
            ignored = torch.iinfo(targets.dtype).max if name.endswith("positions") else IGNORED_TARGET
            inputs[name] = torch.cat((targets[:own], torch.full_like(targets[own:], ignored)))

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **options: Any
    ) -> Any:
        import transformers

        inner: Callable[..., Any] = super().compute_loss  # type: ignore[misc]
        is_of_trl = hasattr(self, "aux_loss_enabled")
        if is_of_trl:  # it would multiply hidden features by the head's weight itself, of which a rank has a part
            inner = partial(transformers.Trainer.compute_loss, self)  # type: ignore[arg-type]
            inputs = {**inputs, "use_cache": False}
        labels = inputs.get("labels")
        loss, outputs = inner(model, inputs, return_outputs=True, **options)
        if self._grid.size(LOSS) > 1 and loss.requires_grad and not is_mean_over_batch(loss):
            raise ValueError(
                f"{type(self).__name__}: the loss was computed from this rank's rows alone, where it is to be that of "
                "the global batch. Leave compute_loss_func and label_smoothing_factor out, and use "
                "stretto.parallel.mean_over_batch in a compute_loss of your own"
            )
        if is_of_trl:
            loss = self._follow_trl(loss, outputs, inputs, takes_mean=options.get("num_items_in_batch") is not None)
        if not return_outputs:
            return loss
        if self._needs_logits and labels is not None and getattr(outputs, "logits", None) is None:
            without = {key: value for key, value in inputs.items() if key != "labels"}
            with torch.no_grad():
                outputs = model(**without)  # the sharded loss makes no logits
        return loss, outputs

    def _follow_trl(self: Any, loss: Tensor, outputs: Any, inputs: Mapping[str, Any], *, takes_mean: bool) -> Tensor:
        """Do what SFTTrainer's own loss does beside: the balance loss's mean over micro-batches, and a count of tokens.

        Its entropy and token accuracy would need logits.
        """
        if self.model.training and "attention_mask" in inputs:
            self._total_train_tokens += self.accelerator.gather(inputs["attention_mask"].sum()).sum().item()
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        if self.aux_loss_enabled and takes_mean:  # the model has added it whole
            loss = (
                loss + (1 / self.current_gradient_accumulation_steps - 1) * self.router_aux_loss_coef * outputs.aux_loss
            )
        return loss

    def prediction_step(self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **kw: Any) -> Any:
        self._needs_logits = not prediction_loss_only
        self._ignore_repeated_rows(inputs)
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, *args, **kw)  # type: ignore[misc]
        parts = require_state(self._sharded, "trainer_plugin").sequence_parts
        if parts is not None and logits is not None:
            length = inputs[next(name for name in ("input_ids", "inputs_embeds") if name in inputs)].shape[1]
            logits = tree_map(lambda part: parts.join(part, length), logits)
        return loss, logits, labels

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # experts' parameters have a mesh of their own; our norm counts them all

    # Checkpoints.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        whole = self._whole_state() if state_dict is None else state_dict
        with on_all_ranks(f"saving the model to {output_dir or self.args.output_dir}"):
            if self.args.should_save:
                super()._save(output_dir, whole)  # type: ignore[misc]

    def _whole_state(self) -> dict[str, Tensor]:
        """Gather the model's state, one tensor at a time, on the rank that writes it. Collective."""
        whole: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}  # tied weights stay one tensor, as save_pretrained needs
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen[id(tensor)] = gather(tensor).detach().cpu() if isinstance(tensor, Tensor) else tensor
                if not self.args.should_save:
                    seen[id(tensor)] = torch.empty(0, device="cpu")
            whole[name] = seen[id(tensor)]
        return whole

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        from transformers.trainer_utils import rotate_checkpoints

        run = Path(self._get_output_dir(trial))
        folder = run / f"checkpoint-{self.state.global_step}"
        self._unfinished = run / f".{folder.name}.writing"
        written = self._unfinished / folder.name
        try:
            with on_all_ranks(f"saving {folder}"):
                if self.args.should_save:
                    shutil.rmtree(self._unfinished, ignore_errors=True)
            with on_all_ranks(f"saving {folder}"):
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            with on_all_ranks(f"saving {folder}"):
                if self.state.best_model_checkpoint == str(written):
                    self.state.best_model_checkpoint = str(folder)
                if self.args.should_save:
                    self.state.save_to_json(str(written / "trainer_state.json"))
                    shutil.rmtree(folder, ignore_errors=True)
                    os.replace(written, folder)
                    rotate_checkpoints(
                        str(run), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
                    )
        finally:
            if self.args.should_save:
                shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _get_output_dir(self, trial: Any) -> str:
        if self._unfinished is not None:
            return str(self._unfinished)
        return super()._get_output_dir(trial)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._unfinished is None:  # else it is moved before the upload, which runs in the background, ends
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(Path(output_dir) / _OPTIMIZER, self.state.global_step, self.model, self.optimizer)
        with on_all_ranks(f"saving {output_dir}"):
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _save_rng_state(self, output_dir: str) -> None:
        # Ranks draw the same random numbers, so that a rank of another grid may take any rank's state.
        with on_all_ranks(f"saving {output_dir}"):
            if self.args.should_save:
                torch.save(_random_states(self._grid.device), Path(output_dir) / _RANDOM_STATES)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        file = find_weights(Path(resume_from_checkpoint))
        if file is None:  # adapters
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            import_safetensors(self.model, file)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if (folder / _OPTIMIZER).is_dir():
            load_optimizer(folder / _OPTIMIZER, self.model, self.optimizer)
            self.lr_scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
        elif any((folder / name).is_file() for name in _STOCK_OPTIMIZER):
            raise ValueError(
                f"{checkpoint} has the optimizer state of a Trainer without trainer_plugin, which is not read: start "
                "from its weights, with from_pretrained, or write it by trainer_plugin (on a grid of one rank, too)"
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / _RANDOM_STATES).is_file():
            _set_random_states(torch.load(Path(checkpoint) / _RANDOM_STATES, weights_only=True), self._grid.device)


@contextlib.contextmanager
def on_all_ranks(what: str) -> Iterator[None]:
    """Have all ranks raise if the block raises on any. Collective, at its end."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001
        failure = error
    own = "" if failure is None else f"{type(failure).__name__}: {failure}"
    texts = [own] if dist.get_world_size() == 1 else exchange(own, None, group_timeout(None), str)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise OSError(f"{what} failed on rank {rank}: {text}")


def _random_states(device: torch.device) -> dict[str, Any]:
    """The states of all generators that a loop may use, in types that torch.load reads as weights."""
    import numpy as np

    found: Any = np.random.get_state()
    name, keys, *rest = found
    states = {"python": random.getstate(), "numpy": [name, keys.tolist(), *rest], "cpu": torch.get_rng_state()}
    return states if device.type == "cpu" else states | {device.type: torch.cuda.get_rng_state(device)}


def _set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    import numpy as np

    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["cpu"])
    if device.type in states and device.type != "cpu":
        torch.cuda.set_rng_state(states[device.type], device)
