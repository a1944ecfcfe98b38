# SPDX-License-Identifier: Apache-2.0
"""Attention of blocks of scores, with the log-sum-exp that merges their results: torch's kernels, and a plain one.

    kernel     where                                               blocks
    cuDNN's    GPUs, 16 bits, where torch says that it can         rectangles and causal squares of few sizes
    flash      GPUs, 16 bits, where torch says that it can         all; several of one kind in one call
    torch's    CPUs, where keys and values have one size           rectangles and causal squares
    plain      the rest: fp32 and fp64 on GPUs, windows on CPUs    all

cuDNN's takes 0.55 to 0.6 of flash's time on Hopper, but builds a graph for each new size, which documents bring with
every batch. Backward kernels are given the whole result and the whole log-sum-exp of their queries, so that gradients
of blocks only have to be added.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from stretto.ops.attention.plan import Block, Range

_PLAIN_SCORES = 1 << 24  # that the plain kernel has in memory at a time

_aten = torch.ops.aten


class Part(NamedTuple):
    """The attention of some queries to some keys: out [b, h, rows, size], lse fp32 or fp64 [b, h, rows]."""

    rows: Range
    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients of blocks, each with the rows that it belongs to; those of the same rows are to be added."""

    q: list[tuple[Range, Tensor]]
    k: list[tuple[Range, Tensor]]
    v: list[tuple[Range, Tensor]]


def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float, varies: bool) -> list[Part]:
    """The attention of all blocks: q [b, h, rows, d], k and v [b, KV heads, rows, d].

    varies: whether the blocks' sizes are other ones in the next batch.
    """
    parts = []
    for kernel, run, rows, keys in _list_runs(q, k, v, blocks, varies):
        out, lse = kernel.forward(_cut(q, rows), _cut(k, keys), _cut(v, keys), run, scale)
        parts.append(Part(rows, out, lse))
    return parts


def attend_to_itself(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor | None:
    """Causal attention of a sequence q [rows, h, d], k and v [rows, KV heads, d] by a fast kernel; None without one.

    The kernel is cuDNN's, on GPUs, or torch's on CPUs.
    """
    block = Block(rows := Range(0, len(q)), rows, is_causal=True)
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    for kernel in (_Cudnn, _Cpu):
        if kernel.takes(q, k, v, block):
            out, _ = kernel.forward(q, k, v, (block,), q.shape[-1] ** -0.5 if scale is None else scale)
            return out[0].transpose(0, 1)
    return None


def differentiate(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Sequence[Block], scale: float,
    varies: bool,
) -> Gradients:  # fmt: skip
    """Gradients of `attend`. out, lse: of the whole attention, of which the blocks are a part."""
    found = Gradients([], [], [])
    for kernel, run, rows, keys in _list_runs(q, k, v, blocks, varies):
        of_q, of_k, of_v = kernel.backward(
            _cut(grad, rows),
            _cut(q, rows),
            _cut(k, keys),
            _cut(v, keys),
            _cut(out, rows),
            _cut(lse, rows).contiguous(),
            run,
            scale,
        )
        found.q.append((rows, of_q))
        found.k.append((keys, of_k))
        found.v.append((keys, of_v))
    return found


def lay_out_by_position(tensor: Tensor) -> Tensor:
    """Copy a tensor [b, h, rows, size] if it is not contiguous as [b, rows, h, size], as operators' fakes are.

    Results and their gradients are given to kernels so: torch keeps the graphs of cuDNN's backward kernel by the
    strides of queries, keys and values alone (2.11), and one of another layout computes wrong gradients in silence.
    """
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _cut(tensor: Tensor, rows: Range) -> Tensor:
    return tensor[:, :, rows.start : rows.stop]


def _list_runs(
    q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], varies: bool
) -> Iterator[tuple["type[_Kernel]", Sequence[Block], Range, Range]]:
    """Kernels with the blocks of each call, and their rows of q and of k."""
    for run in _group(blocks):
        rows, keys = (Range(first.start, last.stop) for first, last in zip(run[0][:2], run[-1][:2], strict=True))
        if len(run) > 1 and _Flash.takes(q, k, v, run[0]):
            yield _Flash, run, rows, keys
        else:
            for block in run:
                kernels = (_Flash, _Cpu, _Plain) if varies else (_Cudnn, _Flash, _Cpu, _Plain)
                kernel = next(each for each in kernels if each.takes(q, k, v, block))
                yield kernel, (block,), block.queries, block.keys


def _group(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Yield runs of consecutive blocks of one kind: each block begins where the one before ends."""
    run: list[Block] = []
    for block in blocks:
        if run and (run[-1].queries.stop, run[-1].keys.stop, run[-1].is_causal, run[-1].left) != (
            block.queries.start, block.keys.start, block.is_causal, block.left
        ):  # fmt: skip
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _describe(q: Tensor, k: Tensor, v: Tensor, block: Block) -> SDPAParams:
    q, k, v = _cut(q, block.queries), _cut(k, block.keys), _cut(v, block.keys)
    return SDPAParams(q, k, v, None, 0.0, block.is_causal, q.shape[1] != k.shape[1])


class _Kernel:
    """A kernel's calls, which get the rows of their blocks alone: one block, unless the kernel says otherwise."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        raise NotImplementedError

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Sequence[Block], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class _Cudnn(_Kernel):
    @staticmethod
    def takes(q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        return q.is_cuda and block.left is None and can_use_cudnn_attention(_describe(q, k, v, block))

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float) -> tuple[Tensor, Tensor]:
        run = _aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = run(q, k, v, None, True, 0.0, blocks[0].is_causal, False, scale=scale)
        return out, lse.view(lse.shape[:3])  # [b, h, rows, 1]

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Sequence[Block], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = q.new_empty((), dtype=torch.int64)  # of dropout, and unused without it
        return _aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.unsqueeze(-1), seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0,
            blocks[0].is_causal, scale=scale,
        )  # fmt: skip


class _Flash(_Kernel):
    """Flash attention, which takes several blocks by its form for sequences of different lengths, a row at a time."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        return (
            q.is_cuda
            and q.shape[-1] == v.shape[-1]
            and q.shape[-1] % 8 == 0
            and can_use_flash_attention(_describe(q, k, v, block))
        )

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float) -> tuple[Tensor, Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            lengths = _Flash._lengths(q.device, blocks)
            is_causal = blocks[0].is_causal
            out, lse, *_ = _aten._flash_attention_forward(
                q, k, v, *lengths, 0.0, is_causal, False, scale=scale, window_size_left=blocks[0].left
            )
            return out, lse

        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if len(blocks) == 1:
            out, lse = run(q, k, v)
        else:
            rows = [run(*row) for row in zip(q, k, v, strict=True)]
            out, lse = (torch.stack(each) if len(rows) > 1 else each[0][None] for each in zip(*rows, strict=True))
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Sequence[Block], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = q.new_empty(2, dtype=torch.uint64)  # of dropout, and unused without it

        def run(*operands: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            lengths = _Flash._lengths(q.device, blocks)
            return _aten._flash_attention_backward(
                *operands, *lengths, 0.0, blocks[0].is_causal, state, state[0], scale=scale,
                window_size_left=blocks[0].left,
            )  # fmt: skip

        wholes = [each.transpose(1, 2) for each in (grad, q, k, v, out)]
        if len(blocks) == 1:
            found = list(run(*wholes, lse))
        else:
            rows = [run(*row) for row in zip(*wholes, lse, strict=True)]
            found = [torch.stack(each) if len(rows) > 1 else each[0][None] for each in zip(*rows, strict=True)]
        of_q, of_k, of_v = (each.transpose(1, 2) for each in found)
        return of_q, of_k, of_v

    @staticmethod
    def _lengths(device: torch.device, blocks: Sequence[Block]) -> tuple[Tensor | None, Tensor | None, int, int]:
        """Find where the sequences of q and k begin, and their longest."""
        queries, keys = ([part.stop - part.start for part in parts] for parts in list(zip(*blocks, strict=True))[:2])
        if len(blocks) == 1:
            return None, None, queries[0], keys[0]
        return _add_up(tuple(queries), device), _add_up(tuple(keys), device), max(queries), max(keys)


@lru_cache(maxsize=64)
def _add_up(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Add up where each begins, and the last one ends: int32. Kept, since a CUDA graph cannot make it."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


class _Cpu(_Kernel):
    @staticmethod
    def takes(q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        return q.device.type == "cpu" and block.left is None and q.shape[-1] == v.shape[-1]

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float) -> tuple[Tensor, Tensor]:
        run = _aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(q, k, v, 0.0, blocks[0].is_causal, scale=scale)
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Sequence[Block], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return run(grad, q, k, v, out, lse, 0.0, blocks[0].is_causal, scale=scale)


class _Plain(_Kernel):
    """Products and a softmax in fp32 (fp64 for fp64), of some queries at a time."""

    @staticmethod
    def takes(q: Tensor, k: Tensor, v: Tensor, block: Block) -> bool:
        return True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], scale: float) -> tuple[Tensor, Tensor]:
        k_wide, v_wide = (_widen(each)[:, :, None] for each in (k, v))
        outs, sums = [], []
        for rows in _Plain._cut_rows(q, k):
            scores = _Plain._score(q, k_wide, rows, blocks[0], scale)
            lse = scores.logsumexp(-1)
            outs.append(((scores - lse[..., None]).exp() @ v_wide).flatten(1, 2).to(q.dtype))
            sums.append(lse.flatten(1, 2))
        return torch.cat(outs, 2), torch.cat(sums, 2)

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, blocks: Sequence[Block], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        k_wide, v_wide = (_widen(each)[:, :, None] for each in (k, v))
        of_q, of_k, of_v = [], torch.zeros_like(k_wide[:, :, 0]), torch.zeros_like(v_wide[:, :, 0])
        for rows in _Plain._cut_rows(q, k):

            def split(each: Tensor, rows: Range = rows) -> Tensor:
                return _widen(_cut(each, rows)).unflatten(1, (k.shape[1], -1))

            scores = _Plain._score(q, k_wide, rows, blocks[0], scale)
            weights = (scores - split(lse)[..., None]).exp()
            grads = split(grad)
            of_v += (weights.transpose(-1, -2) @ grads).sum(2)
            mean = (grads * split(out)).sum(-1, keepdim=True)
            of_scores = weights * (grads @ v_wide.transpose(-1, -2) - mean) * scale
            of_q.append((of_scores @ k_wide).flatten(1, 2).to(q.dtype))
            of_k += (of_scores.transpose(-1, -2) @ split(q)).sum(2)
        return torch.cat(of_q, 2), of_k.to(k.dtype), of_v.to(v.dtype)

    @staticmethod
    def _cut_rows(q: Tensor, k: Tensor) -> Iterator[Range]:
        count = q.shape[2]
        size = max(16, _PLAIN_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
        for start in range(0, count, size):
            yield Range(start, min(start + size, count))

    @staticmethod
    def _score(q: Tensor, k: Tensor, rows: Range, block: Block, scale: float) -> Tensor:
        """Scores of some of the queries, [b, KV heads, heads of each, rows, keys], -inf where they are masked."""
        scores = _widen(_cut(q, rows)).unflatten(1, (k.shape[1], -1)) @ k.transpose(-1, -2) * scale
        if not block.is_causal and block.left is None:
            return scores
        query = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        key = torch.arange(k.shape[-2], device=q.device)
        hidden = key > query if block.is_causal else torch.zeros_like(key > query)
        if block.left is not None:
            hidden |= key < query + k.shape[-2] - q.shape[2] - block.left
        return scores.masked_fill(hidden, -torch.inf)


def _widen(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
