# SPDX-License-Identifier: Apache-2.0
"""Draws tokens from logits of which each rank has a part of the vocabulary: no rank ever has all of them.

A rank sends its best token and score, and, for top_k and top_p, histograms. All ranks draw the same token. Random
numbers are a hash of the request's seed, the token's place in it and the token's id (Gumbel noise), so a request's
tokens depend neither on the other rows of its batch nor on how the vocabulary is divided.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.ops.decoding.best_tokens import find_best, suits_kernels
from stretto.parallel.comm.collectives import NO_GROUP, all_reduce, gather_rows

_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of a radix search over 32 bits
_MASS_SCALE = float(1 << 40)  # probabilities are summed as integers, so that no order of additions matters
_LARGEST_SLICE = 1 << 24  # numbers of the intermediate tensors of random draws
_MASK = (1 << 32) - 1


class VocabularyPart(NamedTuple):
    """The part of the vocabulary of a rank's logits: its first id; the longest part's length; the ranks that have
    parts."""

    first: int
    longest: int
    group: dist.ProcessGroup


class RandomRows(NamedTuple):
    """Parameters of rows that are drawn at random, each [rows]: temperature and top_p float64; seed, place (the number
    of the token in its request) and top_k (0: all) int64. top_p, top_k: None where no row has one."""

    temperature: Tensor
    seed: Tensor
    place: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None

    def take(self, part: slice | Tensor) -> "RandomRows":
        """Some of the rows."""
        return RandomRows(*(None if each is None else each[part] for each in self))  # type: ignore[arg-type]


def best_tokens(scores: Tensor, part: VocabularyPart) -> Tensor:
    """The tokens with the highest scores [rows, vocabulary here] of all ranks, the first of equal ones: int64 [rows];
    -1 where one is NaN, or none is above -inf."""
    if suits_kernels(scores, part.longest * part.group.size()):
        return find_best(scores.contiguous(), part.first, part.group)
    # Rows in pieces, or torch reduces it on few multiprocessors; of equal scores the first, as torch documents.
    pieces = math.gcd(scores.shape[1], 64)
    best, ids = scores.unflatten(1, (pieces, -1)).max(2)
    best, piece = best.max(1)
    ids = ids.gather(1, piece.unsqueeze(1)).squeeze(1) + piece * (scores.shape[1] // pieces)
    if (ranks := part.group.size()) == 1:
        return torch.where(best > -torch.inf, ids + part.first, -1)
    pairs = torch.stack((best.double(), (ids + part.first).double()), 1).unsqueeze(0)
    values, found = gather_rows(pairs, ranks, part.group).unbind(2)
    is_best = (values == values.amax(0)) & (values > -torch.inf)
    return torch.where(is_best, found, torch.inf).amin(0).nan_to_num(posinf=-1.0).long()


def log_probabilities(logits: Tensor, tokens: Tensor, part: VocabularyPart) -> Tensor:
    """The log-probabilities of tokens [rows] by logits [rows, vocabulary here] (temperature 1): float32 [rows].

    Their bits do not depend on how the vocabulary is divided.
    """
    logits = logits.float()
    highest = all_reduce(logits.amax(1), part.group, dist.ReduceOp.MAX)
    here = tokens - part.first
    is_here = (here >= 0) & (here < logits.shape[1])
    own = logits.gather(1, here.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    # In fp64 and rounded: on CPUs fp32 has other instructions for a tensor's last elements.
    shares = (logits - highest.unsqueeze(1)).double().exp().float()
    mass = (shares.double() * _MASS_SCALE).nan_to_num(0).long().sum(1)
    bits = torch.where(is_here, own - highest, 0).view(torch.int32).long()  # one rank has them
    total, found = all_reduce(torch.stack((mass, bits)), part.group)
    return found.int().view(torch.float32) - (total.double() / _MASS_SCALE).log().float()


def token_log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens [...] by whole logits [..., vocabulary]: float32 [...], differentiable.

    For trainers: of a model with `invariant=True` they have the bits of those that an engine on any grid gives its
    tokens.
    """
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(f"tokens must be {list(logits.shape[:-1])}, one a row of logits, not {list(tokens.shape)}")
    if tokens.dtype not in (torch.int64, torch.int32) or not logits.is_floating_point():
        raise ValueError(f"tokens must be integers and logits floating-point, not {tokens.dtype} and {logits.dtype}")
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(bound) for bound in torch.aminmax(tokens))
        if low < 0 or high >= logits.shape[-1]:
            raise ValueError(
                f"token {low if low < 0 else high} is outside the vocabulary [0, {logits.shape[-1]}): give padding an "
                "id of it, and leave its log-probability out"
            )
    found: Tensor = _TokenLogProbabilities.apply(logits.flatten(0, -2), tokens.flatten().long())
    return found.view(tokens.shape)


class _TokenLogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        return log_probabilities(logits, tokens, VocabularyPart(0, logits.shape[1], NO_GROUP))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, tokens = ctx.saved_tensors
        shares = -logits.float().softmax(1)
        shares.scatter_add_(1, tokens.unsqueeze(1), shares.new_ones(len(tokens), 1))
        return (shares * gradient.unsqueeze(1)).to(logits.dtype), None


def draw_tokens(logits: Tensor, rows: RandomRows, part: VocabularyPart) -> Tensor:
    """Draw a token of each row of logits [rows, vocabulary here]: int64 [rows]."""
    length = max(1, _LARGEST_SLICE // max(part.longest, 1 << _DIGITS[0][1]))  # the same on all ranks
    parts = [slice(start, start + length) for start in range(0, len(logits), length)]
    return torch.cat([_draw(logits[some], rows.take(some), part) for some in parts])


def _draw(logits: Tensor, rows: RandomRows, part: VocabularyPart) -> Tensor:
    scaled = logits.double() / rows.temperature.unsqueeze(1)
    ids = torch.arange(scaled.shape[1], device=scaled.device) + part.first
    scores = scaled + _gumbel_noise(rows.seed, rows.place, ids)
    if rows.top_k is None and rows.top_p is None:
        return best_tokens(scores, part)
    keys = _ordered(scaled.float())
    is_kept = torch.ones_like(keys, dtype=torch.bool)
    if rows.top_k is not None:
        threshold = _find_threshold(keys, torch.ones_like(keys), rows.top_k, part.group)
        is_kept = (keys >= threshold.unsqueeze(1)) | (rows.top_k == 0).unsqueeze(1)
    if rows.top_p is not None:
        highest = all_reduce(scaled.amax(1), part.group, dist.ReduceOp.MAX)
        mass = ((scaled - highest.unsqueeze(1)).exp() * _MASS_SCALE).long() * is_kept
        total = all_reduce(mass.sum(1), part.group)
        threshold = _find_threshold(keys, mass, (rows.top_p * total).ceil().long(), part.group)
        is_kept &= (keys >= threshold.unsqueeze(1)) | (rows.top_p >= 1).unsqueeze(1)
    return best_tokens(scores.masked_fill(~(is_kept | scores.isnan()), -torch.inf), part)  # a row with NaN has none


def _find_threshold(keys: Tensor, mass: Tensor, target: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The highest key of each row such that it and the keys above it have at least the mass of `target`; 0 if none has.

    A radix search: a histogram of the mass by each digit of the keys in turn, summed over the ranks.
    """
    prefix = torch.zeros_like(target)
    for shift, bits in _DIGITS:
        is_candidate = keys >> (shift + bits) == prefix.unsqueeze(1)
        digits = (keys >> shift) & ((1 << bits) - 1)
        histogram = mass.new_zeros(len(mass), 1 << bits).scatter_add_(1, digits, mass * is_candidate)
        all_reduce(histogram, group)
        reached = histogram.flip(1).cumsum(1).flip(1)
        digit = ((reached >= target.unsqueeze(1)).sum(1) - 1).clamp(min=0).unsqueeze(1)
        target = target - (reached - histogram).gather(1, digit).squeeze(1)
        prefix = prefix << bits | digit.squeeze(1)
    return prefix


def _ordered(x: Tensor) -> Tensor:
    """Integers of 32 bits, as int64, in the order of fp32 numbers."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, ~bits & _MASK, bits + (1 << 31)) & _MASK


def _gumbel_noise(seed: Tensor, place: Tensor, ids: Tensor) -> Tensor:
    """Noise float64 [rows, ids] that is a hash of the row's seed and place, and the id."""
    row = _mix(_mix(_mix(seed & _MASK) ^ (seed >> 32 & _MASK)) ^ place & _MASK)
    other = _mix(row ^ 0x9E3779B9)
    bits = _mix(_mix(ids.unsqueeze(0) ^ row.unsqueeze(1)) + other.unsqueeze(1) & _MASK)
    return -(-((bits + 0.5) / 2.0**32).log()).log()


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits, in int64: the finalizer of MurmurHash3."""
    x = ((x ^ x >> 16) * 0x85EBCA6B) & _MASK
    x = ((x ^ x >> 13) * 0xC2B2AE35) & _MASK
    return x ^ x >> 16
