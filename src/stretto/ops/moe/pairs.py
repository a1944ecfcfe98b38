# SPDX-License-Identifier: Apache-2.0
"""The pairs of a token and a rank that has experts of it: what a dispatch sends, one row each.

On GPUs two kernels find them: torch's operators would be some thirty launches, which cost the host more than the
exchange takes. Pairs are sorted by rank, then by token, so that what a rank receives of a source is contiguous.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.ops.moe.permutation import sort_by_expert
from stretto.tiles.launches import launch_cached

TOKENS = tl.constexpr(128)
"""Tokens of a program of the kernels here."""
_BLOCKS = tl.constexpr(256)  # whose numbers are added at once


class ExpertParts(NamedTuple):
    """Ranks that have parts of the same experts, as ranks of x do. Both tensors are int64.

    owners: [ranks], of which of the experts' ranks each one has a part. holders: [experts' ranks, parts], its parts'.
    """

    owners: Tensor
    holders: Tensor


@dataclass(frozen=True)
class Pairs:
    """This rank's pairs of its tokens with `ranks` ranks.

    ids: topk_ids [t, k]; each rank has `local` of the experts. numbers: int64 [t, ranks], the pair of each token and
    rank; is_pair: bool [t, ranks], whether there is one. tokens: int64 [t * min(k, ranks)], the token of each pair, and
    words: int32 [., k or 2 k], its experts as its rank numbers them (`local` for those that it does not have), then its
    weights as bits of fp32, if they are sent; both arbitrary beyond the last pair. counts: int32 [ranks,
    2], pairs with each rank, and choices. parts: None where each expert is whole on a rank.
    """

    ids: Tensor
    local: int
    numbers: Tensor
    is_pair: Tensor
    tokens: Tensor
    words: Tensor
    counts: Tensor
    parts: ExpertParts | None = None

    def order_choices(self) -> Tensor:
        """The position of each choice among all of them, sorted by rank, then token and slot: int64 [t, k]."""
        ranks = self.counts.shape[0] if self.parts is None else self.parts.holders.shape[0]
        return sort_by_expert(_find_owners(self.ids, self.local, ranks), ranks).positions

    def order_parts(self, parts: ExpertParts) -> Tensor:
        """The positions of each choice's parts, as `order_choices`, of all ranks: int64 [t * k, parts]."""
        choices, holders = self.counts[:, 1], parts.holders
        before = choices.cumsum(0) - choices
        of_owners = choices.index_select(0, holders[:, 0])
        shifts = before[holders] - (of_owners.cumsum(0) - of_owners)[:, None]  # from places of whole experts' ranks
        owners = _find_owners(self.ids, self.local, len(holders)).reshape(-1).clamp(max=len(holders) - 1)
        return self.order_choices().reshape(-1, 1) + shifts.index_select(0, owners)

    def repeat(self, parts: ExpertParts) -> "Pairs":
        """The pairs with the ranks that have parts of experts, of these with ranks that would have them whole."""
        counts = self.counts.index_select(0, parts.owners)
        ends, own_ends = counts[:, 0].cumsum(0), self.counts[:, 0].cumsum(0)
        shifts = ends - counts[:, 0] - (own_ends - self.counts[:, 0]).index_select(0, parts.owners)
        numbers = (self.numbers.index_select(1, parts.owners) + shifts).clamp(min=0)
        places = torch.arange(len(self.tokens) * parts.holders.shape[1], device=ends.device)
        ranks = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
        found = (places - shifts.index_select(0, ranks)).clamp(0, max(len(self.tokens) - 1, 0))
        return replace(
            self,
            numbers=numbers,
            is_pair=self.is_pair.index_select(1, parts.owners),
            tokens=self.tokens.index_select(0, found),
            words=self.words.index_select(0, found),
            counts=counts,
            parts=parts,
        )


def find_pairs(topk_ids: Tensor, topk_weights: Tensor | None, num_experts: int, ranks: int) -> Pairs:
    """The pairs of topk_ids [t, k], without a wait for the device. Ids that are no experts belong to none."""
    find = _find_by_kernels if topk_ids.is_cuda else _find_by_torch
    return find(topk_ids.contiguous(), topk_weights, num_experts // ranks, ranks)


def unpack_words(words: Tensor, topk_weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The experts, a view, and the weights if there are any, of `Pairs.words` that were found with such weights."""
    if topk_weights is None:
        return words, None
    experts, weights = words.chunk(2, 1)
    weights = weights.clone(memory_format=torch.contiguous_format)  # `contiguous` may be a view of staging
    return experts, weights.view(torch.float32).to(topk_weights.dtype)


def _find_owners(ids: Tensor, local: int, ranks: int) -> Tensor:
    """The rank of each choice, int64 [t, k]; `ranks` for an id that is no expert."""
    return torch.where((ids >= 0) & (ids < local * ranks), ids // local, ranks).to(torch.int64)


def _find_by_torch(ids: Tensor, weights: Tensor | None, local: int, ranks: int) -> Pairs:
    t, k = ids.shape
    owners = _find_owners(ids, local, ranks)
    hits = owners.new_zeros(t, ranks + 1).scatter_add_(1, owners, torch.ones_like(owners))[:, :ranks]
    is_pair = hits > 0
    counts = torch.stack((is_pair.sum(0), hits.sum(0)), 1)
    before = counts[:, 0].cumsum(0) - counts[:, 0]
    numbers = (is_pair.cumsum(0) - 1 + before).clamp(min=0)
    capacity = t * min(k, ranks)
    places = torch.where(is_pair, numbers, capacity).reshape(-1)
    found = owners.new_zeros(2, capacity + 1)
    found[0].scatter_(0, places, torch.arange(t, device=ids.device).repeat_interleave(ranks))
    found[1].scatter_(0, places, torch.arange(ranks, device=ids.device).repeat(t))
    tokens, of_ranks = found[:, :capacity]
    experts = ids.index_select(0, tokens) - of_ranks[:, None] * local
    words = torch.where((experts >= 0) & (experts < local), experts, local).to(torch.int32)
    if weights is not None:
        words = torch.cat((words, weights.float().index_select(0, tokens).view(torch.int32)), 1)
    return Pairs(ids, local, numbers, is_pair, tokens, words, counts.to(torch.int32))


def _find_by_kernels(ids: Tensor, weights: Tensor | None, local: int, ranks: int) -> Pairs:
    (t, k), device = ids.shape, ids.device
    blocks = triton.cdiv(t, TOKENS.value)
    capacity = t * min(k, ranks)
    numbers = torch.empty(t, ranks, dtype=torch.int64, device=device)
    is_pair = torch.empty(t, ranks, dtype=torch.bool, device=device)
    tokens = torch.empty(capacity, dtype=torch.int64, device=device)
    words = torch.empty(capacity, k if weights is None else 2 * k, dtype=torch.int32, device=device)
    counts = (torch.empty if t else torch.zeros)(ranks, 2, dtype=torch.int32, device=device)
    if t:
        of_blocks = torch.empty(blocks, ranks, 2, dtype=torch.int32, device=device)
        bits = None if weights is None else weights.float().contiguous().view(torch.int32)
        found = numbers, is_pair.view(torch.uint8), tokens, words, counts
        with torch.cuda.device_of(ids):
            launch_cached(count_pairs, blocks, ids, of_blocks, t, local, ranks, K=k, num_warps=4)
            launch_cached(place_pairs, blocks, ids, bits, of_blocks, *found, t, local, ranks, K=k, num_warps=4)
    return Pairs(ids, local, numbers, is_pair, tokens, words, counts)


@triton.jit
def _load_owners(ids, t, local, ranks, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tokens, slots, which of both there are, ids and their ranks [tokens, slots]) of this program.

    The rank of what is no expert is `ranks`.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.arange(0, triton.next_power_of_2(K))
    mask = (token < t)[:, None] & (slot < K)[None, :]
    found = tl.load(ids + token[:, None].to(tl.int64) * K + slot[None, :], mask=mask, other=-1).to(tl.int64)
    is_expert = (found >= 0) & (found < local * ranks)
    return token, slot, mask, found, tl.where(is_expert, found // local, ranks)


@triton.jit
def count_pairs(ids, of_blocks, t, local, ranks, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """of_blocks[program, rank]: the numbers of pairs and of choices of TOKENS tokens with each rank, int32 [., ., 2].

    No synchronization: numbers are a program's own.
    """
    _, _, _, _, owners = _load_owners(ids, t, local, ranks, K)
    for rank in range(ranks):
        hits = (owners == rank).to(tl.int32)
        place = of_blocks + (tl.program_id(0) * ranks + rank) * 2
        tl.store(place, tl.sum(tl.max(hits, 1), 0))
        tl.store(place + 1, tl.sum(tl.sum(hits, 1), 0))


@triton.jit
def place_pairs(  # type: ignore[no-untyped-def]
    ids, bits, of_blocks, numbers, is_pair, tokens, words, counts, t, local, ranks, K: tl.constexpr
):
    """Write the fields of `Pairs` for TOKENS tokens a program, from the numbers of `count_pairs`; bits: of weights.

    No synchronization: a pair's place follows from the numbers of the programs before, so programs write apart.
    """
    token, slot, mask, found, owners = _load_owners(ids, t, local, ranks, K)
    is_token = token < t
    width: tl.constexpr = K if bits is None else 2 * K
    start = tl.program_id(0) * 0
    for rank in range(ranks):
        before = tl.program_id(0) * 0
        total = tl.program_id(0) * 0
        choices = tl.program_id(0) * 0
        for begin in range(0, tl.num_programs(0), _BLOCKS):
            block = begin + tl.arange(0, _BLOCKS)
            place = of_blocks + (block * ranks + rank) * 2
            is_block = block < tl.num_programs(0)
            number = tl.load(place, mask=is_block, other=0)
            before += tl.sum(tl.where(block < tl.program_id(0), number, 0), 0)
            total += tl.sum(number, 0)
            choices += tl.sum(tl.load(place + 1, mask=is_block, other=0), 0)
        hits = owners == rank
        has = tl.max(hits.to(tl.int32), 1)
        number = start + before + tl.cumsum(has, 0) - 1
        at = token.to(tl.int64) * ranks + rank
        tl.store(numbers + at, tl.maximum(number, 0).to(tl.int64), mask=is_token)
        tl.store(is_pair + at, has.to(tl.uint8), mask=is_token)
        is_new = is_token & (has != 0)
        tl.store(tokens + number, token.to(tl.int64), mask=is_new)
        row = words + number[:, None].to(tl.int64) * width + slot[None, :]
        is_word = is_new[:, None] & mask
        tl.store(row, tl.where(hits, found - rank * local, local).to(tl.int32), mask=is_word)
        if bits is not None:
            sent = tl.load(bits + token[:, None].to(tl.int64) * K + slot[None, :], mask=is_word, other=0)
            tl.store(row + K, sent, mask=is_word)
        if tl.program_id(0) == 0:
            tl.store(counts + rank * 2, total)
            tl.store(counts + rank * 2 + 1, choices)
        start += total
