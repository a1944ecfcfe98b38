# SPDX-License-Identifier: Apache-2.0
"""Random jagged batches of embedding look-ups, the same on all ranks, and what must come of them, in fp64."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from stretto import ops

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
        """fp64 [batch, width], computed on the CPU: of a GPU in parts, libraries' kernels are not beyond doubt.

        leaves: all ranks' tables in fp64 on the CPU, by default copies.
        """
        columns = []
        for place, owner in enumerate(self.owners):
            tables = leaves[place] if leaves else [table.double().cpu() for table in owner.tables]
            for number, table in enumerate(tables):
                columns.append(pool(owner, number, table, self.batch, self.mode))
        return torch.cat(columns, 1).to(self.grad.device)

    def expected_gradients(self, rank):
        """fp64 gradients of a rank's tables."""
        leaves = [[table.double().cpu().requires_grad_() for table in owner.tables] for owner in self.owners]
        self.expected(leaves).backward(self.grad.double())
        return [leaf.grad.to(self.grad.device) for leaf in leaves[rank]]


def pool(owner, number, table, batch, mode):
    """fp64 [batch, dim]: one table's pooled rows."""
    bounds = owner.offsets[number * batch : (number + 1) * batch + 1].long().to(table.device)
    counts = bounds.diff()
    rows = table[owner.indices[bounds[0] : bounds[-1]].long().to(table.device)]
    if owner.weights is not None:
        rows = rows * owner.weights[bounds[0] : bounds[-1], None].double().to(table.device)
    bags = torch.repeat_interleave(torch.arange(batch, device=table.device), counts)
    pooled = table.new_zeros(batch, table.shape[1]).index_add(0, bags, rows)
    return pooled / counts.clamp(min=1)[:, None] if mode == "mean" else pooled


@dataclass
class Kind:
    """Shapes and options that cases have in common. shapes: (rows, dim) of each rank's tables."""

    shapes: list
    batch: int
    dtype: torch.dtype
    index_type: torch.dtype
    mode: str
    is_weighted: bool
    most_indices: int


def fill_case(kind, seed, device="cpu"):
    """A case of a kind: random tables, jagged bags (some empty), indices (many again) and gradient."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator, device=device)

    owners = []
    for shapes in kind.shapes:
        tables, indices, lengths = [], [torch.zeros(0, device=device)], [torch.zeros(1, device=device)]
        for rows, dim in shapes:
            tables.append(torch.randn(rows, dim, generator=generator, device=device).to(kind.dtype))
            lengths.append(draw(1 + int(draw(kind.most_indices + 1, 1)), kind.batch))
            indices.append(draw(rows, int(lengths[-1].sum())))
        indices, offsets = torch.cat(indices).to(kind.index_type), torch.cat(lengths).cumsum(0).to(kind.index_type)
        weights = torch.randn(len(indices), generator=generator, device=device) if kind.is_weighted else None
        owners.append(Owner(tables, indices, offsets, weights))
    width = sum(dim for shapes in kind.shapes for _, dim in shapes)
    grad = torch.randn(kind.batch, width, generator=generator, device=device).to(kind.dtype)
    return Case(seed, owners, kind.batch, kind.mode, grad)


def make_case(seed, world, *, most_rows=9, most_indices=5, dtypes=None):
    """A random case of a random kind: unequal tables, some of one row, and ranks without any."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(0, high, (1,), generator=generator))

    dtype = (dtypes or list(ROUNDING))[draw(len(dtypes or ROUNDING))]
    same_dim = draw(2) * 4 * (1 + draw(5))
    shapes = [
        [(1 + draw(most_rows), same_dim or 4 * (1 + draw(5))) for _ in range(draw(4) if place else 1 + draw(3))]
        for place in range(world)
    ]
    batch, index_type = world * (1 + draw(4)), (torch.int32, torch.int64)[draw(2)]
    kind = Kind(shapes, batch, dtype, index_type, ("sum", "mean")[draw(2)], draw(3) == 0, most_indices)
    return fill_case(kind, seed)


def is_close(result, expected, dtype):
    """True if it is as close as rounding to dtype allows, of sums in fp32 whose terms are about 1, and may cancel."""
    scale = expected.abs().max().item() if expected.numel() else 1.0
    bound = ROUNDING[dtype] * scale + ROUNDING[torch.float32]
    return bool(((result.double() - expected).abs() <= bound).all())


def look_up_case(case, tables=None, **options):
    """This rank's output of a case."""
    own = case.owners[dist.get_rank()]
    tables = own.tables if tables is None else tables
    return ops.embedding_all_to_all(
        own.indices,
        own.offsets,
        tables,
        weights=own.weights,
        mode=case.mode,
        batch=case.batch,
        name=str(case.seed),
        **options,
    )


def own_rows(case, whole):
    """This rank's rows of what is of the global batch."""
    rows = case.batch // dist.get_world_size()
    return whole[dist.get_rank() * rows : (dist.get_rank() + 1) * rows]
