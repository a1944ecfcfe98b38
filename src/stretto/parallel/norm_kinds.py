"""Which formula a norm module computes, found by trying it: classes of the same name differ between models."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class NormKind:
    """y = (x - mean if centred) / sqrt(variance + eps) x (weight + weight_offset) + bias. eps None: the dtype's."""

    is_centred: bool
    eps: float | None
    weight_offset: float = 0.0

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        centre = x.mean(-1, keepdim=True) if self.is_centred else 0.0
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y = (x - centre) * torch.rsqrt((x - centre).square().mean(-1, keepdim=True) + eps)
        y = y * (weight + self.weight_offset)
        return y if bias is None else y + bias


def norm_kind(module: nn.Module, name: str) -> NormKind:
    """The formula of a norm over its last dim. Raises ValueError for a norm that computes something else."""
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return NormKind(True, module.eps)
    if type(module) is nn.RMSNorm and len(module.normalized_shape) == 1:
        return NormKind(False, module.eps)
    eps = next((getattr(module, key) for key in ("eps", "variance_epsilon", "epsilon") if hasattr(module, key)), None)
    weight = getattr(module, "weight", None)
    if isinstance(eps, float) and isinstance(weight, nn.Parameter) and weight.dim() == 1:
        for kind in (
            NormKind(False, eps),
            NormKind(False, eps, 1.0),
            NormKind(True, eps),
            NormKind(True, eps, 1.0),
        ):
            if _computes(module, kind):
                return kind
    raise ValueError(
        f"{name} ({type(module).__name__}) is not a LayerNorm or RMSNorm that Stretto knows how to split: "
        "its formula, tried on random numbers, is another"
    )


def _computes(module: nn.Module, kind: NormKind) -> bool:
    trial = copy.deepcopy(module).to_empty(device="cpu").to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        assert isinstance(trial.weight, Tensor)
        # small numbers, so that a different eps shows too
        x = 0.01 * torch.randn(4, trial.weight.shape[0], generator=generator) + 0.005
        try:
            actual = trial(x)
        except (TypeError, RuntimeError):  # it takes other arguments, so it is not one of these
            return False
        expected = kind.apply(x, trial.weight, getattr(trial, "bias", None))
    return isinstance(actual, Tensor) and torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)
