# SPDX-License-Identifier: Apache-2.0
"""Dropout whose mask depends on an element's global place: the same on any grid."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stretto.axes import LOSS
from stretto.parallel.grid import Grid
from stretto.parallel.layers.sharded_module import ShardedModule, check_features, note_features
from stretto.parallel.layers.token_shards import TokenShards

_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch takes."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64, which wraps; right shifts are made logical by a mask."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


class ParallelDropout(ShardedModule):
    """Dropout of activations [batch / (data x Z), ..., features / size of `axis`].

    The mask is a hash of a seed and the element's place in the whole activation. The seed is drawn from torch's default
    CPU generator, which ranks must have seeded alike; recomputation under activation checkpointing restores it. The
    input's batch is all that the rank has of the global batch, unless `micro_batch_of` says otherwise. With sequence
    sharding the input has this rank's tokens, [1, tokens / X, ...] (`tokens`; None inside attention and MLP,
    where sequences are whole).
    """

    def __init__(
        self, p: float, grid: Grid, axis: str, name: str = "this dropout", tokens: TokenShards | None = None
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.p = p
        self.grid = grid
        self.axis = axis
        self.name = name
        self.rows: int | None = None  # how many of the global batch this rank has; None: those of the input
        self.first = 0  # which of them is the input's first

    def forward(self, x: Tensor) -> Tensor:
        if self.grid.size("x") * self.grid.size("y") > 1:
            check_features(x, self.axis, self.name)
        if not self.training or self.p == 0.0:
            return x
        seed = int(torch.randint(0, 2**62, ()))  # also for an empty shard: keeps generators in step
        if x.numel() == 0:
            return x
        if x.dim() == 1:
            return self._drop(x.unsqueeze(0), seed).squeeze(0)
        return note_features(self._drop(x, seed), self.axis)

    def _drop(self, x: Tensor, seed: int) -> Tensor:
        columns = x.shape[-1]
        column = torch.arange(columns, device=x.device) + self.grid.coordinate(self.axis) * columns
        if self.tokens is None:
            rows, middle = x.shape[0], x[0].numel() // columns
            here = slice(0, rows * middle)
        else:
            (rows, middle), here = self.tokens.shape, self.tokens.here
        # Over LOSS: all ranks that see other tokens draw other parts of the mask.
        first = self.grid.coordinate(LOSS) * (self.rows or rows) + self.first
        position = torch.arange(here.start, here.stop, device=x.device) + first * middle
        element = position[..., None] * (columns * self.grid.size(self.axis)) + column
        bits = _mix(_mix(element * _signed(0x9E3779B97F4A7C15)) + seed)
        is_kept = (bits & ((1 << 53) - 1)).to(torch.float64) >= self.p * 2.0**53
        return x * is_kept.view(x.shape).to(x.dtype) / (1.0 - self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


@contextmanager
def micro_batch_of(model: nn.Module, rows: int, first: int) -> Iterator[None]:
    """Call `model`, and its backward pass, on a part of this rank's `rows` of the global batch, from row `first` on.

    Dropout then drops what it would have dropped of the whole batch at once, if torch's generator is seeded alike for
    each part: which rows share a micro-batch depends on the grid, and the masks do not.
    """
    dropouts = [module for module in model.modules() if isinstance(module, ParallelDropout)]
    for dropout in dropouts:
        dropout.rows, dropout.first = rows, first
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.rows, dropout.first = None, 0
