# SPDX-License-Identifier: Apache-2.0
"""Launches of compiled kernels where there is no GPU: a driver of Triton's that writes down what it is given.

A process that imports this can launch nothing else: tests run `main` in one of its own.
"""

import importlib
import itertools
import random
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from stretto import tiles
from stretto.ops import Blocks, KernelConfig, cross_entropy, rotary, small_m
from stretto.ops.embedding import backward, forward, output_ring, placement, scheduled
from stretto.ops.embedding.launch_config import LaunchConfig
from stretto.ops.embedding.placement import EmbeddingPlacement
from stretto.ops.embedding.table_set import find_tables
from stretto.ops.gemm import GroupProduct, Scales
from stretto.ops.moe import activation, permutation
from stretto.ops.operands import FP8
from stretto.ops.operator import OperatorWorkspace

# As attributes of the package these are the functions.
gather_module = importlib.import_module("stretto.ops.all_gather_matmul")

WORLD = 4
_MIN_ADDRESS = 1 << 32
BLOCKS = Blocks(64, 64, 64, 2, 4, 2, 6)


class Address(int):
    """Where a tensor of a launch lies."""


class Recorder:
    """Methods that Triton's driver has to have; `launches` is what was launched: grid, kernel, arguments."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 1, 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 1 << 20, "multiprocessor_count": 132},
        )

    def launcher_cls(self, source: Any, _metadata: Any) -> Any:
        """Of one compiled kernel: known by its source and what it was compiled for."""
        kernel = source.hash()

        def launch(*arguments: Any) -> None:
            grid, rest = arguments[:3], arguments[9:]
            self.launches.append((grid, kernel, [describe(one) for one in rest]))

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def describe(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Address(argument.data_ptr())
    if isinstance(argument, TensorDescriptor):
        return Address(argument.base.data_ptr()), list(argument.shape), list(argument.block_shape)
    if isinstance(argument, tuple):
        return [describe(one) for one in argument]
    return getattr(argument, "value", argument)


class Memory:
    """Memory of four ranks, all in this process; this is rank 1, which Triton compiles in."""

    rank, world_size = 1, WORLD

    def __init__(self, size: int) -> None:
        self._bytes = torch.zeros(WORLD, size, dtype=torch.uint8)

    def buffer(self, rank: int | None = None) -> torch.Tensor:
        return self._bytes[self.rank if rank is None else rank]


all_launches: list[tiles.Launches] = []


def follow_launches() -> None:
    """Have every `Launches` that is made from now on in `all_launches`."""
    make = tiles.Launches.__init__

    def make_and_follow(self: tiles.Launches, *arguments: Any) -> None:
        make(self, *arguments)
        all_launches.append(self)

    tiles.Launches.__init__ = make_and_follow  # type: ignore[method-assign]


def make_workspace(purpose: str) -> OperatorWorkspace:
    size, peer_tiles = 4 << 20, 256 if purpose == "double_buffered" else 0
    channel = tiles.BlockChannel(Memory(2 * size + (1 << 16)), 128, peer_tiles, 30.0)  # type: ignore[arg-type]
    return OperatorWorkspace(channel, size, 2, torch.zeros(1024, dtype=torch.int32), itertools.cycle(range(2)))


class Kind(NamedTuple):
    """All that a GEMM's kernels may be compiled for; the last two are fp8's."""

    name: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    by_columns: bool
    bias: torch.dtype | None
    is_odd: bool
    out_dtype: torch.dtype
    scale_steps: tuple[int, int]


CHOICES: dict[str, list[Any]] = {
    "name": ["gather", "few"],
    "shape": [(64, 128, 128), (128, 128, 128), (66, 128, 65), (64, 1, 128)],  # rows of a rank, n, k
    "dtype": [torch.bfloat16, torch.float32, FP8],
    "by_columns": [False, True],
    "bias": [None, torch.float32, torch.bfloat16],
    "is_odd": [False, True],  # nothing begins at a multiple of 16 bytes
    "out_dtype": [torch.bfloat16, torch.float32],
    "scale_steps": [(1, 1), (0, 1), (1, 0), (3, 16)],  # between one row's factor and the next one's, and columns'
}


def draw_kinds(rng: random.Random, calls: int, make: Any, choices: dict[str, list[Any]]) -> Iterator[Any]:
    """Each differs from the last new one in one thing; half of them are one that was there before."""
    known = [make(*(rng.choice(options) for options in choices.values()))]
    yield known[0]
    for number in range(calls - 1):
        if number and rng.random() < 0.5:  # the second is the first one again
            what = rng.choice(list(choices))
            others = [choice for choice in choices[what] if choice != getattr(known[-1], what)]
            known.append(known[-1]._replace(**{what: rng.choice(others)}))
            yield known[-1]
        else:
            yield rng.choice(known)


def make_call(kind: Kind) -> Any:
    rows, n, k = kind.shape

    is_fp8 = kind.dtype == FP8

    def make(*sizes: int) -> torch.Tensor:
        numbers = torch.zeros(torch.Size(sizes).numel() + 1, dtype=kind.dtype)
        return numbers[1:].view(sizes) if kind.is_odd else numbers[:-1].view(sizes)

    def make_scale(size: int, step: int) -> torch.Tensor:
        return torch.zeros(size * step + 2)[kind.is_odd :].as_strided((size,), (step,))

    weight = make(k, n).t() if kind.by_columns and not is_fp8 else make(n, k)
    bias = None if kind.bias is None else torch.zeros(n, dtype=kind.bias)
    plan = KernelConfig(blocks=BLOCKS, transfer="programs", movers=2)
    x = make(rows, k) if kind.name == "gather" else make(WORLD * rows, k)
    scales = Scales(*map(make_scale, (x.shape[0], n), kind.scale_steps)) if is_fp8 else None
    return kind.name, plan, x, weight, bias, kind.out_dtype if is_fp8 else kind.dtype, scales


class LookUp(NamedTuple):
    """All that an embedding's kernels may be compiled for."""

    dims: tuple[int, ...]  # of this rank's tables
    total: int
    index: torch.dtype
    weighted: bool
    mode: str
    is_odd: bool
    bags: int
    action: str


LOOK_UP_CHOICES: dict[str, list[Any]] = {
    "dims": [(8, 16), (16, 16), (64,)],
    "total": [64, 65, 80],
    "index": [torch.int64, torch.int32],
    "weighted": [False, True],
    "mode": ["sum", "mean"],
    "is_odd": [False, True],
    "bags": [1, 2],
    "action": ["store", "sgd"],
}
placements: dict[tuple[int, ...], EmbeddingPlacement] = {}
kept: dict[Any, Any] = {}


def patch_embedding() -> None:
    """Four ranks' memory in one process, and no group."""

    def find_kept(_name: str, _device: torch.device, key: Any, make: Any) -> Any:
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def allocate(_group: Any, *, channels: int, peer_tiles: int = 0, data_bytes: int, backend: str) -> Any:
        return tiles.BlockChannel(Memory(data_bytes + (1 << 16)), channels, peer_tiles, 30.0)  # type: ignore[arg-type]

    for module in (forward, backward, output_ring):
        module.find_kept = find_kept  # type: ignore[attr-defined]
    placement.find_known = find_kept  # type: ignore[attr-defined]
    scheduled.find_agreed = lambda *_: SimpleNamespace(nodes=())  # type: ignore[attr-defined, assignment]
    backward.is_kept = lambda *_: True  # type: ignore[attr-defined]
    for module in (backward, output_ring):
        module.find_group = lambda _: SimpleNamespace(size=lambda: WORLD)  # type: ignore[attr-defined]
    tiles.BlockChannel.allocate = staticmethod(allocate)  # type: ignore[method-assign, assignment]


def run_look_up(kind: LookUp) -> None:
    """A look-up and its backward pass, of new tensors."""
    batch, device = 4 * WORLD, torch.device("cpu")
    dims = tuple(kind.dims if rank == Memory.rank else (8,) for rank in range(WORLD))
    seen = placements.setdefault(kind.dims, EmbeddingPlacement(Memory.rank, dims, torch.float32, batch))
    tables = [torch.zeros(10, dim) for dim in kind.dims]

    def make(size: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = torch.zeros(size + 1, dtype=dtype)
        return numbers[1:] if kind.is_odd else numbers[:-1]

    indices, weights = make(kind.total, kind.index), make(kind.total, torch.float32) if kind.weighted else None
    offsets = make(len(kind.dims) * batch + 1, torch.int64)
    config = LaunchConfig(kind.bags, 2, 4, 1, 3, "mixed")
    found = find_tables(tables, device)
    forward.look_up_and_send(indices, offsets, found, weights, seen, "", kind.mode, config=config)
    lookups = backward.LookupInput(indices, offsets, weights, kind.mode, found.rows, found.dims)
    staged = backward.stage_gradients(torch.zeros(4, seen.width), lookups, seen, "")
    assert staged is not None
    step = backward.TableUpdate("sgd", torch.zeros(2)) if kind.action == "sgd" else None
    backward.reduce_rows(staged, kind.dims, found.addresses, [0] * len(kind.dims), step)


class Alone(NamedTuple):
    """All that kernels without a workspace, which `launch_cached` launches, may be compiled for."""

    kernel: str
    columns: int
    rows: int
    dtype: torch.dtype
    is_odd: bool


ALONE_CHOICES: dict[str, list[Any]] = {
    "kernel": ["rotary", "swiglu", "copies", "loss"],
    "columns": [16, 64, 1, 40],
    "rows": [1, 16, 3, 17],
    "dtype": [torch.bfloat16, torch.float32],
    "is_odd": [False, True],
}


def run_alone(kind: Alone) -> None:
    """Kernels and their gradients, of new tensors."""

    def make(*sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        numbers = torch.zeros(torch.Size(sizes).numel() + 1, dtype=dtype or kind.dtype)
        return numbers[1:].view(sizes) if kind.is_odd else numbers[:-1].view(sizes)

    rows, columns = kind.rows, kind.columns
    match kind.kernel:
        case "rotary":
            angles = make(rows, columns, dtype=torch.float32), make(rows, columns, dtype=torch.float32)
            heads = rotary.rotate_and_split(make(2, rows, 3, 4, 2 * columns), *angles, 2)
            rotary.rotate_back_and_join(*heads, *angles)
        case "swiglu":
            activation.multiply_by_silu(make(rows, columns), make(rows, columns))
            activation.differentiate_swiglu(*(make(rows, columns) for _ in range(3)))
            activation._run(make(rows, 2 * columns))
        case "copies":
            positions = make(rows, 2, dtype=torch.int64)
            permutation._run_sum(make(2 * rows, columns), positions, make(rows, 2, dtype=torch.float32), None)
            permutation._run_sum(make(2 * rows, columns), positions, None, None)
            permutation._run_multiply(make(rows, columns), make(2 * rows, columns), positions, None)
        case "loss":
            cross_entropy.read_statistics(make(rows, columns), make(rows, dtype=torch.int64), columns)


def run_call(call: Any) -> None:
    name, plan, x, weight, bias, dtype, scales = call
    n = weight.shape[0]
    out = torch.zeros(x.shape[0] * WORLD if name == "gather" else x.shape[0] // WORLD, n, dtype=dtype)
    product = GroupProduct(x, weight, bias, out, "", scales)
    match name:
        case "gather":
            gather_module.launch_gather(plan, product)
        case "few":
            plan = plan._replace(blocks=plan.blocks._replace(m=16))
            small_m.launch("matmul_reduce_scatter", "scatter", plan, product, WORLD)


def main(seed: int, calls: int) -> None:
    """Launches with what is known kept must be those with all of it forgotten before each call."""
    recorder = Recorder()
    driver.set_active(recorder)
    follow_launches()
    patch_embedding()
    workspaces = {purpose: make_workspace(purpose) for purpose in ("double_buffered", "barrier", "packets")}
    for module in (gather_module, small_m):
        module.find_workspace = lambda _name, _device, _size, purpose: workspaces[purpose]

    def run(kind: Any, number: int) -> None:
        if isinstance(kind, LookUp | Alone):
            run_look_up(kind) if isinstance(kind, LookUp) else run_alone(kind)
            return
        for workspace in workspaces.values():
            object.__setattr__(workspace, "slot_cycle", itertools.cycle([number % 2]))
        run_call(make_call(kind))

    rng, found, wrong = random.Random(seed), 0, []
    gemms, look_ups = draw_kinds(rng, calls, Kind, CHOICES), draw_kinds(rng, calls, LookUp, LOOK_UP_CHOICES)
    alone = draw_kinds(rng, 2 * calls, Alone, ALONE_CHOICES)
    for number, kind in enumerate(itertools.chain(gemms, look_ups, alone)):
        counts, launched = [count_known()], []
        for forgets in (False, True):
            before = [dict(one._known) for one in all_launches]
            if forgets:
                for one in all_launches:
                    one.clear()
            recorder.launches.clear()
            run(kind, number)
            launched.append([(grid, kernel, arguments) for grid, kernel, arguments in recorder.launches])
            if forgets:
                for one, known in zip(all_launches, before, strict=True):
                    one.clear()
                    one._known.update(known)
            counts.append(count_known())
        found += counts[0] == counts[1]
        if not launched[0] or not agree(*launched):
            wrong.append((number, kind))
    print(f"{found} of {4 * calls} calls were known; wrong: {wrong}")
    sys.exit(bool(wrong) or found < calls // 2)


def count_known() -> int:
    return sum(len(one._known) for one in all_launches)


def agree(found: Any, expected: Any) -> bool:
    """True if two launches pass the same, apart from the addresses of what each call allocates anew.

    Where Triton gets a tensor, a known launch passes an address, with the same alignment.
    """
    if isinstance(expected, Address):
        return isinstance(found, int) and found > _MIN_ADDRESS and found % 16 == expected % 16
    if isinstance(expected, list | tuple):
        same = isinstance(found, list | tuple) and len(found) == len(expected)
        return same and all(agree(*pair) for pair in zip(found, expected, strict=True))
    return bool(found == expected)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
