# SPDX-License-Identifier: Apache-2.0
"""Steps of many tokens: between the products of fused blocks, each rank of x has its part of the tokens.

Products gather them (`ops.all_gather_matmul`) and scatter their sums (`ops.matmul_reduce_scatter`) in place of summing
on every rank, so that residuals and norms are of the part. The number of tokens is filled up to a multiple of x. Behind
the last block's attention every rank has all tokens again, or those alone that the head reads.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.ops import all_gather_matmul, matmul_reduce_scatter


class TokenDivision:
    """The tokens of the running step. group: the ranks of x. least: tokens of a step from which on they are divided.
    can_leave_out: whether the last block may leave out tokens that the head does not read. read: int64, those that it
    reads (None: all).

    Hidden states are [1, tokens, features], and parts of them [1, tokens of the part, features].
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.least: int | None = None
        self.is_dividing = self.can_leave_out = False
        self.read: Tensor | None = None
        self._group = group
        self._tokens = 0
        self._stood_in: tuple[Tensor, Tensor] | None = None

    def begin(self, hidden: Tensor) -> Tensor:
        """Decide on a step, by the first block's input; returns this rank's part, or the input as it is."""
        self._tokens, self._stood_in = hidden.shape[:-1].numel(), None
        self.is_dividing = self.least is not None and self._tokens >= max(self.least, self._group.size())
        return self._fill(hidden).chunk(self._group.size())[self._group.rank()][None] if self.is_dividing else hidden

    def stand_in(self, part: Tensor) -> Tensor:
        """A tensor of all tokens' shape, without their memory, for a layer whose products gather `part` instead."""
        self._stood_in = part[:, :1].expand(1, self._tokens, -1), part
        return self._stood_in[0]

    def find_part(self, x: Tensor) -> Tensor | None:
        """The part that a tensor stands in for; None for any other one."""
        return self._stood_in[1] if self._stood_in is not None and self._stood_in[0] is x else None

    def gather_multiply(self, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product [1, tokens, n] of all ranks' parts."""
        gathered = all_gather_matmul(part[0].contiguous(), weight, self._group, bias=bias)
        return gathered[None, : self._tokens]

    def multiply_scatter(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's part of the sum over the ranks of a product of all tokens: [tokens of the part, n]."""
        self._stood_in = None
        return matmul_reduce_scatter(self._fill(x), weight, self._group, bias=bias)

    def leave_out(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Select what the last block goes on with: (attention, residuals) of the tokens that the head reads, on every
        rank. attended: of all tokens; residual: this rank's. Ends the division."""
        if self.is_dividing:
            self.is_dividing, self._stood_in = False, None
            part = residual[0].contiguous()
            whole = part.new_empty(len(part) * self._group.size(), part.shape[1])
            dist.all_gather_into_tensor(whole, part, group=self._group)
            residual = whole[None, : self._tokens]
        return (attended, residual) if self.read is None else (attended[:, self.read], residual[:, self.read])

    def _fill(self, hidden: Tensor) -> Tensor:
        """The rows of hidden states, with as many of zeros that the ranks divide them."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        missing = -len(rows) % self._group.size()
        return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows.contiguous()
