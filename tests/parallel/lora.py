# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters with the structure and the names that PEFT gives them, in plain PyTorch."""

import math
from typing import Any

import torch
from torch import Tensor, nn

ADAPTER = "default"


class LoraLinear(nn.Module):
    """A frozen linear (`base_layer`) and its adapter: base(x) + B(A(dropout(x))) * scaling."""

    def __init__(self, base_layer: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base_layer = base_layer
        inputs, outputs = base_layer.in_features, base_layer.out_features
        self.lora_dropout = nn.ModuleDict({ADAPTER: nn.Dropout(dropout) if dropout else nn.Identity()})
        self.lora_A = nn.ModuleDict({ADAPTER: nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({ADAPTER: nn.Linear(rank, outputs, bias=False)})
        self.lora_embedding_A, self.lora_embedding_B = nn.ParameterDict({}), nn.ParameterDict({})
        self.scaling = {ADAPTER: alpha / rank}
        nn.init.kaiming_uniform_(self.lora_A[ADAPTER].weight, a=math.sqrt(5))
        nn.init.normal_(self.lora_B[ADAPTER].weight, std=0.1)  # PEFT's are zeros at first: A would have no gradient

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = self.base_layer(x, *args, **kwargs)
        lora_a, lora_b = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        return result + lora_b(lora_a(self.lora_dropout[ADAPTER](x))) * self.scaling[ADAPTER]


class LoraModel(nn.Module):
    """Stand-in for what PEFT calls the tuner: it replaces linears within the model in place."""

    def __init__(self, model: nn.Module, targets: tuple[str, ...], rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.model = model
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for name, module in list(model.named_modules()):
            parent, _, child = name.rpartition(".")
            if child in targets:
                setattr(model.get_submodule(parent), child, LoraLinear(module, rank, alpha, dropout))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)


class PeftModel(nn.Module):
    """The outermost module: `base_model.model` is the model that was given."""

    def __init__(
        self,
        model: nn.Module,
        targets: tuple[str, ...] = ("q_proj", "v_proj"),
        rank: int = 4,
        alpha: float = 8.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.base_model = LoraModel(model, targets, rank, alpha, dropout)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)


def adapters(model: nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
