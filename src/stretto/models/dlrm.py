"""DLRM: a recommendation model (Naumov et al., 2019; Punniyamurthy et al., section 2.1): who clicks on what?

Its numbers go through the bottom MLP, its categories through embedding tables whose rows are pooled bag by bag; dot
products of every pair of these vectors, with the bottom MLP's vector beside them, go through the top MLP.

Nothing here knows about ranks. `stretto.parallel.distribute_tables` replaces `tables` by those of a rank, and says with
`reorder` in which order pooled vectors then stand.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.models.dlrm_config import DLRMConfig
from stretto.parallel.recsys.index_exchange import check_offsets


class EmbeddingTables(nn.ModuleList):
    """Tables whose rows are added up bag by bag.

    `tables(indices, offsets)`: indices [total] int64 or int32, all of the first table first, and offsets
    [tables x batch + 1] where each bag begins, as TorchRec's KeyedJaggedTensor has them; offsets may lie on the CPU,
    which saves waiting for a GPU. Returns [batch, tables x dim]. A bag may be empty: its sum is zero. ValueError for
    offsets of another number, and, where they are on the CPU, for ones that do not divide the indices.
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
    """Dot products of every pair of a sample's vectors.

    x [batch, dim] and pooled [batch, tables x dim] become [batch, dim + tables (tables + 1) / 2]: x itself, its product
    with each table's vector, and those of table i with table j < i.
    """

    def __init__(self, tables: int) -> None:
        super().__init__()
        self._order = tuple(range(tables))
        self._columns: tuple[Tensor, Tensor] | None = None

    def reorder(self, order: Sequence[int]) -> None:
        """From now on `pooled` has the tables in this order; what comes out stays as it was."""
        if sorted(order) != sorted(self._order):
            raise ValueError(f"{list(order)} is no order of {len(self._order)} tables")
        self._order, self._columns = tuple(order), None

    def forward(self, x: Tensor, pooled: Tensor) -> Tensor:
        vectors = pooled.view(len(x), len(self._order), x.shape[1])
        with_x, with_each_other = self._places(x.device)
        first = torch.bmm(vectors, x.unsqueeze(2)).squeeze(2)
        second = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        # The places select what is wanted in one copy, so that another order costs nothing.
        return torch.cat((x, first.index_select(1, with_x), second.index_select(1, with_each_other)), dim=1)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where the products stand: in [tables], and in [tables x tables]."""
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
    first table first; offsets [tables x batch + 1], where each bag begins, which may lie on the CPU. Returns logits
    [batch]. `model(..., labels=labels)`, 0 or 1 each, returns the mean binary cross-entropy, or the sum over
    `num_samples` where that is given: a rank divides its part by the whole batch's count.
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
        indices: Tensor,
        offsets: Tensor,
        *,
        labels: Tensor | None = None,
        num_samples: int | None = None,
    ) -> Tensor:
        # The tables first, so that the backward pass comes to them last: the MLPs' gradients may be summed meanwhile.
        pooled = self.tables(indices, offsets)
        if len(pooled) != len(dense):
            raise ValueError(f"dense has {len(dense)} samples, and offsets {len(pooled)}: both must be of one batch")
        logits = self.top(self.interaction(self.bottom(dense), pooled)).squeeze(1)
        if labels is None:
            return logits
        total = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        return total / (len(labels) if num_samples is None else num_samples)

    def reorder(self, order: Sequence[int]) -> None:
        """Say that `tables` returns its vectors in another order; parameters keep their meaning."""
        self.interaction.reorder(order)

    def _init_weights(self, module: nn.Module) -> None:
        """The published DLRM's: Glorot's for linears, and U(-1/sqrt(rows), 1/sqrt(rows)) for tables."""
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
