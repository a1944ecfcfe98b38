# SPDX-License-Identifier: Apache-2.0
"""The source of a run's language model: the shape of a GPT, the name of a public model, or a Hugging Face folder.

The preflight and the task ask a source for all that differs between the two. Nothing here imports torch or
transformers before a model is built, so that a wrong folder raises an error immediately.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.huggingface.families import DECODERS
from stretto.huggingface.folder import build_causal_lm, read_config, require_transformers, require_weights
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.huggingface.refusals import refusal_of_attention_dropout, refusal_of_quantization
from stretto.models import GPTConfig
from stretto.planner import read_architecture
from stretto.suggestions import did_you_mean_file

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stretto.planner.architecture import Architecture

_LENGTHS = ("max_position_embeddings", "n_positions")  # entries of a config.json that bound the sequence length


class ModelSource(ABC):
    """A language model before it is built.

    Attributes: `starts_from_seed`, whether training starts from random weights, and not from those of `load_weights`;
    `weights_file`, the file of these.
    """

    starts_from_seed = True
    weights_file: Path | None = None

    @abstractmethod
    def architecture(self, seq_len: int) -> "Architecture | None":
        """The sizes that the planner computes with; None for a family of models that it does not know."""

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """The model's description in a checkpoint's index. Resuming compares it."""

    @abstractmethod
    def build(self) -> "nn.Module":
        """Build the model on the meta device, in fp32. Raises ValueError where that cannot be done."""

    def load_weights(self, model: "nn.Module") -> None:  # noqa: B027  (a GPT starts from its seed)
        """Read the weights that training starts from into a model that `parallelize` has returned."""

    @abstractmethod
    def arguments(
        self, tokens: "Tensor", targets: "Tensor", num_targets: "Tensor | int", places: "Tensor | None" = None
    ) -> dict[str, Any]:
        """The arguments of the model's forward with which it returns the mean loss over the global batch.

        tokens, targets: this rank's, int64 [rows, seq_len]; a target of -100 is not counted. num_targets: the valid
        targets of the global batch. places: of the tokens in their documents, to which attention then keeps.
        """

    def compute_loss(
        self,
        model: "nn.Module",
        tokens: "Tensor",
        targets: "Tensor",
        num_targets: "Tensor | int",
        places: "Tensor | None" = None,
    ) -> "Tensor":
        """The mean loss over the global batch, of `arguments`."""
        output = model(**self.arguments(tokens, targets, num_targets, places))
        return getattr(output, "loss", output)

    def flops_per_token(self, seq_len: int) -> int | None:
        """Model FLOPs of a training step for each token, as of `GPTConfig.flops_per_token`; None if unknown."""
        sizes = self.architecture(seq_len)
        if sizes is None:
            return None
        weights = sizes.active_weights + sizes.head_outputs * sizes.hidden
        return 6 * weights + 12 * sizes.layers * sizes.heads * sizes.head_dim * seq_len


class GPTSource(ModelSource):
    """A GPT of a given shape, which starts from random weights."""

    def __init__(self, config: GPTConfig) -> None:
        self.config = config

    def architecture(self, seq_len: int) -> "Architecture":
        return read_architecture(self.config, seq_len)

    def description(self) -> dict[str, Any]:
        return asdict(self.config)

    def flops_per_token(self, seq_len: int) -> int:
        return self.config.flops_per_token(seq_len)

    def build(self) -> "nn.Module":
        import torch

        from stretto.models import GPT

        with torch.device("meta"):
            return GPT(self.config)

    def arguments(
        self, tokens: "Tensor", targets: "Tensor", num_targets: "Tensor | int", places: "Tensor | None" = None
    ) -> dict[str, Any]:
        return {"tokens": tokens, "targets": targets, "num_targets": num_targets} | (
            {} if places is None else {"documents": places}
        )


class HuggingFaceSource(ModelSource):
    """A causal language model of transformers, of a public model's configuration: it starts from random weights.

    Raises ValueError without the package transformers. Nothing is ever downloaded.

    Attributes: `config`, the entries of its config.json; `origin`, what error messages call it.
    """

    def __init__(self, name: str, *, without_dropout: bool = False) -> None:
        """name: in PUBLIC_MODELS. without_dropout: set all dropout probabilities of the configuration to 0."""
        require_transformers("name", name)
        self.origin = name
        self.config = PUBLIC_MODELS[name]
        self._without_dropout = without_dropout

    @property
    def vocab(self) -> int | None:
        """The model's vocabulary size, where its configuration says it."""
        value = self.config.get("vocab_size")
        return value if isinstance(value, int) and value > 0 else None

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence that the model was made for, where its configuration says it."""
        return next((value for name in _LENGTHS if isinstance(value := self.config.get(name), int)), None)

    def architecture(self, seq_len: int) -> "Architecture | None":
        return self._architecture

    @cached_property
    def _architecture(self) -> "Architecture | None":
        if self.config.get("model_type") not in DECODERS:
            return None
        config = {name: value for name, value in self.config.items() if not self._without_dropout or "drop" not in name}
        with contextlib.suppress(ValueError):  # of a known family, but with experts, say
            return read_architecture(config | ({"attn_pdrop": 0.0} if self._without_dropout else {}), 1)
        return None

    def description(self) -> dict[str, Any]:
        return {"kind": "huggingface", "path": self.origin, "config": self.config}

    def build(self) -> "nn.Module":
        return build_causal_lm(self.origin, self.config, without_dropout=self._without_dropout)

    def arguments(
        self, tokens: "Tensor", targets: "Tensor", num_targets: "Tensor | int", places: "Tensor | None" = None
    ) -> dict[str, Any]:
        from stretto.huggingface.loss import arguments_with_targets

        return arguments_with_targets(tokens, targets, num_targets, places)


class FolderSource(HuggingFaceSource):
    """A causal language model in a Hugging Face folder: config.json and weights as safetensors.

    Raises ValueError for a folder that lacks one of them, for a configuration that `parallelize` refuses whatever the
    grid, and without the package transformers. Nothing is ever downloaded, and no code of the folder is run.
    """

    starts_from_seed = False

    def __init__(self, folder: str, *, without_dropout: bool = False) -> None:
        """without_dropout: as of `HuggingFaceSource`."""
        self.folder = Path(os.path.expanduser(folder))
        require_transformers("path", folder)
        if not self.folder.is_dir():
            raise ValueError(f"model.path is {folder!r}, but there is no such folder{did_you_mean_file(self.folder)}")
        self.origin = str(self.folder)
        self.config = read_config(self.folder)
        self.weights_file: Path = require_weights(self.folder)
        self._without_dropout = without_dropout
        if refusal := refusal_of_attention_dropout({} if without_dropout else self.config):
            raise ValueError(f"{self.folder}: {refusal}, or set model.dropout=0")
        if refusal := refusal_of_quantization(self.config):
            raise ValueError(f"{self.folder}: {refusal}")

    def description(self) -> dict[str, Any]:
        return super().description() | {"path": str(self.folder.absolute())}

    def build(self) -> "nn.Module":
        from stretto.train.checkpoint.weights import untie_as_in

        model = build_causal_lm(self.origin, self.folder, without_dropout=self._without_dropout)
        untie_as_in(model, self.weights_file)
        return model

    def load_weights(self, model: "nn.Module") -> None:
        from stretto.train.checkpoint.weights import import_safetensors

        import_safetensors(model, self.weights_file)
