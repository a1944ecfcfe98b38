# SPDX-License-Identifier: Apache-2.0
"""Detects which formula a norm or loss computes, by running it: classes of one name differ between models."""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.execution import IGNORED_TARGET


class UnknownRolesError(ValueError):
    """Raised where nothing says how x and y split some part of a model. Without these axes it can be sharded all the
    same (`stretto.parallel.blocks`)."""


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
    """The formula of a norm over its last dim. Raises ValueError for any other computation."""
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        return NormKind(True, module.eps)
    if type(module) is nn.RMSNorm and len(module.normalized_shape) == 1:
        return NormKind(False, module.eps)
    weight = getattr(module, "weight", None)
    if isinstance(weight, nn.Parameter) and weight.dim() == 1:
        for eps in _possible_eps(module):
            for kind in (
                NormKind(False, eps),
                NormKind(False, eps, 1.0),
                NormKind(True, eps),
                NormKind(True, eps, 1.0),
            ):
                if _computes(module, kind):
                    return kind
    raise UnknownRolesError(
        f"{name} ({type(module).__name__}) is not a LayerNorm or RMSNorm that Stretto knows how to split: "
        "its formula, tried on random numbers, is another"
    )


def _possible_eps(module: nn.Module) -> list[float]:
    """Find what a norm may add to the variance: an attribute, or a number in the code of its methods."""
    named = [getattr(module, key, None) for key in ("eps", "variance_epsilon", "epsilon")]
    found = [*named, *vars(module).values()]
    for function in vars(type(module)).values():
        if inspect.isfunction(function):
            found += [*function.__code__.co_consts, *(function.__defaults__ or ())]
    return list(dict.fromkeys(value for value in found if isinstance(value, float) and 0 <= value < 0.1))


def _computes(module: nn.Module, kind: NormKind) -> bool:
    trial = copy.deepcopy(module).to_empty(device="cpu").to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu"))
        assert isinstance(trial.weight, Tensor)
        # small numbers, so that a different eps shows too
        x = 0.01 * torch.randn(4, trial.weight.shape[0], generator=generator, device="cpu") + 0.005
        try:
            actual = trial(x)
        except (TypeError, RuntimeError):  # it takes other arguments, so it is not one of these
            return False
        expected = kind.apply(x, trial.weight, getattr(trial, "bias", None))
    return isinstance(actual, Tensor) and torch.allclose(actual, expected.type_as(actual), rtol=1e-4, atol=1e-5)


def embedding_scale(module: nn.Embedding, name: str) -> float:
    """Return the factor of an embedding's rows: 1.0 for nn.Embedding, Gemma's sqrt(hidden) for its subclass.

    A subclass is run on its rows. Raises UnknownRolesError for one that computes something else than its rows times a
    number.
    """
    if type(module) is nn.Embedding:
        return 1.0
    scale = getattr(module, "scalar_embed_scale", None)
    if isinstance(scale, float):
        trial = copy.copy(module)
        trial._parameters = {"weight": nn.Parameter(torch.randn(3, 4, device="cpu"))}
        trial._buffers = {"embed_scale": torch.tensor(scale, device="cpu")}
        ids = torch.tensor([[2, 0], [1, 2]], device="cpu")
        with torch.no_grad():
            found = trial(ids)
            if torch.allclose(found, (trial.weight[ids] * scale).type_as(found), rtol=1e-4):
                return float(torch.tensor(scale, device="cpu"))  # rounded, as the module's own buffer is
    raise UnknownRolesError(
        f"{name} is a {type(module).__name__}, but the role 'embedding' takes exactly Embedding, or one whose rows a "
        "number scalar_embed_scale multiplies: a subclass may compute something else"
    )


def check_loss(module: nn.Module, name: str, vocab: int) -> None:
    """Raise ValueError unless a module is the mean cross-entropy over the targets that are not -100.

    It is called with logits of `vocab` and targets, flat or [batch, seq], and with the number of targets if it wants
    that. One that smooths its labels, weighs classes, ignores another target or adds up is refused: the sharded loss
    in its place would do none of it.
    """
    for logits, targets in _trials(vocab):
        actual = _tried(module, logits, targets)
        if actual is not None:
            flat = logits.flatten(0, -2), targets.flatten()
            expected = F.cross_entropy(*flat, ignore_index=IGNORED_TARGET)
            if actual.shape == expected.shape and torch.allclose(actual.to(expected.dtype), expected, rtol=1e-4):
                return
            break
    raise ValueError(
        f"{name} ({type(module).__name__}) has the role 'loss', but is not the mean cross-entropy over targets that "
        "are not -100: what it computes, tried on random numbers, is something else. Give it no role, have the model "
        "return its logits, and compute the loss from them with stretto.parallel.mean_over_batch"
    )


def _trials(vocab: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and targets of six tokens: some ignored, where a loss knows of that."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, vocab, generator=generator, device="cpu")
    targets = torch.arange(6, device="cpu").view(2, 3) % vocab  # 0 too, which some pad with
    some_ignored = targets.clone()
    some_ignored[1, 1:] = IGNORED_TARGET
    for wanted in (some_ignored, targets):
        yield logits.flatten(0, 1), wanted.flatten()
        yield logits, wanted


@torch.no_grad()
def _tried(module: nn.Module, logits: Tensor, targets: Tensor) -> Tensor | None:
    """The module's output for them; None if its signature differs."""
    for more in ((), ((targets != IGNORED_TARGET).sum(),)):
        try:
            found = copy.deepcopy(module).to("cpu")(logits, targets, *more)
        except (TypeError, ValueError, IndexError, RuntimeError):
            continue
        return found if isinstance(found, Tensor) else None
    return None
