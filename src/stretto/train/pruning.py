# SPDX-License-Identifier: Apache-2.0
"""Prunes a model: chooses masks on any grid, and knows what is left of each parameter's shard (Singh, chapter 4).

Masks depend on the whole weights, and not on the grid: each rank gathers one parameter at a time, chooses the largest
of all its numbers, and keeps the mask of its own shard.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.execution import SparseIndexKind, check_sparsity
from stretto.memory.plain_data import all_gather_data
from stretto.optim.sparse import EarlyBird, FullIndex, Masks, SparseIndex, WeightMask, make_index
from stretto.optim.sparse.index import make_table
from stretto.optim.sparse.masks import count_left, find_threshold, magnitude_bits, pack, select_above, select_largest
from stretto.parallel.comm.collectives import all_reduce, gather_rows
from stretto.parallel.comm.pruned_weights import PrunedRowExchange, PrunedWeight
from stretto.parallel.comm.weight_gathering import WeightToGather
from stretto.parallel.grid import Grid
from stretto.parallel.layers.embedding import ParallelEmbedding, ParallelPositions
from stretto.parallel.layout import TensorOnGrid, gather, has_layout, layout_of, place_like, shard_like
from stretto.parallel.state import ParallelState, state_of
from stretto.suggestions import did_you_mean
from stretto.train.bit_hash import hash_bits
from stretto.train.optimizer import local_shard
from stretto.train.replicas import place_of

PruneScope = Literal["layer", "global"]
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, ParallelEmbedding, ParallelPositions)


@torch.no_grad()
def prune(
    model: nn.Module,
    sparsity: float | None,
    method: Literal["magnitude"] | EarlyBird | Mapping[str, Tensor] = "magnitude",
    *,
    scope: PruneScope = "layer",
    exclude: Sequence[str] = (),
    weights: Callable[[str], Tensor] | None = None,
) -> Masks | None:
    """Choose which weights are left, set all others to zero, and return the masks for `StoredOptimizer(masks=...)`.

    model: plain, or on a grid. Pruned are the parameters of two and more dims that are trained; not embeddings (also as
    tied output layers), norms and biases, and what a pattern of `exclude` names. sparsity: the part that is pruned, of
    each parameter, or, with scope "global", of all together. method: "magnitude"; an `EarlyBird`, for which None is
    returned, and nothing is changed, until masks have settled; or bools of whole parameters by name, with sparsity
    None. weights: returns this rank's shard of a parameter by name (None: the model's own).

    Collective. Raises ValueError for a sparsity outside of [0, 1), for weights that are not finite, for masks of
    parameters that are not trained or of other shapes, and for a pattern or a model that leaves nothing to prune. Warns
    of weights of which nothing is left, and of those with fewer numbers than are left: zeros remain by their place.
    """
    if (state := state_of(model)) is not None and state.options.fp8 is not None:
        raise ValueError("prune: the model computes in fp8, in which pruned weights are not gathered: leave fp8 out")
    if scope not in get_args(PruneScope):
        raise ValueError(f"scope is {scope!r}, but must be 'layer' or 'global'")
    if isinstance(method, Mapping):
        if sparsity is not None:
            raise ValueError(f"sparsity is {sparsity}, but masks are given, which say what is left; None would do")
        if scope != "layer" or exclude:
            raise ValueError(
                f"scope is {scope!r} and exclude is {exclude!r}, but masks are given, which say what is left: leave "
                "both out"
            )
        masks = _shard_masks(model, method)
    else:
        if method != "magnitude" and not isinstance(method, EarlyBird):
            raise ValueError(f"method is {method!r}, but must be 'magnitude', an EarlyBird, or masks by name")
        if sparsity is None:
            raise ValueError("sparsity is None, but must be at least 0 and less than 1; 0.9 would do")
        check_sparsity(sparsity)
        masks = _choose(model, sparsity, scope, exclude, weights)
        if isinstance(method, EarlyBird) and not _have_settled(model, masks, method):
            return None
    for name, parameter in model.named_parameters():
        if name in masks.masks:
            local_shard(parameter).masked_fill_(~masks.masks[name].unpacked(), 0)
            torch.autograd.graph.increment_version(parameter)
    return masks


def prunable(model: nn.Module, exclude: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    """The parameters of this rank that `prune` prunes by default, by name."""
    kept = {id(p) for module in model.modules() if isinstance(module, _EMBEDDINGS) for p in module.parameters()}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2
        and parameter.requires_grad
        and parameter.is_floating_point()
        and id(parameter) not in kept
        and not (has_layout(parameter) and layout_of(parameter).pipe_copies > 1)  # a tied embedding's other end
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    }


def _choose(
    model: nn.Module,
    sparsity: float,
    scope: PruneScope,
    exclude: Sequence[str],
    weights: Callable[[str], Tensor] | None,
) -> Masks:
    names = [name for name, _ in _whole_parameters(model)]
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"exclude has {pattern!r}, which names no parameter{did_you_mean(pattern, names)}")
    parameters = prunable(model, exclude)
    if not _sum_over_ranks(model, float(len(parameters))):
        raise ValueError(
            f"there is nothing to prune: no trained parameter of two or more dims is left beside embeddings and what "
            f"exclude={list(exclude)} names"
        )

    def shard_of(name: str) -> Tensor:
        return local_shard(parameters[name]) if weights is None else weights(name)

    not_finite = [name for name in parameters if (own := shard_of(name)).is_meta or not bool(torch.isfinite(own).all())]
    if _sum_over_ranks(model, float(len(not_finite))):
        named = ", ".join(not_finite) or "parameters of other ranks"
        raise ValueError(f"{named} have numbers that are NaN, infinite or on the meta device: prune finite weights")
    threshold, ties = (0.0, 0)
    if scope == "global":
        bits = {name: magnitude_bits(shard_of(name)) for name in parameters}

        def count(at_least: int) -> int:
            return round(_count(model, {name: int((own >= at_least).sum()) for name, own in bits.items()}))

        threshold, ties = find_threshold(count, count_left(count(0), sparsity))
        bits.clear()
    found, empty, by_place = {}, [], []
    for name, parameter in parameters.items():
        whole = _gather(shard_of(name).to(parameter.device), parameter)
        if scope == "layer":
            is_left = select_largest(whole, count_left(whole.numel(), sparsity))
        else:
            is_left = select_above(whole, threshold, ties)
            ties -= min(ties, int((whole.float().abs() == threshold).sum()))
        left, size = int(is_left.sum()), whole.numel()
        if size and not left:
            empty.append(name)
        elif left < size and not bool(whole[is_left].all()):
            by_place.append(name)
        found[name] = WeightMask.of(_shard(is_left, parameter))
    if empty:
        warnings.warn(f"nothing is left of {', '.join(empty)}: exclude small weights", stacklevel=4)
    if by_place:
        named = ", ".join(by_place)
        warnings.warn(f"{named}: more is left than is not zero, so the first zeros are left, too", stacklevel=4)
    return Masks(found, sparsity)


def _have_settled(model: nn.Module, masks: Masks, early_bird: EarlyBird) -> bool:
    differing = [_count(model, of_one) for of_one in early_bird.distances(masks)]
    size = _count(model, {name: mask.shape.numel() for name, mask in masks.masks.items()})
    return len(differing) >= early_bird.window - 1 and max(differing) <= early_bird.tolerance * size


def _shard_masks(model: nn.Module, given: Mapping[str, Tensor]) -> Masks:
    own, shapes = dict(model.named_parameters()), dict[str, tuple[int, ...]]()
    for name, parameter in _whole_parameters(model):
        if own.get(name, parameter).requires_grad:
            shapes[name] = tuple(parameter.shape)
    for name, mask in given.items():
        if not isinstance(mask, Tensor):
            raise ValueError(f"the mask of {name} is a {type(mask).__name__}, but must be a tensor of bools")
        if name not in shapes:
            raise ValueError(
                f"a mask is of {name!r}, which is no trained parameter of the model (tied ones have their first name)"
            )
        is_whole = not isinstance(mask, DTensor) and mask.layout == torch.strided and not mask.is_meta
        if not is_whole or not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(
                f"the mask of {name} must be a dense tensor of bools, or of zeros and ones, of the whole parameter "
                "(stretto.parallel.gather)"
            )
        if tuple(mask.shape) != shapes[name]:
            raise ValueError(f"the mask of {name} is {list(mask.shape)}, but the parameter is {list(shapes[name])}")
    left, size = sum(int((mask != 0).sum()) for mask in given.values()), sum(mask.numel() for mask in given.values())
    if not size:
        raise ValueError("masks are of no number; prune(model, 0.9) chooses some")
    masks = {name: WeightMask.of(_shard(mask, own[name]) != 0) for name, mask in given.items() if name in own}
    return Masks(masks, 1 - left / size)


def _whole_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of all pipeline stages, and their names."""
    from stretto.parallel.pipeline.stages import whole_model

    return whole_model(model).named_parameters()


def _gather(shard: Tensor, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return shard.detach()
    return gather(place_like(shard.detach(), parameter), layout_of(parameter))


def _shard(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    return shard_like(whole, parameter).to_local()


def _count(model: nn.Module, counts: Mapping[str, int]) -> float:
    """The sum over all ranks of what is counted in their shards of parameters, by name; of replicas once."""
    if (state := state_of(model)) is None:
        return sum(counts.values())
    sizes, own = state.grid.layout_sizes, dict(model.named_parameters())
    return _sum_over_ranks(model, sum(count / layout_of(own[name]).replicas(sizes) for name, count in counts.items()))


def _sum_over_ranks(model: nn.Module, number: float) -> float:
    """The sum over all ranks of a model on a grid, or the number itself."""
    if (state := state_of(model)) is None:
        return number
    total = torch.tensor(number, dtype=torch.float64, device=state.grid.device)
    return float(all_reduce(total, state.grid.group("world")))


class PrunedParameters:
    """Holds what is left of this rank's shards, as a store does: each parameter's index, and of those that z shards
    this rank's share (`PrunedWeight`).

    sharded: how z shards weights. Raises ValueError, on all ranks, for masks that differ between ranks that hold the
    same shard, for one of another shape, and as `make_index` does. Collective.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masks: Masks,
        sharded: Mapping[nn.Parameter, WeightToGather],
        kind: SparseIndexKind,
        dtype: torch.dtype,
        grid: Grid,
    ) -> None:
        _check_masks(parameters, masks, grid)
        self._parameters, self._device = parameters, grid.device
        self._shares: dict[str, PrunedWeight] = {}
        self._writers: list[_RowWriter] | None = None
        self.indices: dict[str, SparseIndex] = {}  # of what the store has
        for name, parameter in parameters.items():
            shard, mask = local_shard(parameter), masks.masks.get(name)
            index: SparseIndex = FullIndex(shard.numel())
            if mask is not None:
                weight = sharded.get(parameter)
                if weight is None or weight.group is None or weight.group.size() == 1:
                    index = make_index(mask.bits, shard.numel(), kind)
                else:
                    share = self._shares[name] = _share(shard, mask, weight, kind, dtype)
                    index = FullIndex(share.count)
            self.indices[name] = index

    @property
    def num_bytes(self) -> int:
        """Bytes of all indices."""
        of_shares = sum(share.num_bytes for share in self._shares.values())
        return of_shares + sum(index.num_bytes for index in self.indices.values())

    def home(self, name: str, shard: Tensor) -> Tensor:
        """The flat tensor that holds a parameter's weights, of which the store updates what is left."""
        share = self._shares.get(name)
        return shard.view(-1) if share is None else share.values[: share.count]

    def send(self, state: ParallelState) -> None:
        """Have what goes over z carry what is left."""
        for name, parameter in self._parameters.items():
            if isinstance(parameter, TensorOnGrid):
                parameter.pruned = self._shares.get(name)
        state.weight_gatherer.send_pruned()
        for block in state.block_shards.values():
            block.fill_messages()

    def compress(self, name: str, shard: Tensor) -> Tensor:
        """Compress a tensor like a parameter's shard to what the store keeps. Collective for one that z shards."""
        shard = shard.to(self._device)
        if (share := self._shares.get(name)) is not None:
            return share.compress(shard)
        index = self.indices[name]
        return index.compress(shard.reshape(-1), shard.new_empty(index.count))

    def expand_later(self, name: str, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The reverse of `compress`: a function that makes what `read` returns a tensor of the shard's shape, with
        zeros. Collective, here, for a parameter that z shards."""
        shape, index = local_shard(self._parameters[name]).shape, self.indices[name]
        if (share := self._shares.get(name)) is not None:
            rows = share.to_rows(read().flatten().to(self._device))
            return lambda: share.expand_rows(rows, shape)

        def expand() -> Tensor:
            left = read().flatten()
            if not isinstance(index, FullIndex):
                left = index.fill(left.to(self._device), left.new_empty(index.size, device=self._device))
            return left.view(shape)

        return expand

    def write_rows(self) -> None:
        """Write the rows of parameters that z shards as their shares have them. Collective if there are any."""
        if self._writers is None:
            by_group: dict[dist.ProcessGroup, list[tuple[PrunedWeight, Tensor]]] = {}
            for name, share in self._shares.items():
                by_group.setdefault(share.group, []).append((share, local_shard(self._parameters[name])))
            self._writers = [_RowWriter(alike) for alike in by_group.values()]
        for writer in self._writers:
            writer.write()


class _RowWriter:
    """Writes this rank's rows of weights whose shares z's ranks exchange: at once those that z cuts by dim 0."""

    def __init__(self, weights: Sequence[tuple[PrunedWeight, Tensor]]) -> None:
        self._weights = sorted(weights, key=lambda each: each[0].dim)
        self._exchange = PrunedRowExchange([share for share, _ in self._weights])
        self._counts = [share.own.count for share, _ in self._weights]
        plain = [(share, shard) for share, shard in self._weights if not share.dim]
        firsts = list(accumulate(self._counts, initial=0))[: len(plain)]
        self._table = make_table(
            [cast(SparseIndex, share.own) for share, _ in plain], firsts, [shard for _, shard in plain]
        )
        self._written = 0 if self._table is None else len(plain)

    def write(self) -> None:
        """Collective."""
        rows = self._exchange.run()
        if self._table is not None:
            self._table.expand(rows, 0, self._table.stop)
        for (share, shard), left in list(zip(self._weights, rows.split(self._counts), strict=True))[self._written :]:
            shard.copy_(share.expand_rows(left, shard.shape))


def _share(
    shard: Tensor, mask: WeightMask, weight: WeightToGather, kind: SparseIndexKind, dtype: torch.dtype
) -> PrunedWeight:
    assert weight.group is not None
    rows = mask.unpacked().transpose(0, weight.dim).to(torch.uint8).contiguous()
    whole = gather_rows(rows, weight.rows, weight.group)
    of_whole, of_rows = (make_index(pack(each.flatten() != 0), each.numel(), kind) for each in (whole, rows))
    like = shard.new_empty(0, dtype=dtype)
    return PrunedWeight(of_whole, of_rows, whole.shape, weight.group, weight.dim, like)


def _check_masks(parameters: Mapping[str, nn.Parameter], masks: Masks, grid: Grid) -> None:
    """Raise ValueError for masks of other shapes, and for those that differ between ranks that hold the same shard.

    Collective over all ranks, also those of a pipeline stage that has no such parameters.
    """
    problem = ""
    for name, mask in masks.masks.items():
        parameter = parameters.get(name)
        if parameter is None:
            problem = problem or (
                f"a mask is of {name!r}, which is no trained parameter of this rank: prune after parallelize"
            )
        elif mask.shape != local_shard(parameter).shape:
            shapes = list(mask.shape), list(local_shard(parameter).shape)
            problem = problem or (
                f"the mask of {name} is {shapes[0]}, but this rank's shard is {shapes[1]}: prune after parallelize"
            )
    # A parameter that this rank has no mask of may have one on others.
    hashes = dict.fromkeys(parameters, -1)
    if not problem and masks.masks:
        hashes |= zip(masks.masks, hash_bits([mask.bits for mask in masks.masks.values()]).tolist(), strict=True)
    own = [(name, place_of(parameters[name]), value) for name, value in hashes.items()]
    everyone = all_gather_data((problem, own), grid.group("world"), tuple[str, list[tuple[str, str, int]]])
    if any(problem for problem, _ in everyone):
        raise ValueError(problem or "the masks of other ranks do not fit: their errors say which")
    first = dict[tuple[str, str], int]()
    differing = {
        name
        for _, of_rank in everyone
        for name, place, value in of_rank
        if first.setdefault((name, place), value) != value
    }
    if differing:
        raise ValueError(
            f"the masks of {', '.join(sorted(differing))} differ between ranks that hold the same shard: prune with "
            "one mask on all of them, as prune(model, sparsity) does"
        )
