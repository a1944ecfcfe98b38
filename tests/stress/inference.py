# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of inference: products and sums with their norm, invariant sums, attention to a paged cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tests.ops.decoding.sequences import Batch, make_batch
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team, is_exact
from tests.stress.operators import WorkspaceCase, agree
from torch import Tensor

from stretto import ops
from stretto.ops.decoding.best_tokens import find_best
from stretto.ops.decoding.paged_kernels import PagedCall, attend_new_tokens
from stretto.ops.decoding.rotary_cache import rotate_and_store
from stretto.ops.invariant.grouped import multiply_groups
from stretto.ops.rotary import rotate_halves
from stretto.ops.row_sums.kernel import sum_rows
from stretto.ops.row_sums.norm import Norm, normalize_by_torch

ENTRIES = 6
EPS = 2.0**-10
_GEMM = "ops.small_m.gemm_exchange"
_LEAVES = "ops.invariant.kernels.sum_leaves"
_SUMS = "ops.row_sums.kernel.sum_and_normalize"
_EXPERTS = "ops.invariant.grouped.sum_expert_leaves"
_ROTATION = "ops.decoding.rotary_cache.rotate_and_store_heads"
_NORM = "ops.row_sums.norm.add_and_normalize"
_BEST = tuple(f"ops.decoding.best_tokens.{name}" for name in ("find_parts", "merge_parts"))
_PAGED = tuple(f"ops.decoding.paged_kernels.{name}" for name in ("attend_singles", "attend_chunks"))


class SumCase(WorkspaceCase):
    """Calls on whole numbers, whose sums are exact. Norms are checked where they are invariant: exact, too."""

    entries = ENTRIES

    def __init__(self, team: Team, *, form: str, rows: int, is_invariant: bool, dtype: torch.dtype) -> None:
        """form: "product", "sum", "alone", "all_reduce" or "reduce_scatter". rows: of all of x."""
        self._team, self._form, self._is_invariant, world = team, form, is_invariant, team.world
        n, k = (1040, 512) if team.is_cuda else (48, 32)
        rows = rows if team.is_cuda else min(rows, 8)
        rows = -(-rows // world) * world if form == "reduce_scatter" else rows
        weights = [team.integers((n, k), "weight", peer, density=0.03) for peer in range(world)]
        self._weight, self._norm_weight = weights[team.rank].to(dtype), torch.ones(n, device=team.device)
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._expected: list[tuple[Tensor, Tensor]] = []
        exact = True
        for entry in range(ENTRIES):
            residual = team.integers((rows, n), "residual", entry, low=-8, high=8)
            width = n if form in ("sum", "alone") else k
            xs = [team.integers((rows, width), "x", entry, peer, density=0.25) for peer in range(world)]
            parts = xs if width == n else [x @ weight.t() for x, weight in zip(xs, weights, strict=True)]
            total = torch.stack(parts).sum(0)
            if form in ("product", "sum"):
                exact = exact and is_exact(total, dtype)
                total = total + residual
            elif form == "reduce_scatter":
                total = total.chunk(world)[team.rank]
            exact = exact and is_exact(total, dtype) and all(is_exact(part, dtype) for part in parts)
            self._inputs.append((xs[team.rank].to(dtype), residual.to(dtype)))
            added = total.to(dtype)
            self._expected.append(
                (added, normalize_by_torch(added, self._norm_weight, None, Norm("rms", EPS, is_exact=True)))
            )
        if not agree(team, exact):
            raise AssertionError("sums of so many numbers are rounded")

    def call(self, entry: int) -> Sequence[Check]:
        (x, residual), (added, normed) = self._inputs[entry], self._expected[entry]
        group, options = self._team.group, {"invariant": self._is_invariant, "implementation": "kernel"}
        with torch.no_grad():
            match self._form:
                case "all_reduce":
                    return [Check(ops.matmul_all_reduce(x, self._weight, group, **options), added)]
                case "reduce_scatter":
                    return [Check(ops.matmul_reduce_scatter(x, self._weight, group, **options), added)]
                case "alone":
                    return [Check(sum_rows(x, group.group_name), added)]
                case "sum":
                    found = ops.all_reduce_norm(x, residual, self._norm_weight, group, eps=EPS, **options)
                case _:
                    if not self._is_invariant:
                        options["implementation"] = ops.KernelConfig(exchange="packets")
                    found = ops.matmul_all_reduce_norm(
                        x, self._weight, residual, self._norm_weight, group, eps=EPS, **options
                    )
        return [Check(found[1], added), *([Check(found[0], normed)] if self._is_invariant else [])]


class PagedCase(StressCase):
    """Attention whose every call has the bits of the first, which is compared with torch's."""

    entries = ENTRIES

    def __init__(self, team: Team, *, is_invariant: bool) -> None:
        self._is_invariant, batches = is_invariant, []
        large = [Batch([1] * 9, [700, 1, 64, 300, 0, 17, 513, 256, 255], 32, 8, 128)]
        large += [Batch([1, 90, 1, 17], [700, 90, 300, 200], 32, 8, 128), Batch([5, 1], [5, 260], 8, 8, 64, window=33)]
        small = [Batch([1, 1, 1], [70, 0, 9]), Batch([1, 9, 1], [40, 12, 3]), Batch([5, 1], [5, 60], window=7)]
        for entry in range(ENTRIES):
            batches.append((large if team.is_cuda else small)[entry % 3])
        dtype = torch.bfloat16 if team.is_cuda else torch.float32
        self._calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []
        self._expected: list[Tensor] = []
        for entry, batch in enumerate(batches):
            operands, offsets = make_batch(batch, dtype, str(team.device), seed=entry)
            self._calls.append((operands, {"query_offsets": offsets, "window": batch.window}))
            with torch.no_grad():
                right = ops.paged_attention(*operands, **self._calls[-1][1], implementation="library")
            self._expected.append(self._attend(entry))
            if not (self._expected[-1].float() - right.float()).abs().max() <= 2**-5:
                raise AssertionError(f"attention of {batch} is wrong")

    def _attend(self, entry: int) -> Tensor:
        operands, options = self._calls[entry]
        with torch.no_grad():
            return ops.paged_attention(*operands, **options, invariant=self._is_invariant, implementation="kernel")

    def call(self, entry: int) -> Sequence[Check]:
        return [Check(self._attend(entry), self._expected[entry])]


class NormCase(StressCase):
    """Exact norms, whose bits torch's equal."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        rows, columns = (64, 4096) if team.is_cuda else (5, 40)
        self._inputs = [team.integers((rows, columns), "x", entry).bfloat16() for entry in range(ENTRIES)]
        self._weight = team.integers((columns,), "weight").float()
        norm = Norm("layer", EPS, is_exact=True)
        self._expected = [normalize_by_torch(x, self._weight, None, norm) for x in self._inputs]

    def call(self, entry: int) -> Sequence[Check]:
        found = ops.invariant_norm(self._inputs[entry], self._weight, eps=EPS, norm="layer")
        return [Check(found, self._expected[entry])]


class RotationCase(StressCase):
    """Rotated queries and a cache, which torch's operators make in fp64 of numbers whose products are exact."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        tokens, heads, kv_heads, size = (64, 32, 8, 128) if team.is_cuda else (5, 4, 2, 20)
        self._inputs: list[tuple[Tensor, ...]] = []
        self._expected: list[tuple[Tensor, ...]] = []
        for entry in range(ENTRIES):
            whole = team.integers((tokens, heads + 2 * kv_heads, size), "heads", entry, low=-8, high=8).bfloat16()
            angles = [team.integers((tokens, size), name, entry, low=-2, high=2).bfloat16() for name in ("cos", "sin")]
            places = torch.arange(tokens, device=team.device).flip(0) + entry
            heads_of = whole.split([heads, kv_heads, kv_heads], 1)
            turned = rotate_halves(
                *(each.transpose(0, 1)[None].double() for each in heads_of[:2]),
                *(each[None].double() for each in angles),
            )
            right = (*(each[0].transpose(0, 1).bfloat16() for each in turned), heads_of[2])
            self._inputs.append((*heads_of, *angles, places))
            self._expected.append(right)
        self._caches = [whole.new_zeros(2, tokens + ENTRIES, kv_heads, size) for _ in range(2)]

    def call(self, entry: int) -> Sequence[Check]:
        *operands, places = self._inputs[entry]
        query = rotate_and_store(*operands, *self._caches, places)
        stored = (each.flatten(0, 1)[places] for each in self._caches)
        return [Check(one, right) for one, right in zip((query, *stored), self._expected[entry], strict=True)]

    def poison(self) -> None:
        for each in self._caches:
            each.fill_(torch.nan)


class NewTokensCase(StressCase):
    """A decoding step's attention in one launch: every call has the bits of the first, and the rows of two launches."""

    entries = ENTRIES

    def __init__(self, team: Team, *, is_invariant: bool) -> None:
        heads, kv_heads, size = (32, 8, 128) if team.is_cuda else (2, 1, 20)
        lengths = [700, 1, 64, 300, 2048, 17, 513, 256, 255] if team.is_cuda else [70, 9]
        self._arrivals = torch.zeros(len(lengths) * kv_heads, dtype=torch.int32, device=team.device)
        self._calls: list[tuple[Any, ...]] = []
        self._places: list[Tensor] = []
        self._expected: list[Tensor] = []
        for entry in range(ENTRIES):
            batch = Batch([1] * len(lengths), lengths[entry:] + lengths[:entry], heads, kv_heads, size)
            (q, *caches, table, seen), _ = make_batch(batch, torch.bfloat16, str(team.device), seed=entry)
            given = [
                (team.integers((len(lengths), *shape), name, entry, low=-16, high=16) / 16).bfloat16()
                for name, *shape in (("key", kv_heads, size), ("value", kv_heads, size), ("cos", size), ("sin", size))
            ]
            last = seen.long() - 1
            page = caches[0].shape[1]
            places = table.gather(1, (last // page)[:, None])[:, 0].long() * page + last % page
            with torch.no_grad():
                turned = rotate_and_store(q, *given, *caches, places)
                right = ops.paged_attention(turned, *caches, table, seen, implementation="kernel")
            call = PagedCall(q, *caches, table, seen, None, size**-0.5, 0, is_invariant)
            self._calls.append((call, *given, self._arrivals))
            self._places.append(places)
            self._expected.append(attend_new_tokens(*self._calls[-1]))
            if not (self._expected[-1].float() - right.float()).abs().max() <= 2**-5:
                raise AssertionError(f"attention of {batch} is wrong")

    def call(self, entry: int) -> Sequence[Check]:
        return [Check(attend_new_tokens(*self._calls[entry]), self._expected[entry])]

    def poison(self) -> None:
        for (call, *_), places in zip(self._calls, self._places, strict=True):
            for cache in (call.keys, call.values):
                cache.flatten(0, 1)[places] = torch.nan


class BestCase(WorkspaceCase):
    """The highest of rows of whole numbers, many of them equal."""

    entries = ENTRIES

    def __init__(self, team: Team) -> None:
        self._team, (rows, columns) = team, (64, 5000) if team.is_cuda else (4, 90)
        whole = [
            team.integers((rows, columns * team.world), "scores", entry, low=-9, high=9).bfloat16()
            for entry in range(ENTRIES)
        ]
        self._scores = [each.chunk(team.world, 1)[team.rank].contiguous() for each in whole]
        self._first = columns * team.rank
        self._expected = [each.float().argmax(1) for each in whole]

    def call(self, entry: int) -> Sequence[Check]:
        found = find_best(self._scores[entry], self._first, self._team.group)
        return [Check(found, self._expected[entry])]


class ExpertsCase(StressCase):
    """Experts' invariant products of whole numbers, whose sums are exact."""

    entries = ENTRIES

    def __init__(self, team: Team, *, leaves: int) -> None:
        self._leaves = leaves
        rows, experts, n, k = (200, 8, 520, 512) if team.is_cuda else (12, 3, 40, 32)
        self._weight = team.integers((experts, n, k), "weight", density=0.03).bfloat16()
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._expected: list[Tensor] = []
        for entry in range(ENTRIES):
            x = team.integers((rows, k), "x", entry, density=0.25).bfloat16()
            ends = torch.arange(experts + 1, device=team.device) * (rows - entry) // experts
            ends[1] = ends[0]  # an expert without rows
            product = torch.zeros(rows, n, device=team.device)
            for expert in range(experts):
                part = slice(int(ends[expert]), int(ends[expert + 1]))
                product[part] = x[part].float() @ self._weight[expert].float().t()
            self._inputs.append((x, ends.int()))
            self._expected.append(product.bfloat16())

    def call(self, entry: int) -> Sequence[Check]:
        x, offsets = self._inputs[entry]
        return [Check(multiply_groups(x, self._weight, offsets, self._leaves), self._expected[entry])]


def list_configurations() -> list[Configuration]:
    powers = (1, 2, 4, 8)
    sums = [
        Configuration(
            f"inference/{name}",
            "inference",
            kernels,
            covers,
            partial(SumCase, form=form, rows=rows, is_invariant=is_invariant, dtype=dtype),
            suits=lambda ranks, is_invariant=is_invariant: (ranks in powers or not is_invariant) and ranks > 1,
        )
        for name, covers, kernels, form, rows, is_invariant, dtype in (
            ("product-norm", "product, sum, residual and norm", (_GEMM, _SUMS), "product", 16, False, torch.bfloat16),
            ("product-norm-fp32", "the same in fp32", (_GEMM, _SUMS), "product", 3, False, torch.float32),
            ("sum-norm", "all-reduce, residual and norm", (_SUMS,), "sum", 33, False, torch.bfloat16),
            ("sum", "all-reduce of rows", (_SUMS,), "alone", 21, False, torch.bfloat16),
            ("invariant-norm", "an invariant product and norm", (_LEAVES, _SUMS), "product", 70, True, torch.bfloat16),
            ("invariant-sum", "ranks added by a tree", (_SUMS,), "sum", 5, True, torch.float16),
            ("invariant-reduce", "an invariant all-reduce", (_LEAVES, _SUMS), "all_reduce", 9, True, torch.float16),
            ("invariant-scatter", "one scattered", (_LEAVES, _SUMS), "reduce_scatter", 64, True, torch.bfloat16),
        )
    ]
    paged = [
        Configuration(
            f"inference/paged{'-invariant' * is_invariant}", "inference", _PAGED, "attention to pages",
            partial(PagedCase, is_invariant=is_invariant),
        )
        for is_invariant in (False, True)
    ]  # fmt: skip
    paged += [
        Configuration(
            f"inference/experts-{leaves}", "inference", (_EXPERTS,), "experts' invariant products",
            partial(ExpertsCase, leaves=leaves),
        )
        for leaves in (1, 8)
    ]  # fmt: skip
    paged += [
        Configuration(
            f"inference/new-tokens{'-invariant' * is_invariant}", "inference", _PAGED[:1],
            "a decoding step's attention", partial(NewTokensCase, is_invariant=is_invariant),
        )
        for is_invariant in (False, True)
    ]  # fmt: skip
    paged.append(Configuration("inference/best", "inference", (*_BEST, _SUMS), "the highest of rows", BestCase))
    paged.append(Configuration("inference/rotation", "inference", (_ROTATION,), "rotation and cache", RotationCase))
    return [*sums, *paged, Configuration("inference/norm", "inference", (_NORM,), "an exact norm", NormCase)]
