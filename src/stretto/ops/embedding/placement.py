# SPDX-License-Identifier: Apache-2.0
"""Table placement (which rank has which tables, agreed on at the first call), and checks of a call's input."""

import enum
import functools
import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.memory import exchange
from stretto.memory.plain_data import all_gather_data
from stretto.ops.operands import DTYPES, require_device, require_like
from stretto.ops.operator import find_group, find_known
from stretto.suggestions import require_one_of

MODES = ("sum", "mean")
AGREED, GRADIENTS = 1, 2
"""Bits of a call's permit. AGREED: all ranks make the call. GRADIENTS: the tables get gradients of it."""

_TIMEOUT = 60.0


class Announced(enum.IntEnum):
    """Bits of a rank's announcement of a call, above the 31 bits of its placement's fingerprint.

    HAS_TABLES: the rank has tables. NEEDS_GRAD: it will make a backward pass. REFUSES: it raises an error in this call,
    which no rank then makes. ALWAYS: set.
    """

    HAS_TABLES = 32
    NEEDS_GRAD = 33
    REFUSES = 34
    ALWAYS = 40


@dataclass(frozen=True, eq=False)
class EmbeddingPlacement:
    """All ranks' tables as one rank sees them. There may be hundreds, so properties are computed once.

    rank: this one. dims: of each rank's tables. dtype: of all tables. batch: global.
    """

    rank: int
    dims: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    batch: int

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.dims)

    @property
    def local_batch(self) -> int:
        """Return the samples of each rank."""
        return self.batch // len(self.dims)

    @functools.cached_property
    def width(self) -> int:
        """Return the columns of the output: of all tables of all ranks."""
        return sum(self.widths)

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Return the columns of each rank's tables."""
        return tuple(sum(dims) for dims in self.dims)

    @functools.cached_property
    def longest(self) -> int:
        """Return the largest dim of this rank's tables."""
        return max(self.dims[self.rank], default=4)

    @functools.cached_property
    def fingerprint(self) -> int:
        """Return a hash of all ranks' tables: equal on ranks that see the same tables, most likely unequal otherwise.

        It is odd and has 31 bits, so that Triton compiles one kernel for all values.
        """
        return zlib.crc32(repr((self.dims, self.dtype, self.batch)).encode()) & 0x7FFFFFFF | 1

    def announce(self, *, needs_grad: bool, refuses: bool = False) -> int:
        """Return this rank's announcement of a call to all others: the fingerprint, and bits above it (`Announced`).

        It is odd and has more than 32 bits, so that Triton compiles one kernel for all values.
        """
        bits = 1 << Announced.ALWAYS | needs_grad << Announced.NEEDS_GRAD | refuses << Announced.REFUSES
        return bits | bool(self.dims[self.rank]) << Announced.HAS_TABLES | self.fingerprint

    def first_column(self, rank: int) -> int:
        """Return the first column of a rank's tables in the output."""
        return sum(self.widths[:rank])


def require_input(
    indices: Tensor,
    offsets: Tensor,
    tables: int,
    weights: Tensor | None,
    mode: str,
    batch: int | None,
    world: int,
) -> int:
    """Check a call's input and return the global batch. ValueError for invalid input; no element is read."""
    name = "embedding_all_to_all"
    require_mode(mode)
    for what, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} takes {what} as a contiguous tensor of one dim, int32 or int64, not {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
    if indices.device != offsets.device:
        raise ValueError(f"{name}: offsets are on {offsets.device} and indices on {indices.device}: move one of them")
    if weights is not None:
        require_like(name, "weights, one an index,", weights, indices.shape, DTYPES, indices.device)
        if weights.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} gives per-sample weights no gradient: detach() them")
    count = _find_batch(name, offsets, tables, batch)
    if count % world:
        raise ValueError(
            f"{name}: {world} ranks do not divide the global batch of {count}: {-(-count // world) * world} will do"
        )
    if not torch.compiler.is_compiling():
        require_device(name, "offsets are", offsets)
    return count


def require_mode(mode: str) -> None:
    """ValueError for an unknown pooling mode."""
    require_one_of(MODES, "embedding_all_to_all: ", mode=mode)


def _find_batch(name: str, offsets: Tensor, tables: int, batch: int | None) -> int:
    bags = offsets.shape[0] - 1
    if tables == 0:
        if batch is None:
            raise ValueError(f"{name}: this rank has no tables, so the global batch size is unknown: pass batch=")
        if bags != 0:
            raise ValueError(f"{name}: offsets for no tables have one element, not {bags + 1}")
        return batch
    if bags < 0 or bags % tables:
        raise ValueError(
            f"{name}: offsets of {tables} tables have {tables} x the global batch + 1 elements, not {bags + 1}"
        )
    if batch is not None and batch != bags // tables:
        raise ValueError(f"{name}: offsets are for a global batch of {bags // tables}, but batch is {batch}")
    return bags // tables


class _RankTables(NamedTuple):
    """A rank's description of its tables for the others. dtype, needs_grad, index_dtype: None if it has no tables."""

    dims: tuple[int, ...]
    dtype: torch.dtype | None
    batch: int
    needs_grad: bool | None
    index_dtype: torch.dtype | None
    schedule: str


def find_placement(
    group: str,
    device: torch.device,
    name: str,
    dims: tuple[int, ...],
    dtype: torch.dtype | None,
    batch: int,
    needs_grad: bool,
    index_dtype: torch.dtype | None = None,
    schedule: str = "",
) -> EmbeddingPlacement:
    """Find the placement of this rank's tables. The first call with these arguments is collective: all ranks make it.

    dtype: None if this rank has no tables. needs_grad, index_dtype, schedule: compared in the first call alone; the
    kernels compare the gradients of each call, and each rank reads its own indices only. ValueError if ranks differ.
    """

    def make() -> EmbeddingPlacement:
        own = _RankTables(dims, dtype, batch, needs_grad, index_dtype, schedule)
        return _agree(group, device, own if dims else own._replace(dtype=None, needs_grad=None, index_dtype=None))

    return find_known(group, device, ("embedding placement", name, dims, dtype, batch), make)


def find_permit(group: str, device: torch.device, placement: EmbeddingPlacement) -> Tensor:
    """Return int32 [1] on the device: the permit that the placement's last look-up gives its backward pass (`AGREED`).

    At first it permits everything, for callers that make no look-up.
    """

    def make() -> Tensor:
        return torch.full((1,), AGREED | GRADIENTS, dtype=torch.int32, device=device)

    return find_known(group, device, ("embedding permit", placement), make)


def _agree(group: str, device: torch.device, own: _RankTables) -> EmbeddingPlacement:
    process_group = find_group(group)
    if device.type == "cpu":
        every = exchange(own, process_group, _TIMEOUT, _RankTables)
    else:  # NCCL has no barrier with a time limit; the group's own counts
        every = all_gather_data(own, process_group, _RankTables)
    owners = [(rank, other) for rank, other in enumerate(every) if other.dims]
    if not owners:
        raise ValueError("embedding_all_to_all: no rank of the group has a table")
    for what in ("dtype", "batch", "needs_grad", "index_dtype", "schedule"):
        among = list(enumerate(every)) if what in ("batch", "schedule") else owners
        (first, value), *others = ((rank, getattr(other, what)) for rank, other in among)
        for rank, other_value in others:
            if other_value != value:
                names = {
                    "dtype": "tables' dtype",
                    "batch": "global batch",
                    "needs_grad": "tables' requires_grad",
                    "index_dtype": "dtype of indices",
                    "schedule": "schedule (none: '')",
                }
                raise ValueError(
                    f"embedding_all_to_all: all ranks have one {names[what]}: rank {first}'s is {value}, rank {rank}'s "
                    f"{other_value}"
                )
    dims, dtype = tuple(other.dims for other in every), owners[0][1].dtype
    assert dtype is not None
    return EmbeddingPlacement(process_group.rank(), dims, dtype, own.batch)


@functools.lru_cache(maxsize=256)
def common_multiple(numbers: tuple[int, ...], itemsize: int) -> int:
    """Return the largest number of elements, up to 16 bytes of them, that divides all the given numbers of elements."""
    return math.gcd(16 // itemsize, *numbers)
