"""The learning rate as a function of the step."""

import math


def learning_rate(step: int, *, lr: float, min_lr: float, warmup_steps: int, steps: int) -> float:
    """The learning rate of `step` (1 is the first): linear warm-up to `lr`, then a cosine down to `min_lr`.

    The last step of the warm-up and the first after it take `lr` itself. The cosine reaches `min_lr` when
    training ends, after `steps`: no step is spent at a rate of zero.
    """
    if step <= warmup_steps:
        return lr * (step / warmup_steps)
    progress = min((step - 1 - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * share + min_lr * (1.0 - share)
