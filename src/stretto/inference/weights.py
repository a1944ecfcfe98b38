# SPDX-License-Identifier: Apache-2.0
"""Brings a training model's weights to one on another grid, each number once, from shard to shard: all of them
(`copy_weights`), or what has changed since the last time, as patches (`WeightChanges`, `apply_patches`). `HeldWeight`,
`exchange` and `patch_weights` are these for who holds weights in another way (`vllm_weights`).

Between two steps of reinforcement learning about 98% of 16-bit weights stay as they were. A patch has, of each part of
a parameter that a rank holds, the distances between numbers that changed, a byte each, and their new values: 3 bytes a
change, where all weights are 2 bytes a number.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.memory import store_all_gather
from stretto.parallel.comm.collectives import collective
from stretto.parallel.grid import Grid
from stretto.parallel.layout import Box, has_layout, layout_of, local, place_on, view_box
from stretto.parallel.state import require_state, state_of
from stretto.suggestions import require_type

_BUCKET_BYTES = 256 << 20  # of weights that are sent at a time
_DTYPES = (torch.bfloat16, torch.float16)  # of patches
_LONG_GAP = 255  # a byte that is no end of a gap


class HeldBox(NamedTuple):
    """A rectangle of a weight that this rank holds: where it begins in the whole, its size, and a view of it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    numbers: Tensor


class HeldWeight(NamedTuple):
    """A parameter or a persistent buffer: the whole's shape, the dtype here, and what this rank holds of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    parts: list[HeldBox]


Told = Mapping[str, Sequence[Any]]
"""Describe each weight of a rank: its shape and the boxes that it holds, [offsets, sizes], as JSON has them."""


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy a model's parameters and persistent buffers into those of another of the same architecture, in place and in
    its dtypes.

    source: on any grid of this job; or a model on no grid, of which every rank has the whole. target: one that
    `parallelize` has returned. Each rank sends what others lack, from shard to shard. Collective over the job. Raises
    ValueError if these differ, before anything is sent.
    """
    grid = require_state(target, "copy_weights").grid
    wanted, held = (weights_of(model) for model in (target, source))
    if state_of(source) is None:
        _require_same(tell(wanted), {name: torch.Size(weight.shape) for name, weight in held.items()})
        for name, weight in wanted.items():
            for part in weight.parts:
                part.numbers.copy_(_view(held[name], part.offsets, part.sizes))
        return
    ranks = dist.get_world_size()
    told = json.dumps([tell(held), tell(wanted)])
    texts = [told]
    if ranks > 1:
        world = dist.group.WORLD
        assert world is not None
        texts = store_all_gather(told, world, "stretto weights", grid.timeout.total_seconds())
    everyone = [json.loads(text) for text in texts]
    shapes = {name: torch.Size(shape) for each, _ in everyone for name, (shape, _) in each.items()}
    for _, want in everyone:
        _require_same(want, shapes)
    # A weight's dtype is its target's: the same on all ranks.
    dtypes = {name: weight.dtype for name, weight in wanted.items()}
    exchange(everyone, grid.communicator("world").rank(), held, wanted, dtypes, grid.device, _send_in_job)


def _send_in_job(received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int]) -> None:
    """All to all, of bytes."""
    world = dist.group.WORLD
    if world is None or len(sent_sizes) == 1:
        received.copy_(sent)
        return
    with collective("all_to_all", world):
        dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=world)


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and the buffers that a state dict has, by name."""
    require_type(model, nn.Module, "model")
    found: dict[str, Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


def weights_of(model: nn.Module) -> dict[str, HeldWeight]:
    """A model's parameters, and the buffers that a state dict has, as this rank holds them."""
    return {name: _describe(tensor) for name, tensor in _named_tensors(model).items()}


def _describe(tensor: Tensor) -> HeldWeight:
    if has_layout(tensor):
        boxes, shard = layout_of(tensor).boxes(*place_on(tensor.device_mesh)), local(tensor)  # type: ignore[attr-defined]
    else:
        nowhere = (0,) * tensor.dim()
        boxes, shard = [Box(nowhere, nowhere, tuple(tensor.shape))], tensor
    parts = [HeldBox(box.offsets, box.sizes, view_box(shard.detach(), box.local_offsets, box.sizes)) for box in boxes]
    return HeldWeight(tuple(tensor.shape), shard.dtype, isinstance(tensor, nn.Parameter), parts)


def tell(weights: Mapping[str, HeldWeight]) -> dict[str, Any]:
    """Describe for the others what a rank holds or wants (`Told`)."""
    return {
        name: (weight.shape, [(part.offsets, part.sizes) for part in weight.parts]) for name, weight in weights.items()
    }


class _Piece(NamedTuple):
    """A rectangle of a weight: its name, where it begins in the whole and its size."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def exchange(
    everyone: list[list[Told]],
    rank: int,
    held: Mapping[str, HeldWeight],
    wanted: Mapping[str, HeldWeight],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    all_to_all: Callable[[Tensor, Tensor, list[int], list[int]], None],
) -> None:
    """Send and receive weights, a bucket at a time. everyone: what each rank (holds, wants). dtypes: on the wire.

    all_to_all: receives bytes into its first argument, and sends its second; then how many from, and to, each rank.
    """
    for names in _buckets({name: torch.Size(shape) for each, _ in everyone for name, (shape, _) in each.items()}):
        sent = [_pieces(names, everyone, rank, receiver) for receiver in range(len(everyone))]
        received = [_pieces(names, everyone, sender, rank) for sender in range(len(everyone))]
        packed = [
            torch.cat([_view(held[p.name], *p[1:]).to(dtypes[p.name]).flatten().view(torch.uint8) for p in pieces])
            if pieces
            else torch.empty(0, dtype=torch.uint8, device=device)
            for pieces in sent
        ]
        lengths = [[prod(p.sizes) * dtypes[p.name].itemsize for p in pieces] for pieces in received]
        sizes = [sum(each) for each in lengths]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        all_to_all(buffer, torch.cat(packed), sizes, [len(part) for part in packed])
        for pieces, data, own in zip(received, buffer.split(sizes), lengths, strict=True):
            for piece, part in zip(pieces, data.split(own), strict=True):
                numbers = part.clone().view(dtypes[piece.name])  # which may lie at no multiple of its size
                _view(wanted[piece.name], *piece[1:]).copy_(numbers.view(piece.sizes))


def _pieces(names: list[str], everyone: list[list[Told]], sender: int, receiver: int) -> list[_Piece]:
    """List what a rank sends to another: of a box on several ranks, from the first at or after the receiver."""
    found, ranks = [], len(everyone)
    for name in names:
        boxes = everyone[sender][0].get(name, ((), []))[1]
        for offsets, sizes in boxes:
            order = ((receiver + step) % ranks for step in range(ranks))
            holders = (each for each in order if [offsets, sizes] in everyone[each][0].get(name, ((), []))[1])
            if next(holders) != sender:
                continue
            for want_offsets, want_sizes in everyone[receiver][1].get(name, ((), []))[1]:
                overlap = _overlap(offsets, sizes, want_offsets, want_sizes)
                if overlap is not None:
                    found.append(_Piece(name, *overlap))
    return found


def _overlap(
    a: Sequence[int], a_sizes: Sequence[int], b: Sequence[int], b_sizes: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    start = tuple(map(max, a, b))
    stops = [min(x + n, y + m) for x, n, y, m in zip(a, a_sizes, b, b_sizes, strict=True)]
    sizes = tuple(stop - first for stop, first in zip(stops, start, strict=True))
    return (start, sizes) if all(size > 0 for size in sizes) else None


def _buckets(shapes: Mapping[str, torch.Size]) -> Iterator[list[str]]:
    """Names in an order that all ranks share, so many at a time."""
    names: list[str] = []
    size = 0
    for name in sorted(shapes):
        names.append(name)
        size += prod(shapes[name]) * 2
        if size >= _BUCKET_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names


class WeightChanges:
    """Records what changes in a model's weights, rounded to a 16-bit dtype, from one `make_patch` to the next.

    model: one that `parallelize` has returned, on any grid, or one on none. Its weights of now are what the first patch
    is applied to: copy them to the other model before (`copy_weights`). Persistent buffers keep their own dtypes. Takes
    2 bytes for each number of this rank's shards.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"patches are of 16-bit weights, not {dtype}; torch.bfloat16 would do")
        self._model, self._dtype = model, dtype
        self._step = 0
        tensors = _named_tensors(model)
        state = state_of(model)
        grid = None if state is None else state.grid
        self._before = {
            name: [self._round(part.numbers, weight).clone() for part in weight.parts]
            for name, tensor in tensors.items()
            if _is_first(tensor, grid)
            for weight in [_describe(tensor)]
        }

    @torch.no_grad()
    def make_patch(self) -> bytes:
        """This rank's part of what has changed since the last call: a safetensors file, of all ranks' for a patch."""
        from safetensors.torch import save

        self._step += 1
        tensors = {"step": torch.tensor([self._step], device="cpu")}
        weights = weights_of(self._model)
        for name, before in self._before.items():
            for number, (was, part) in enumerate(zip(before, weights[name].parts, strict=True)):
                now = self._round(part.numbers, weights[name])
                old, new = was.flatten(), now.flatten()
                size = new.element_size()
                of_bytes = old.view(torch.uint8).view(-1, size) != new.view(torch.uint8).view(-1, size)
                changed = of_bytes.any(1).nonzero().squeeze(1)
                key = f"{name}:{number}"
                tensors[f"{key}:box"] = torch.tensor([part.offsets, part.sizes], dtype=torch.int64, device="cpu")
                tensors[f"{key}:gaps"] = _encode_gaps(changed).cpu()
                tensors[f"{key}:values"] = new[changed].cpu()
                was.copy_(now)
        return save(tensors)

    def _round(self, numbers: Tensor, weight: HeldWeight) -> Tensor:
        """Numbers of a weight, as a patch has them."""
        return numbers.to(self._dtype) if weight.is_parameter else numbers


@torch.no_grad()
def apply_patches(model: nn.Module, patches: Iterable[bytes], *, after: int | None = None) -> int:
    """Apply all ranks' patches of one step to a model, in place; returns the number of the step.

    model: one that `parallelize` has returned, on any grid, or one on none, which holds the weights that the patch was
    made from. after: the step of the patch that was applied before. Raises ValueError for patches that are damaged, of
    several steps, of another step than the next, or of another model, and if one is missing; nothing is then changed.
    """
    return patch_weights(weights_of(model), patches, after)


def patch_weights(weights: Mapping[str, HeldWeight], patches: Iterable[bytes], after: int | None) -> int:
    """`apply_patches`, to weights that this rank holds in any way."""
    if isinstance(patches, bytes):
        raise ValueError(f"patches are {len(patches)} bytes, but must be all ranks' patches; [patch] is a list of one")
    changes, steps, covered = [], set(), {name: {} for name in weights}  # type: ignore[var-annotated]
    for patch in patches:
        tensors = _read_patch(patch)
        steps.add(int(tensors.pop("step")))
        for key in [key.removesuffix(":box") for key in tensors if key.endswith(":box")]:
            change = _parse_change(key, tensors, weights)
            # Stages that share a parameter have both sent it.
            if change.piece.offsets not in covered[change.piece.name]:
                covered[change.piece.name][change.piece.offsets] = prod(change.piece.sizes)
                changes.append(change)
    if len(steps) != 1:
        raise ValueError(f"these are patches of the steps {sorted(steps)}, but must be all ranks' of one step")
    (step,) = steps
    if after is not None and step != after + 1:
        raise ValueError(f"this is the patch of step {step}, but the last one was of step {after}: {after + 1} is next")
    for name, weight in weights.items():
        if sum(covered[name].values()) != prod(weight.shape):
            raise ValueError(
                f"the patches have {sum(covered[name].values())} of the {prod(weight.shape)} numbers of {name}: those "
                "of all ranks are needed"
            )
    for change in changes:
        _apply(weights[change.piece.name], change)
    return step


class _Change(NamedTuple):
    """New values of some numbers of a rectangle of a parameter: their places in it, and the values."""

    piece: _Piece
    places: Tensor
    values: Tensor


def _read_patch(patch: bytes) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(patch)
    except SafetensorError as error:
        raise ValueError(f"a patch of {len(patch)} bytes is damaged: {error}") from error
    if "step" not in tensors or tensors["step"].numel() != 1 or tensors["step"].dtype != torch.int64:
        raise ValueError(f"a file of {len(patch)} bytes is no patch that WeightChanges has made: it names no step")
    return tensors


def _parse_change(key: str, tensors: Mapping[str, Tensor], weights: Mapping[str, HeldWeight]) -> _Change:
    """A change of a file that may be anything."""
    name = key.rpartition(":")[0]
    if name not in weights:
        raise ValueError(f"a patch is of {name!r}, which this model does not have")
    shape, dtype = weights[name].shape, weights[name].dtype
    box, gaps, values = (
        tensors.get(f"{key}:{part}", torch.empty(0, device="cpu")) for part in ("box", "gaps", "values")
    )
    is_valid = box.shape == (2, len(shape)) and box.dtype == torch.int64 and gaps.dtype == torch.uint8
    is_valid &= gaps.dim() == values.dim() == 1
    # Buffers have their own dtypes.
    is_valid &= values.dtype in _DTYPES if weights[name].is_parameter else values.dtype == dtype
    if is_valid:
        offsets, sizes = (tuple(part) for part in box.tolist())
        limits = zip(offsets, sizes, shape, strict=True)
        is_valid = all(first >= 0 and size > 0 and first + size <= limit for first, size, limit in limits)
    places = _decode_gaps(gaps) if is_valid else gaps
    if not is_valid or len(places) != len(values) or (len(places) and int(places[-1]) >= prod(sizes)):
        raise ValueError(f"the part {key!r} of a patch does not fit this model's {name}, {list(shape)}")
    if dtype in _DTYPES and dtype != values.dtype:
        raise ValueError(
            f"a patch is of {values.dtype} and this model's {name} of {dtype}, which would round its numbers; "
            f"WeightChanges(model, {dtype}) would do"
        )
    return _Change(_Piece(name, offsets, sizes), places, values)


def _apply(weight: HeldWeight, change: _Change) -> None:
    """Write the values that this rank holds."""
    if not len(change.places) or not weight.parts:
        return
    device = weight.parts[0].numbers.device
    rest, values = change.places.to(device), change.values.to(device, weight.dtype)
    at = []  # in the whole, by dim
    for size in reversed(change.piece.sizes):
        at.append(rest % size)
        rest = rest // size
    at = [index + first for index, first in zip(reversed(at), change.piece.offsets, strict=True)]
    for part in weight.parts:
        inside = torch.ones_like(values, dtype=torch.bool)
        for index, first, size in zip(at, part.offsets, part.sizes, strict=True):
            inside &= (index >= first) & (index < first + size)
        here = tuple(index[inside] - first for index, first in zip(at, part.offsets, strict=True))
        part.numbers[here] = values[inside]


def _encode_gaps(places: Tensor) -> Tensor:
    """The numbers that lie before each of ascending places and after the one before, uint8: 255 for each 255 of them,
    and then the rest."""
    gaps = places.diff(prepend=places.new_tensor([-1])) - 1
    long = gaps // _LONG_GAP
    ends = (long + 1).cumsum(0) - 1
    length = int(ends[-1]) + 1 if len(ends) else 0
    encoded = torch.full((length,), _LONG_GAP, dtype=torch.uint8, device=places.device)
    encoded[ends] = (gaps % _LONG_GAP).to(torch.uint8)
    return encoded


def _decode_gaps(encoded: Tensor) -> Tensor:
    """The places of `_encode_gaps`, int64."""
    is_end = encoded != _LONG_GAP
    before = encoded.long().cumsum(0)[is_end]
    return before + torch.arange(len(before), device="cpu")


def _require_same(wanted: Told, shapes: Mapping[str, torch.Size]) -> None:
    others = sorted(wanted.keys() ^ shapes.keys())
    different = [name for name in wanted.keys() & shapes.keys() if torch.Size(wanted[name][0]) != shapes[name]]
    if others or different:
        raise ValueError(
            f"{', '.join((others + sorted(different))[:3])}: the two models must have the same parameters; build both "
            "from one configuration"
        )


def _is_first(parameter: Tensor, grid: Grid | None) -> bool:
    """True if no rank before this one, but of other stages, holds the same part."""
    if not has_layout(parameter):
        if grid is None:
            return not dist.is_initialized() or dist.get_rank() == 0
        return grid.communicator("stage").rank() == 0
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    cut = {split.mesh_axis for split in layout_of(parameter).splits}
    return all(mesh.get_local_rank(axis) == 0 for axis in mesh.mesh_dim_names or () if axis not in cut)


def _view(weight: HeldWeight, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A rectangle that this rank holds."""
    for part in weight.parts:
        if _overlap(part.offsets, part.sizes, offsets, sizes) == (tuple(offsets), tuple(sizes)):
            return view_box(part.numbers, [at - first for at, first in zip(offsets, part.offsets, strict=True)], sizes)
    raise AssertionError(f"this rank does not hold {sizes} at {offsets}")
