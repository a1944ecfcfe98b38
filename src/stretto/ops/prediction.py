# SPDX-License-Identifier: Apache-2.0
"""Predicts the seconds of an operator's call from the machine's speeds: by a kernel, and by the library.

A product takes as long as its FLOPs or its bytes do. The library's collective follows it; of a kernel only a part
of the communication is exposed. `Constants` has what the two are fitted by: one set for all machines, since speeds are
the machine's own (`tests/ops/test_prediction.py` fits it to one machine's times and predicts another's choices).
"""

from typing import NamedTuple

import torch

from stretto.memory.gpus import count_links
from stretto.ops.gemm import Blocks, count_waves, divide_up

NEVER_SLOWER = 0.98
"""A kernel is taken where it is predicted to reach at least this part of the library's speed."""

FEW_ROWS = 64
"""Up to so many rows a product takes as long as its weight takes to stream from memory."""

MAX_PIECES = 8
"""The most pieces in which copy engines transfer a shard, or tiles of an owner's sums beside those of a last wave."""

_AS_FAST = 1.01  # pieces may cost so much, since each takes the host two calls of the driver for every peer
_SIGNAL = 7e-6  # by which a copy of some bytes delays a copy engine's next one (docs/decisions/011)
_LATE = 1.5  # times a transfer's seconds at full speed: links may be shared, and peers late
_FLOPS_A_CLOCK = 4096  # dense, of 16 bits, by one multiprocessor of sm_90; twice as many of 8 bits
_LINK_BYTES = 25e9  # a second in one direction, of one link of NVLink 2, 3 or 4


class Speeds(NamedTuple):
    """A GPU's peak speeds. flops: of 16 bits a second; memory, link: bytes a second; link: to all peers together."""

    flops: float
    memory: float
    link: float


class GemmCall(NamedTuple):
    """An operator's call: rows m of all ranks, a rank's weight [n, k], bytes of an element of the operands."""

    operator: str
    m: int
    n: int
    k: int
    itemsize: int
    world: int


class Constants(NamedTuple):
    """Fractions of peak speeds that are reached, and seconds of latency.

    product, memory, library_link: the fraction of FLOPs, of memory bandwidth, and of the links by NCCL. library: a
    collective's latency. programs: an exchange's, of rows or packets. step: of a shard that copy engines transfer.
    """

    product: float
    memory: float
    library_link: float
    library: float
    programs: float
    step: float


FITTED = Constants(0.63, 0.84, 0.495, 12.7e-6, 6e-6, 18e-6)


def find_speeds(device: torch.device) -> Speeds | None:
    """This GPU's speeds, as its driver gives clocks, bus width and links; None where it does not give them."""
    found = torch.cuda.get_device_properties(device)
    clock, memory_clock = found.clock_rate * 1e3, found.memory_clock_rate * 1e3  # kHz
    speeds = Speeds(
        found.multi_processor_count * clock * _FLOPS_A_CLOCK,
        2 * memory_clock * found.memory_bus_width / 8,  # data travels at both edges of the clock
        count_links(str(found.uuid)) * _LINK_BYTES,
    )
    return speeds if all(speeds) else None


def predict_library(call: GemmCall, speeds: Speeds, constants: Constants = FITTED) -> float:
    """The seconds of the product and then the library's collective."""
    sent = _count_sent(call) * (2 if call.operator == "matmul_all_reduce" else 1)
    product = max(2 * call.m * call.n * call.k / _find_rate(call, speeds, constants), _stream(call, speeds, constants))
    if call.world == 1 and call.operator == "matmul_all_reduce":
        return product  # the sum of one rank is no call
    return product + constants.library + sent / (constants.library_link * speeds.link)


def predict_kernel(
    call: GemmCall,
    speeds: Speeds,
    processors: int,
    blocks: Blocks,
    exchange: str,
    shots: int = 1,
    constants: Constants = FITTED,
) -> float:
    """The seconds of a kernel. exchange: "packets", "programs" (that move rows) or "copies"."""
    shards = call.world if call.operator == "matmul_reduce_scatter" else 1
    count = shards * divide_up(call.m // shards, blocks.m) * divide_up(call.n, blocks.n)
    product, sent = _stream(call, speeds, constants), _count_sent(call)
    if call.m > FEW_ROWS:  # a tile of fewer rows than a full one takes about as long, to load its columns
        full = max(blocks.m, 128) * blocks.n
        tile = 2 * full * call.k * max(blocks.programs, processors) / _find_rate(call, speeds, constants)
        product = max(product, count_waves(count, call.k, blocks) * tile)
    if exchange == "copies":
        # Programs without a tile of own rows wait for the next shards, or the last ones' tiles are sent exposed; and
        # where links are slower than the product, a shard's part of it comes after all transfers.
        step = constants.step + _count_whole(call) / call.world / speeds.link
        waits = min(call.world - 1, divide_up(processors, max(1, count // call.world)) - 1)
        steps = (call.world - 1) * step
        sent_again = steps if call.operator == "matmul_all_reduce" else 0.0  # sums, which no product is left to hide
        return max(product + waits * step, steps + product / call.world) + sent_again
    if call.operator == "matmul_all_reduce":
        sent = 2 * sent if shots == 2 else (call.world - 1) * _count_whole(call)
    return product + constants.programs + sent / speeds.link


def count_pieces(call: GemmCall, speeds: Speeds, processors: int, blocks: Blocks) -> int:
    """The fewest pieces, a power of two, in which copy engines transfer a shard, or an owner's sums, without loss.

    Where a shard arrives sooner than the shard before it is multiplied, pieces gain nothing. Where links are slower,
    what is left after the last transfer is one piece's product, but each piece delays the transfers by its signal.
    Sums are pushed as they are computed, and own ones are added up piece by piece, the last one under the last wave. An
    all-reduce pushes these in turn, of which one piece comes after all else.
    """
    rate, others = _find_rate(call, speeds, FITTED), call.world - 1
    product, part = 2 * call.m * call.n * call.k / rate, _count_whole(call) / call.world
    shard, sent = product / call.world, _LATE * part / speeds.link
    wave = 2 * blocks.m * blocks.n * call.k * max(blocks.programs, processors) / rate
    sums = (call.world + 1) * part / (FITTED.memory * speeds.memory)

    def take(pieces: int) -> float:
        transfers = shard / pieces + others * (sent + pieces * _SIGNAL)
        if call.operator == "all_gather_matmul":
            return max(product, transfers)
        pushed = max(others * shard + sent / pieces, transfers)
        added = max(pushed + sums, product + max(0.0, sums / pieces - wave))
        if call.operator == "matmul_all_reduce":
            return max(added, transfers + others * sent) + others * (sent / pieces + pieces * _SIGNAL)
        return added

    times = {1 << power: take(1 << power) for power in range(MAX_PIECES.bit_length())}
    return next(pieces for pieces, seconds in times.items() if seconds <= _AS_FAST * min(times.values()))


def _find_rate(call: GemmCall, speeds: Speeds, constants: Constants) -> float:
    return constants.product * speeds.flops * (2 if call.itemsize == 1 else 1)


def _stream(call: GemmCall, speeds: Speeds, constants: Constants) -> float:
    """The seconds in which memory reads the operands and takes the product, of 16 bits."""
    read = (call.m + call.n) * call.k * call.itemsize
    return (read + 2 * call.m * call.n) / (constants.memory * speeds.memory)


def _count_whole(call: GemmCall) -> int:
    """The bytes of all ranks' rows, or of the whole sums, of 16 bits."""
    return call.m * call.k * call.itemsize if call.operator == "all_gather_matmul" else 2 * call.m * call.n


def _count_sent(call: GemmCall) -> float:
    """The bytes that a rank sends in a gather or in a reduce-scatter."""
    return (call.world - 1) / call.world * _count_whole(call)
