"""Whether a loss module computes what the sharded cross-entropy does, found by trying it: classes have options."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED_TARGET = -100


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
    """What the module makes of them; None if it takes something else."""
    for more in ((), ((targets != IGNORED_TARGET).sum(),)):
        try:
            found = copy.deepcopy(module).to("cpu")(logits, targets, *more)
        except (TypeError, ValueError, IndexError, RuntimeError):
            continue
        return found if isinstance(found, Tensor) else None
    return None
