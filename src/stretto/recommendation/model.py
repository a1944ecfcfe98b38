# SPDX-License-Identifier: Apache-2.0
"""DLRM: a recommendation model that predicts clicks (Naumov et al., 2019; Punniyamurthy et al., section 2.1).

The bottom MLP reads the dense features, and embedding tables pool the rows of the categorical features' bags. The dot
products of all pairs of these vectors, concatenated with the bottom MLP's vector, are the input of the top MLP.

The model knows nothing about ranks. `distribute_tables` replaces `tables` by a rank's tables, and calls `reorder` with
the order of the pooled vectors that they return.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.recommendation.index_exchange import check_offsets
from stretto.recommendation.model_config import DLRMConfig


class EmbeddingTables(nn.ModuleList):
    """Embedding tables with sum pooling over bags.

    `tables(indices, offsets)`: indices [total], int64 or int32, those of the first table first; offsets
    [tables x batch + 1], the start of each bag, as in TorchRec's KeyedJaggedTensor. Offsets may be on the CPU, which
    saves waiting for a GPU. Returns [batch, tables x dim]; the sum of an empty bag is zero. Raises ValueError for a
    wrong number of offsets and, if they are on the CPU, for offsets that do not fit the indices.
    """

    def __init__(self, rows: Sequence[int], dim: int) -> None:
        super().__init__(
            nn.EmbeddingBag(count, dim, mode="sum", sparse=True, include_last_offset=True) for count in rows
        )

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        batch = check_offsets(indices, offsets, len(self), least=0)
        ends = offsets[::batch].tolist() if batch else [0] * (len(self) + 1)
        offsets = offsets.to(indices)
        pooled = []
        for table, bag in enumerate(self):
            of_table = offsets[table * batch : (table + 1) * batch + 1] - ends[table]
            pooled.append(bag(indices[ends[table] : ends[table + 1]], of_table))
        return torch.cat(pooled, dim=1)


class DotInteraction(nn.Module):
    """Dot products of all pairs of a sample's vectors.

    Takes x [batch, dim] and pooled [batch, tables x dim]. Returns [batch, dim + tables (tables + 1) / 2]: x itself, its
    product with each table's vector, and the products of tables i and j < i.
    """

    def __init__(self, tables: int) -> None:
        super().__init__()
        self._order = tuple(range(tables))
        self._columns: tuple[Tensor, Tensor] | None = None

    def reorder(self, order: Sequence[int]) -> None:
        """Set the order of the tables in `pooled`. The output's order does not change."""
        if sorted(order) != sorted(self._order):
            raise ValueError(f"{list(order)} is no order of {len(self._order)} tables")
        self._order, self._columns = tuple(order), None

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        vectors = pooled.view(len(x), len(self._order), x.shape[1])
        with_x, with_each_other = self._places(x.device)
        first = torch.bmm(vectors, x.unsqueeze(2)).squeeze(2)
        second = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        # The columns are selected in one copy, so another order of the tables costs nothing.
        return torch.cat((x, first.index_select(1, with_x), second.index_select(1, with_each_other)), dim=1)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The columns of the products in output order: in [tables], and in [tables x tables]."""
        if self._columns is None or self._columns[0].device != device:
            tables = len(self._order)
            place = {table: column for column, table in enumerate(self._order)}
            pairs = [place[i] * tables + place[j] for i in range(tables) for j in range(i)]
            alone = torch.tensor([place[table] for table in range(tables)], device=device)
            self._columns = alone, torch.tensor(pairs, dtype=torch.int64, device=device)
        return self._columns


class DLRM(nn.Module):
    """A deep learning recommendation model.

    `model(dense, indices, offsets)`: dense [batch, config.dense]; indices [total], int32 or int64, all bags of the
    first table first; offsets [tables x batch + 1], the start of each bag, which may be on the CPU. Distributed tables
    also take, in place of indices, an exchange that has begun (`begin_exchange`), and no offsets. Returns logits
    [batch]. `model(..., labels=labels)`, 0 or 1 each, returns the mean binary cross-entropy, or the sum divided by
    `num_samples` if that is given: a rank divides its part by the size of the whole batch.
    """

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.config = config
        self.bottom = _mlp(config.dense, config.bottom, ends_with_relu=True)
        self.tables: nn.Module = EmbeddingTables(config.rows, config.dim)
        self.interaction = DotInteraction(config.tables)
        self.top = _mlp(config.dim + config.interactions, config.top, ends_with_relu=False)
        self.apply(self._init_weights)

    def forward(
        self,
        dense: Tensor,
        indices: Any,
        offsets: Tensor | None,
        *,
        labels: Tensor | None = None,
        num_samples: int | None = None,
    ) -> Tensor:
        # Tables run first, so that their backward pass runs last and overlaps with the reduction of MLP gradients.
        pooled = self.tables(indices, offsets)
        if len(pooled) != len(dense):
            raise ValueError(f"dense has {len(dense)} samples, and offsets {len(pooled)}: both must be of one batch")
        logits = self.top(self.interaction(self.bottom(dense), pooled)).squeeze(1)
        if labels is None:
            return logits
        total = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        return total / (len(labels) if num_samples is None else num_samples)

    def reorder(self, order: Sequence[int]) -> None:
        """Set the order in which `tables` returns its vectors. The parameters' meaning does not change."""
        self.interaction.reorder(order)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the published DLRM: Glorot's for linears, U(-1/sqrt(rows), 1/sqrt(rows)) for tables."""
        if isinstance(module, nn.Linear):
            out, into = module.weight.shape
            nn.init.normal_(module.weight, std=(2 / (into + out)) ** 0.5)
            nn.init.normal_(module.bias, std=out**-0.5)
        elif isinstance(module, nn.EmbeddingBag):
            bound = module.num_embeddings**-0.5
            nn.init.uniform_(module.weight, -bound, bound)


def _mlp(width: int, widths: Sequence[int], *, ends_with_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for next_width in widths:
        layers += [nn.Linear(width, next_width), nn.ReLU()]
        width = next_width
    return nn.Sequential(*(layers if ends_with_relu else layers[:-1]))
