# SPDX-License-Identifier: Apache-2.0
"""Cuts sequences among the ranks of context: tensors of whole sequences into this rank's part of each."""

from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from stretto.ops.attention import list_chunks
from stretto.ops.attention.plan import Layout
from stretto.parallel.grid import Grid
from stretto.suggestions import require_type

Values = TypeVar("Values")


def cut_sequences(
    values: Values, grid: Grid, *, dim: int = 1, layout: Layout | None = None, documents: Tensor | None = None
) -> Values:
    """Cut this rank's part of sequences: of a tensor, or of all tensors in dicts, lists and tuples.

    A model that `parallelize` has put on a grid with context cuts its arguments itself. This is for what its caller
    compares with the logits that it returns, [batch, seq / context, vocab]: targets, say. Shift them before, so that
    the target of a part's last token is not lost.

    dim: the dim of the tokens in each tensor. layout: "zigzag" for causal models, "contiguous" for others and for those
    with layers of linear attention; by default that of the models on the grid, and "zigzag" before there are any.
    "balanced", of tensors [batch, seq, ...], for packed rows that a causal model is given with labels. documents: of
    these rows, as cu_seq_lens_q: where each begins, of all rows one after another, and the end of the last.

    Raises ValueError for lengths that the ranks cannot divide, with the nearest that they can, for other layouts, and
    for one that no model on the grid has.
    """
    require_type(grid, Grid, "grid")
    used = sorted(grid.context_layouts)
    if layout is None and len(used) > 1:
        raise ValueError(f"cut_sequences: models on this grid have both layouts, {' and '.join(used)}: choose one")
    layout = layout or (used[0] if used else "zigzag")
    if layout not in get_args(Layout) or (layout == "balanced") != (documents is not None):
        raise ValueError(
            f'cut_sequences: layout must be "zigzag" or "contiguous", or "balanced" with documents, not {layout!r} '
            f"with{'out' if documents is None else ''} documents"
        )
    if layout != "contiguous" and used == ["contiguous"]:
        raise ValueError(
            f'cut_sequences: layout is "{layout}", but the models on this grid have contiguous parts, as linear '
            'attention and attention in both directions need: layout="contiguous" would do'
        )
    ranks, rank = grid.size("context"), grid.coordinate("context")

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or documents is None or ranks == 1:
            return cut_part(leaf, ranks, rank, layout, dim) if isinstance(leaf, Tensor) else leaf
        check_length(leaf.shape[1], ranks, layout)
        return take_places(leaf, find_places(list_documents(documents, *leaf.shape[:2]), rank, ranks))

    return tree_map(cut, values)


def check_length(length: int, ranks: int, layout: Layout) -> None:
    """Raise ValueError, with the nearest lengths that would do, unless the ranks of context can divide a sequence."""
    parts = ranks if layout == "contiguous" or ranks == 1 else 2 * ranks
    if length % parts or not length:
        below, above = length // parts * parts, (length // parts + 1) * parts
        nearest = f"{below} and {above} are the nearest that are" if below else f"{above} is the nearest that is"
        raise ValueError(
            f"sequences of {length} tokens are not divisible by {parts}, the number of parts that context={ranks} cuts "
            f"them into: {nearest} (a collator's pad_to_multiple_of={parts} pads them)"
        )


def cut_part(whole: Tensor, ranks: int, rank: int, layout: Layout, dim: int) -> Tensor:
    """A rank's part of the dim of a tensor's tokens."""
    if ranks == 1:
        return whole
    check_length(whole.shape[dim], ranks, layout)
    chunks = list_chunks(layout, rank, ranks, whole.shape[dim] // ranks)
    return torch.cat([whole.narrow(dim, chunk.start, chunk.stop - chunk.start) for chunk in chunks], dim)


def list_documents(documents: Tensor, rows: int, length: int) -> list[tuple[int, ...]]:
    """Find where the documents of each row begin, and its length. documents: of all rows, one after another."""
    return [tuple(documents_of_row(documents.cpu(), row, length).tolist()) for row in range(rows)]


def documents_of_row(documents: Tensor, row: int, length: int) -> Tensor:
    """Find where the documents of one row of such a length begin, and its length."""
    return documents[(documents >= row * length) & (documents <= (row + 1) * length)] - row * length


def find_places(rows: Sequence[tuple[int, ...]], rank: int, ranks: int) -> Tensor:
    """The places of a rank's tokens in each row of packed documents, in the balanced layout: int64 [rows, part]."""
    chunks = [list_chunks("balanced", rank, ranks, each[-1] // ranks, each) for each in rows]
    return torch.stack([torch.cat([torch.arange(*chunk, device="cpu") for chunk in each]) for each in chunks])


def take_places(whole: Tensor, places: Tensor) -> Tensor:
    """The tokens at places [rows or 1, part] of a tensor [rows or 1, seq, ...]."""
    rows = torch.arange(max(len(whole), len(places)), device=whole.device)
    return whole.expand(len(rows), *whole.shape[1:])[rows[:, None], places.to(whole.device)]
