# SPDX-License-Identifier: Apache-2.0
"""Embeddings, with the vocabulary over x, hidden features over y, and rows over z; and checks of ids."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.parallel.comm.autograd import is_asked_for, once_differentiable, scale_gradient
from stretto.parallel.comm.collectives import all_reduce
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.layers.sharded_module import ShardedModule, note_features
from stretto.parallel.layers.token_shards import TokenShards
from stretto.parallel.layers.weight_shard import WeightShard
from stretto.parallel.layout import local
from stretto.parallel.precision import Precision


class _VocabularyLookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        parameter: Tensor,
        first_row: int,
        padding_row: int,
        weight: WeightShard,
        group: Any,
        tokens: TokenShards | None,
    ) -> Tensor:
        parts = weight.find_parts(parameter)
        if parts is not None:
            from stretto.ops.embedding.move_rows import look_up_rows  # here: Triton may be missing without GPUs

            found = look_up_rows(ids, parts.addresses, first_row, weight.rows, parts.own)
        else:
            rows = weight.gather(parameter, is_recorded=bool(ctx.next_functions)).rows
        is_elsewhere: Tensor | None = None
        if group.size() > 1:
            ids = ids - first_row
            is_elsewhere = (ids < 0) | (ids >= weight.rows)
            ids = ids.masked_fill(is_elsewhere, 0)
        if parts is None:
            found = F.embedding(ids, rows)
            if is_elsewhere is not None:
                found.masked_fill_(is_elsewhere.unsqueeze(-1), 0)
        ctx.weight, ctx.padding_row, ctx.parameter, ctx.tokens = weight, padding_row, parameter, tokens
        ctx.save_for_backward(ids, is_elsewhere)
        return all_reduce(found, group) if tokens is None else tokens.scatter_sum(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not is_asked_for(ctx, 1):
            return (None,) * 7
        ids, is_elsewhere = ctx.saved_tensors
        weight: WeightShard = ctx.weight
        if ctx.tokens is not None:
            gradient = ctx.tokens.gather_rows(gradient).view(*ids.shape, gradient.shape[-1])
        if is_elsewhere is not None:
            gradient = gradient.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        rows = torch.ops.aten.embedding_dense_backward(gradient, ids, weight.rows, ctx.padding_row, False)
        weight.start_reduction(ctx.parameter, rows)
        return None, None, None, None, None, None, None


class _WholeSizes:
    """The sizes of an embedding's whole weight, under nn.Embedding's names: models read them in their own code."""

    weight: nn.Parameter

    @property
    def num_embeddings(self) -> int:
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.weight.shape[1]


class ParallelEmbedding(_WholeSizes, ShardedModule):
    """A token embedding [vocab, hidden]: each x rank looks up its part of the vocabulary; the sum over x has all of it.

    ids [...] int64 -> [..., hidden / Y], or, with sequence sharding, [1, tokens / X, hidden / Y]. A vocabulary that x
    does not divide leaves the last ranks fewer rows.
    `padding_idx`: a row that gets no gradient, as in nn.Embedding. `scale` multiplies what is looked up (Gemma).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        first_row: int,
        plan: WeightShard,
        group: dist.ProcessGroup,
        padding_idx: int | None,
        tokens: TokenShards | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(plan.gradients)
        self.scale = scale
        self.tokens = tokens
        self.weight = weight
        self.plan = plan
        self.group = group
        self.first_row = first_row
        self.padding_idx = padding_idx
        # -1 means to the kernel that sums gradients that there is no such row
        padding_row = -1 if padding_idx is None else padding_idx - first_row
        self.padding_row = padding_row if 0 <= padding_row < plan.rows else -1

    @torch.compiler.disable
    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.weight.shape[0], "token id")
        if self.tokens is not None:
            self.tokens.note(ids.shape)
        whose = self.first_row, self.padding_row, self.plan, self.group, self.tokens
        return self.finish(_VocabularyLookup.apply(ids, self.weight, *whose))

    def finish(self, found: Tensor) -> Tensor:
        """The output, of the rows that were looked up."""
        if self.scale != 1.0:
            found = found * torch.tensor(self.scale, dtype=found.dtype, device="cpu")
        return note_features(found, "y")


class ParallelPositions(_WholeSizes, ShardedModule):
    """A small embedding [positions, hidden], replicated but for its hidden features, which y splits.

    ids [...] int64 -> [..., hidden / Y]. With sequence sharding, ids are those of a sequence or of the whole batch, and
    the result has this rank's tokens.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        precision: Precision,
        padding_idx: int | None,
        gradients: GradientReducer,
        tokens: TokenShards | None = None,
    ) -> None:
        super().__init__(gradients)
        self.tokens = tokens
        self.weight = weight
        self.precision = precision
        self.padding_idx = padding_idx

    @torch.compiler.disable
    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.weight.shape[0], "position")
        if self.tokens is not None:
            ids = ids.expand(self.tokens.shape).reshape(1, -1)[:, self.tokens.here]
        assert self.gradients is not None
        weight = scale_gradient(local(self.weight), self.gradients.forward_scale(self.weight))
        return F.embedding(ids, self.precision.cast(weight), self.padding_idx)


def check_ids(ids: Tensor, limit: int, what: str, ignored: int | None = None) -> None:
    """Raise ValueError (on CUDA: fail the kernel that asserts it, later) unless 0 <= ids < limit.

    Each rank looks up only the rows that it owns, so without this an id out of range would silently become zeros.
    """
    is_wrong = (ids < 0) | (ids >= limit)
    if ignored is not None:
        is_wrong = is_wrong & (ids != ignored)
    if ids.device.type == "cuda":
        # no .item() here: it would make the host wait for the device
        torch._assert_async(~is_wrong.any(), f"a {what} is outside [0, {limit})")
    elif is_wrong.any():
        raise ValueError(f"{what} {ids[is_wrong][0].item()} is outside [0, {limit})")
