# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of kernels of experts, loss and rotary positions, which each rank launches by itself."""

from collections.abc import Sequence
from itertools import pairwise
from unittest import mock

import torch
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team
from torch import Tensor

from lab.experts.routing import take_recorded

ENTRIES = 6
RECORDED = 3  # the entry whose choices are those of a trained router
K = 3
_CLEARING = tuple(f"ops.moe.grouped.matmul.{name}" for name in ("clear_padding_rows", "clear_empty_experts"))
_GROUPED = tuple(f"ops.moe.grouped.kernels.{name}" for name in ("multiply_groups", "sum_outer_products"))
_COPIES = tuple(f"ops.moe.permutation.{name}" for name in ("sum_rows", "spread_rows", "multiply_rows"))
_LOSS = tuple(f"ops.cross_entropy.{name}" for name in ("reduce_rows", "differentiate_rows"))
_ROTARY = tuple(f"ops.rotary.{name}" for name in ("split_heads", "join_heads", "turn_heads"))
_NORM = tuple(f"ops.rms_norm.{name}" for name in ("normalize_rows", "differentiate_norm"))
_CASTS = tuple(
    f"ops.fp8_casts.{name}"
    for name in ("measure_tiles", "cast_tiles", "find_scales", "measure_groups", "cast_group_tiles")
)
_GATES = tuple(
    f"ops.moe.activation.{name}" for name in ("gate_by_silu", "differentiate_silu_gate", "differentiate_weighed_rows")
)


class CopiesCase(StressCase):
    """Sums, products and gradients of copies of tokens, of small whole numbers, which bf16 and fp32 hold exactly."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        self._tokens, self._columns = (500, 1160) if team.is_cuda else (5, 40)
        self._calls = []
        for entry in range(ENTRIES):
            words = entry, team.rank
            copies = self._tokens * K
            positions = torch.randperm(copies + 4, generator=team.draw("positions", *words), device=team.device)
            positions = positions[:copies].view(self._tokens, K)
            x = team.integers((self._tokens, self._columns), "x", *words, low=-3, high=3)
            rows = team.integers((copies + 4, self._columns), "rows", *words, low=-3, high=3)
            weights = team.integers((self._tokens, K), "weights", *words, low=-4, high=4)
            is_valid = team.integers((self._tokens, K), "is_valid", *words, low=0) > 0
            self._calls.append((x, rows, positions, weights, is_valid))
        self._expected = [self._compute(*call) for call in self._calls]

    def _compute(
        self, x: Tensor, rows: Tensor, positions: Tensor, weights: Tensor, is_valid: Tensor
    ) -> tuple[Tensor, ...]:
        """The same in fp64 by other operators, with an intermediate of [t, k, h]."""
        copies = rows[positions]
        sums = (copies * weights[:, :, None]).sum(1)
        valid = (copies * is_valid[:, :, None]).sum(1)
        weighed = x[:, None] * weights[:, :, None]
        spread = torch.zeros_like(rows).index_copy_(0, positions.reshape(-1), weighed.flatten(0, 1))
        return sums, valid, spread, spread, (x[:, None] * copies).sum(2)

    def call(self, entry: int) -> Sequence[Check]:
        from stretto.ops.moe import permutation

        x, rows, positions, weights, is_valid = self._calls[entry]
        narrow, narrow_x, factors = rows.bfloat16(), x.bfloat16(), weights.float()
        found = [
            permutation.sum_on_gpu(narrow, positions, factors, None),
            permutation.sum_on_gpu(narrow, positions, None, is_valid),
            permutation.spread_on_gpu(narrow_x, positions, factors, None, len(rows), None),
            *permutation.weigh_and_multiply_on_gpu(narrow_x, narrow, positions, factors),
        ]
        return [
            Check(one.contiguous(), right.to(one.dtype))
            for one, right in zip(found, self._expected[entry], strict=True)
        ]


class GatedCase(StressCase):
    """Gated SiLU, weighed or not, and its gradients, which must be right, and have the same bits each time."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        shape = (300, 1160) if team.is_cuda else (3, 40)
        self._calls = [
            (
                (team.integers((shape[0], 2 * shape[1]), "x", entry, team.rank, low=-9, high=9) / 4).bfloat16(),
                team.integers(shape, "grad", entry, team.rank, low=-9, high=9).bfloat16(),
                team.integers((shape[0],), "factors", entry, team.rank, low=-9, high=9).float() / 4,
            )
            for entry in range(ENTRIES)
        ]
        self._expected = [self._run(entry) for entry in range(ENTRIES)]
        for (x, grad, factors), found in zip(self._calls, self._expected, strict=True):
            wide, factor = x.double().requires_grad_(), factors.double()[:, None].requires_grad_()
            gate, up = wide.chunk(2, 1)
            out = gate * gate.sigmoid() * up
            (of_x,) = torch.autograd.grad(out, wide, grad.double(), retain_graph=True)
            weighed = out * factor
            of_weighed = torch.autograd.grad(weighed, (wide, factor), grad.double())
            rights = out.detach(), of_x, out.detach(), of_x, of_weighed[0], weighed.detach(), of_weighed[1][:, 0]
            terms = float((out * grad.double()).abs().sum(1).max())
            for number, (one, right) in enumerate(zip(found, rights, strict=True)):
                rounded = 2**-8 if number < 4 else 2**-7  # weighed rows are rounded twice
                near = terms / 256 if right.dim() == 1 else 1e-4
                if not torch.allclose(one.double(), right, rtol=rounded, atol=near):
                    raise AssertionError("the kernels of gated SiLU compute something else")

    def _run(self, entry: int) -> tuple[Tensor, ...]:
        from stretto.ops.moe import activation

        x, grad, factors = self._calls[entry]
        gate, up = x.chunk(2, 1)
        of_both = torch.cat(activation.differentiate_swiglu(gate, up, grad), 1)
        product, weighed = (
            activation.multiply_by_silu(gate, up),
            activation.differentiate_weighed_by_kernel(x, grad, factors),
        )
        return activation.gate_on_gpu(x), activation.gate_gradient_on_gpu(x, grad), product, of_both, *weighed

    def call(self, entry: int) -> Sequence[Check]:
        return [Check(found, right) for found, right in zip(self._run(entry), self._expected[entry], strict=True)]


class ClearingCase(StressCase):
    """Zeros in rows of padding and in gradients of experts without rows, and all else as it was."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        rows, columns, self._inner = (400, 1160, 300) if team.is_cuda else (40, 30, 9)
        self._whole = team.integers((rows, columns), "whole", low=1, high=9).bfloat16()
        self._offsets = []
        for entry in range(ENTRIES):
            counts = team.integers((5,), "counts", entry, team.rank, low=0, high=rows // 5, density=0.6)
            ends = counts.cumsum(0).to(torch.int32)
            self._offsets.append(torch.cat((torch.zeros_like(ends[:1]), ends)))

    def call(self, entry: int) -> Sequence[Check]:
        from stretto.ops.moe.grouped.matmul import clear_empty, clear_padding

        offsets, found = self._offsets[entry], self._whole.clone()
        clear_padding(found, offsets)
        numbers = torch.arange(len(found), device=found.device)
        rows = Check(found, self._whole.masked_fill((numbers >= offsets[-1])[:, None], 0))
        gradients = self._whole[: self._inner].repeat(5, 1, 1)
        expected = gradients.masked_fill((offsets[1:] == offsets[:-1])[:, None, None], 0)
        clear_empty(gradients, offsets)
        return [rows, Check(gradients, expected)]


class GroupedCase(StressCase):
    """Routed experts and their gradients by grouped kernels, which must be right, and have the same bits each time."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        tokens, hidden, inner, experts = (900, 264, 200, 9) if team.is_cuda else (9, 16, 8, 3)
        self._calls = []
        for entry in range(ENTRIES):
            words = entry, team.rank
            shapes = (tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner), (tokens, hidden)
            x, gate_up, down, grad = (
                (team.integers(shape, str(place), *words, low=-4, high=5) / 8).bfloat16()
                for place, shape in enumerate(shapes)
            )
            scores = torch.rand(tokens, experts, generator=team.draw("scores", *words), device=team.device)
            scores[:, entry % experts] = -1.0  # an expert without tokens
            weights, ids = scores.topk(min(K, experts - 1))
            if entry == RECORDED:
                ids = take_recorded(tokens, experts, ids.shape[1]).to(team.device)
            self._calls.append((x, ids, weights, gate_up, down, grad))
        self._expected = [self._run(entry, "kernel") for entry in range(ENTRIES)]
        for entry, found in enumerate(self._expected):
            for one, right in zip(found, self._run(entry, "library"), strict=True):
                if not torch.allclose(one.double(), right, rtol=0.02, atol=0.02 * float(right.abs().max())):
                    raise AssertionError("the grouped kernels compute something else")

    def _run(self, entry: int, implementation: str) -> tuple[Tensor, ...]:
        from stretto.ops.moe import routed_experts

        x, ids, weights, gate_up, down, grad = self._calls[entry]
        dtype = torch.bfloat16 if implementation == "kernel" else torch.float64
        leaves = [one.to(dtype).requires_grad_() for one in (x, gate_up, down)]
        factors = (weights if implementation == "kernel" else weights.double()).requires_grad_()
        out = routed_experts(leaves[0], ids, factors, *leaves[1:], implementation=implementation)
        return out.detach(), *torch.autograd.grad(out, [*leaves, factors], grad.to(dtype))

    def call(self, entry: int) -> Sequence[Check]:
        pairs = zip(self._run(entry, "kernel"), self._expected[entry], strict=True)
        return [Check(found.contiguous(), right.contiguous()) for found, right in pairs]


class LossCase(StressCase):
    """Statistics and gradients of cross-entropy, which must be right, and have the same bits each time."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        rows, columns, self._counted = (60, 20032, 20011) if team.is_cuda else (3, 64, 61)
        self._calls = [
            (
                (team.integers((rows, columns), "logits", entry, team.rank, low=-40, high=40) / 4).bfloat16(),
                team.integers((rows,), "targets", entry, team.rank, low=-9, high=columns).long(),
            )
            for entry in range(ENTRIES)
        ]
        self._scale = torch.full((rows,), 0.5, device=team.device)
        self._expected = [self._run(entry) for entry in range(ENTRIES)]
        for (logits, targets), (found, gradient) in zip(self._calls, self._expected, strict=True):
            wide = logits[:, : self._counted].double().requires_grad_()
            is_here = (targets >= 0) & (targets < self._counted)
            of_target = wide.gather(1, targets.clamp(0, self._counted - 1)[:, None]).squeeze(1)
            loss = wide.logsumexp(1) - torch.where(is_here, of_target, 0)
            (right,) = torch.autograd.grad(loss.sum() / 2, wide)
            pairs = (found, loss.detach(), 1e-5), (gradient[:, : self._counted], right, 2**-8)
            if not all(torch.allclose(one.double(), other, rtol=far, atol=1e-7) for one, other, far in pairs):
                raise AssertionError("the kernels of cross-entropy compute something else")

    def _run(self, entry: int) -> tuple[Tensor, Tensor]:
        from stretto.ops import cross_entropy

        logits, targets = self._calls[entry]
        highest, sums, of_target = cross_entropy.read_statistics(logits, targets, self._counted)
        gradient = logits.clone()
        cross_entropy.write_gradients(gradient, targets, highest, sums, self._scale, self._counted)
        return sums.log() + highest - of_target, gradient

    def call(self, entry: int) -> Sequence[Check]:
        return [Check(found, right) for found, right in zip(self._run(entry), self._expected[entry], strict=True)]


class NormCase(StressCase):
    """RMSNorm and its gradients, which must be right, and have the same bits each time."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        rows, columns = (3000, 4100) if team.is_cuda else (3, 40)
        self._calls = []
        for entry in range(ENTRIES):
            words = entry, team.rank
            x, grad = (team.integers((rows, columns), name, *words, low=-9, high=9).bfloat16() for name in "xg")
            self._calls.append((x, team.integers((columns,), "weight", *words, low=-9, high=9).float(), grad))
        self._expected = [self._run(entry) for entry in range(ENTRIES)]
        for (x, weight, grad), found in zip(self._calls, self._expected, strict=True):
            wide = [one.double().requires_grad_() for one in (x, weight)]
            right = wide[0] * (wide[0].square().mean(-1, keepdim=True) + 1).rsqrt() * (wide[1] + 1)
            rights = right.detach(), *torch.autograd.grad(right, wide, grad.double())
            # The weight's gradient is a sum of up to 3,000 numbers below 30.
            pairs = zip(found, rights, (2**-8, 2**-8, 1e-4), strict=True)
            if not all(torch.allclose(one.double(), other, rtol=far, atol=0.05) for one, other, far in pairs):
                raise AssertionError("the kernels of RMSNorm compute something else")

    def _run(self, entry: int) -> Sequence[Tensor]:
        from stretto.ops.rms_norm import norm_gradient_on_gpu, rms_norm_on_gpu

        x, weight, grad = self._calls[entry]
        out, scales = rms_norm_on_gpu(x, weight, 1.0, 1.0)
        return [out, *norm_gradient_on_gpu(x, weight, scales, grad, 1.0)]

    def call(self, entry: int) -> Sequence[Check]:
        return [Check(found, right) for found, right in zip(self._run(entry), self._expected[entry], strict=True)]


class RotaryCase(StressCase):
    """Heads that are split and rotated, and joined again, with cosines and sines that are small whole numbers."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        self._queries = 3
        tokens, groups, half = (130, 4, 40) if team.is_cuda else (3, 2, 3)
        self._calls = [
            (
                team.integers((2, tokens, groups, self._queries + 2, 2 * half), "qkv", entry, team.rank).bfloat16(),
                team.integers((tokens, half), "cos", entry, team.rank, low=-2, high=2).float(),
                team.integers((tokens, half), "sin", entry, team.rank, low=-2, high=2).float(),
            )
            for entry in range(ENTRIES)
        ]

    def call(self, entry: int) -> Sequence[Check]:
        from stretto.ops.rotary import rotate_and_split, rotate_back_and_join, turn_on_gpu

        qkv, cos, sin = self._calls[entry]
        found = rotate_and_split(qkv, cos, sin, self._queries)
        parts = [part.flatten(2, 3) for part in qkv.double().split((self._queries, 1, 1), 3)]
        expected = self._turn(parts[0], cos, sin), self._turn(parts[1], cos, sin), parts[2]
        back = self._turn(parts[0], cos, -sin), self._turn(parts[1], cos, -sin), parts[2]
        query, key, value = (part.to(qkv.dtype) for part in parts)
        joined = rotate_back_and_join(query, key, value, cos, sin)
        right = torch.cat([part.unflatten(2, (qkv.shape[2], -1)) for part in back], 3)
        apart = [part.transpose(1, 2) for part in (query, key)]
        turned = turn_on_gpu(*apart, *(angle.repeat(1, 2)[None].to(qkv.dtype) for angle in (cos, sin)), False)
        found, expected = (*found, *(part.transpose(1, 2) for part in turned)), (*expected, *expected[:2])
        pairs = zip((*found, joined), (*expected, right), strict=True)
        return [Check(one, other.to(one.dtype)) for one, other in pairs]

    @staticmethod
    def _turn(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """heads [batch, tokens, heads, 2 * half], in fp64."""
        first, second = heads.chunk(2, -1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), -1)


class CastCase(StressCase):
    """Largest magnitudes, and fp8 by rows and by columns, of small whole numbers, which fp8 holds exactly."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        shape = (3, 1000, 2064) if team.is_cuda else (2, 70, 130)
        self._inputs = [
            team.integers(shape, "x", entry, team.rank, low=-8, high=8).bfloat16() for entry in range(ENTRIES)
        ]
        ends = [[0, 7 * entry + 3, 7 * entry + 3, shape[1] - 1] for entry in range(ENTRIES)]
        self._offsets = [torch.tensor(each, dtype=torch.int32, device=team.device) for each in ends]
        self._ends = ends

    def call(self, entry: int) -> Sequence[Check]:
        from stretto.ops import fp8_casts

        x = self._inputs[entry]
        one = torch.ones(1, 1, 1, device=x.device)
        with mock.patch.object(fp8_casts, "_suits_kernel", return_value=True):  # interpreted, too
            found = [fp8_casts.find_largest(x, dims) for dims in ((-2, -1), (-1,), (-2,))]
            rows, columns = fp8_casts.cast_scaled(x, one, one, fp8_casts.E4M3)
        expected = [x.abs().amax(dims, keepdim=True).float() for dims in ((-2, -1), (-1,), (-2,))]
        assert rows is not None
        assert columns is not None
        turned = torch.nn.functional.pad(x.transpose(1, 2), (0, columns.shape[-1] - x.shape[1]))
        pairs = zip([*found, rows.float(), columns.float()], [*expected, x.float(), turned.float()], strict=True)
        return [*(Check(one, other) for one, other in pairs), *self._cast_groups(x[0], entry)]

    def _cast_groups(self, x: Tensor, entry: int) -> list[Check]:
        """Three groups of rows: some, none, and all others but the last."""
        from stretto.ops import fp8_casts

        ends, offsets = self._ends[entry], self._offsets[entry]
        places = fp8_casts.place_groups(offsets)
        with mock.patch.object(fp8_casts, "_suits_kernel", return_value=True):
            data, scale = fp8_casts.cast_groups(x, offsets, places)
        checks, begin = [], 0
        for number, (first, last) in enumerate(pairwise(ends)):
            own = x[first:last].float()
            size = max(-(-len(own) // 64), 1) * 64
            expected = torch.nn.functional.pad(own.t(), (0, size - len(own)))
            columns = scale.view(3, -1)[number]
            checks.append(Check(data[:, begin : begin + size].float() * columns[:, None], expected))
            begin += size
        return checks


def list_configurations() -> list[Configuration]:
    """All configurations of experts, and those of the loss, of norms, of casts and of rotary positions."""
    return [
        Configuration("fp8/casts", "fp8", _CASTS, "largest magnitudes, and casts by rows and by columns", CastCase),
        Configuration(
            "attention/rotary", "attention", _ROTARY, "heads rotated and split, joined, and turned", RotaryCase
        ),
        Configuration("norm/rms", "norm", _NORM, "RMSNorm and its gradients", NormCase),
        Configuration("experts/copies", "experts", _COPIES, "sums, products and gradients of copies", CopiesCase),
        Configuration("experts/gated", "experts", _GATES, "gated SiLU and its gradient", GatedCase),
        Configuration("experts/clearing", "experts", _CLEARING, "zeros where no expert writes", ClearingCase),
        Configuration("experts/grouped", "experts", _GROUPED, "routed experts and their gradients", GroupedCase),
        Configuration("loss/cross-entropy", "loss", _LOSS, "cross-entropy and its gradient", LossCase),
    ]
