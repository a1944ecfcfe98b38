"""Random jagged batches of embedding look-ups, the same on all ranks, and what must come of them, in fp64."""

from dataclasses import dataclass

import torch

ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass
class Owner:
    """A rank's tables and the lookups for them."""

    tables: list
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


@dataclass
class Case:
    """A call of all ranks. mode: "sum" or "mean"; grad: of the whole output [batch, width]."""

    seed: int
    owners: list
    batch: int
    mode: str
    grad: torch.Tensor

    def expected(self, leaves=None):
        """fp64 [batch, width]. leaves: all ranks' tables in fp64, by default copies."""
        columns = []
        for place, owner in enumerate(self.owners):
            tables = leaves[place] if leaves else [table.double() for table in owner.tables]
            for number, table in enumerate(tables):
                columns.append(pool(owner, number, table, self.batch, self.mode))
        return torch.cat(columns, 1)

    def expected_gradients(self, rank):
        """fp64 gradients of a rank's tables."""
        leaves = [[table.double().requires_grad_() for table in owner.tables] for owner in self.owners]
        self.expected(leaves).backward(self.grad.double())
        return [leaf.grad for leaf in leaves[rank]]


def pool(owner, number, table, batch, mode):
    """fp64 [batch, dim]: one table's pooled rows."""
    bounds = owner.offsets[number * batch : (number + 1) * batch + 1].long()
    counts = bounds.diff()
    rows = table[owner.indices[bounds[0] : bounds[-1]].long()]
    if owner.weights is not None:
        rows = rows * owner.weights[bounds[0] : bounds[-1], None].double()
    bags = torch.repeat_interleave(torch.arange(batch, device=table.device), counts)
    pooled = table.new_zeros(batch, table.shape[1]).index_add(0, bags, rows)
    return pooled / counts.clamp(min=1)[:, None] if mode == "mean" else pooled


def make_case(seed, world, *, most_tables=3, most_rows=9, most_dim=5, most_samples=4, most_indices=5, dtypes=None):
    """A random case: unequal tables, some rows alone in theirs, empty bags, repeated indices, ranks without tables."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(0, high, (1,), generator=generator))

    dtype = (dtypes or list(ROUNDING))[draw(len(dtypes or ROUNDING))]
    index_type = (torch.int32, torch.int64)[draw(2)]
    batch, is_weighted, same_dim = world * (1 + draw(most_samples)), draw(3) == 0, draw(2) * 4 * (1 + draw(most_dim))
    owners = []
    for place in range(world):
        count = draw(most_tables + 1) if place else 1 + draw(most_tables)
        tables, indices, lengths = [], [], []
        for _ in range(count):
            rows, dim = 1 + draw(most_rows), same_dim or 4 * (1 + draw(most_dim))
            tables.append(torch.randn(rows, dim, generator=generator).to(dtype))
            lengths.append(torch.randint(0, 1 + draw(most_indices + 1), (batch,), generator=generator))
            indices.append(torch.randint(0, rows, (int(lengths[-1].sum()),), generator=generator))
        lengths, indices = torch.cat([torch.zeros(1), *lengths]), torch.cat([torch.zeros(0), *indices])
        weights = torch.randn(len(indices), generator=generator) if is_weighted else None
        owners.append(Owner(tables, indices.to(index_type), lengths.cumsum(0).to(index_type), weights))
    width = sum(table.shape[1] for owner in owners for table in owner.tables)
    grad = torch.randn(batch, width, generator=generator).to(dtype)
    return Case(seed, owners, batch, ("sum", "mean")[draw(2)], grad)


def is_close(result, expected, dtype):
    """Whether it is as close as rounding to dtype allows: sums are fp32."""
    scale = max(expected.abs().max().item(), 1e-3) if expected.numel() else 1.0
    return bool(((result.double() - expected).abs() <= ROUNDING[dtype] * scale).all())
