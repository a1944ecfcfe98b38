"""Breaks one barrier, wait, acquire or fence of a kernel family at a time, and shows who finds it: the stress or PTX.

    python -m stretto.bench.stress.mutations --ranks 2 --jobs 8 --out results/mutations

Run it in the repository's root, whose tests it takes. Each mutation is applied to a copy of the package's source, whose
configurations are stressed until the first finding, for at most a minute; and the named tests of machine code run on
that copy. Several mutations are tried at a time, all as clients of one MPS daemon.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path

KINDS = ("barrier", "wait", "acquire", "fence")
_BATCH_LIMIT = 75.0  # seconds: what waits for nobody that comes hangs
_START_SECONDS = 400.0  # for the ranks to start, and for the batch that is under way when the time is over
_TEST_SECONDS = 600.0
_MOST_WORDS = 160  # of a finding


@dataclass(frozen=True)
class Edit:
    """A change of one file, below the package's folder: `old`, which it has exactly once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """One thing removed. kind: of `KINDS`; a release stands in for a fence where a family has none.

    only: the configurations to stress. tests: of machine code, which may find it. equivalent: why it changes nothing
    that runs, or "": there is nothing to find then, and it is not stressed.
    """

    family: str
    kind: str
    what: str
    edits: tuple[Edit, ...]
    only: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.family}: {self.kind}, {self.what}"


@dataclass(frozen=True)
class Verdict:
    """What has come of a mutation. by_stress, by_tests: how each has found it, or "" if it has not.

    equivalent: see `Mutation`.
    """

    family: str
    kind: str
    what: str
    by_stress: str
    seconds: float
    by_tests: str
    note: str = ""
    equivalent: str = ""

    @property
    def is_found(self) -> bool:
        """Barriers and waits are to be found by stress, acquires and fences by either."""
        return bool(self.equivalent) or bool(self.by_stress or (self.kind in ("acquire", "fence") and self.by_tests))


_TILES = "tests/tiles/test_machine_code.py::"
_OPS = "tests/ops/test_machine_code.py::"
_EMBEDDING = "tests/ops/test_embedding_machine_code.py::"
_SOURCE = "tests/collectives/executor/cuda/test_codegen.py::"

_SIGNALS = "tiles/signals.py"
_WAITS = "tiles/waits.py"
_CALLS = "tiles/calls.py"
_PTX = "collectives/executor/cuda/ptx.cu"
_PRIMITIVES = "collectives/executor/cuda/primitives.cu"
_WRITER = "collectives/executor/cuda/fused/codegen.py"
_INTERPRETER = "collectives/executor/cuda/interpreter.cu"
_COPIED = "collectives/executor/cuda/copy_engine/flags.cu"

# A target that counters reached long ago: the wait is still there, and ends at once.
_MET = " - (1 << 20)"

_NO_BARRIER = Edit(
    _SIGNALS, "        finish_tma_stores()\n    tl.debug_barrier()", "        finish_tma_stores()\n    pass"
)
_NO_ACQUIRE = (
    Edit(
        _WAITS,
        '    seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")\n    began =',
        '    seen = tl.atomic_add(pointer, 0, sem="relaxed", scope="sys")\n    began =',
    ),
    Edit(
        _WAITS,
        '    while waits:\n        seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")',
        '    while waits:\n        seen = tl.atomic_add(pointer, 0, sem="relaxed", scope="sys")',
    ),
)
_NO_MEETING = Edit(
    _CALLS,
    "await_slot(channel, peer, channel.peer_tiles, awaited, OF_BEGIN, False)",
    f"await_slot(channel, peer, channel.peer_tiles, awaited{_MET}, OF_BEGIN, False)",
)
_NO_RELEASE_OF_COUNT = Edit(
    _SIGNALS,
    'counter, count, mask=publishes, sem="release", scope="sys")',
    'counter, count, mask=publishes, sem="relaxed", scope="sys")',
)
_NO_RELEASE_OF_SLOT = Edit(
    _SIGNALS,
    'slot, epoch, mask=publishes, sem="release", scope="sys")',
    'slot, epoch, mask=publishes, sem="relaxed", scope="sys")',
)
_NO_FENCE_BEFORE_TMA = Edit("tiles/intrinsics.py", '"fence.proxy.async;\\nand.b32 $0, $1, 0;"', '"and.b32 $0, $1, 0;"')
_NO_ACQUIRE_OF_FLAG = Edit(_PTX, "ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64")
_NO_FENCE_OF_FLAG = Edit(_PTX, '  asm volatile("fence.acq_rel.sys;" ::: "memory");\n', "")
_NO_RELEASE_OF_FLAG = Edit(_PTX, "st.release.sys.global.u64", "st.relaxed.sys.global.u64")

# tests/bench/test_stress.py compiles both. The source keeps its barriers: nothing promises these others.
_BEFORE_ATOMICS = "Triton puts a barrier before this atomic by itself, since its result goes by way of shared memory"

_BARRIER_TESTS = (f"{_TILES}test_a_barrier_of_the_block_stands_between_a_tiles_stores_and_its_signal",)
_GATHER_TESTS = (f"{_OPS}test_gathered_rows_are_loaded_after_the_wait_and_from_coordinates_that_it_made",)
_SCATTER_TESTS = (f"{_OPS}test_partial_sums_are_signalled_after_a_barrier_and_loaded_through_the_wait",)
_JOIN_TESTS = (f"{_OPS}test_steps_that_programs_share_are_joined_after_a_barrier_and_an_acquire",)
_SLICE_TESTS = (f"{_EMBEDDING}test_a_slice_is_signalled_after_its_stores_and_a_barrier",)
_SIMPLE_TESTS = (f"{_SOURCE}test_simple_publishes_after_a_barrier_of_the_block_and_a_fence_of_the_system",)

MUTATIONS: tuple[Mutation, ...] = (
    # Tile primitives.
    Mutation("tiles", "barrier", "before a tile's signal", (_NO_BARRIER,), "tiles/p*,tiles/scatter", _BARRIER_TESTS),
    Mutation(
        "tiles",
        "wait",
        "of a consumer for its tile",
        (Edit(_SIGNALS, "target, OF_CONSUMER, tile, index,", f"target{_MET}, OF_CONSUMER, tile, index,"),),
        "tiles/push,tiles/push-entered,tiles/scatter,tiles/copies",
    ),
    Mutation("tiles", "wait", "for all ranks to have begun", (_NO_MEETING,), "tiles/push,tiles/scatter,tiles/pull"),
    Mutation(
        "tiles",
        "wait",
        "for a tile between peers",
        (
            Edit(
                _SIGNALS,
                "        ready = await_slot(channel, rank, tile, epoch, OF_PEER, before_tma)",
                f"        ready = await_slot(channel, rank, tile, epoch{_MET}, OF_BEGIN, before_tma)",
            ),
        ),
        "tiles/peer-ring",
    ),
    Mutation(
        "tiles",
        "acquire",
        "of a wait",
        _NO_ACQUIRE,
        "tiles/p*,tiles/scatter",
        (f"{_TILES}test_what_a_wait_allows_is_loaded_from_addresses_that_it_made", *_BARRIER_TESTS),
    ),
    Mutation("tiles", "fence", "release of a tile's signal", (_NO_RELEASE_OF_COUNT,), "tiles/p*", _BARRIER_TESTS),
    Mutation(
        "tiles",
        "fence",
        "after TMA's stores",
        (Edit(_SIGNALS, "        finish_tma_stores()\n", "        pass\n"),),
        "tiles/tma-store",
        (f"{_TILES}test_a_descriptors_store_is_done_and_fenced_before_the_signal",),
    ),
    Mutation(
        "tiles",
        "fence",
        "before TMA's loads",
        (_NO_FENCE_BEFORE_TMA,),
        "tiles/tma-load",
        (f"{_TILES}test_a_descriptors_load_is_fenced_after_the_acquire",),
    ),
    # Packets.
    Mutation(
        "packets",
        "barrier",
        "before a program's end of the call",
        (
            Edit(
                _CALLS,
                "    tl.debug_barrier()\n    return tl.atomic_add(channel.state + ENDED",
                "    return tl.atomic_add(channel.state + ENDED",
            ),
        ),
        "tiles/packet*,tiles/push-entered,all-reduce/*,reduce-scatter/packets*",
        equivalent=_BEFORE_ATOMICS,
    ),
    Mutation(
        "packets",
        "wait",
        "for packets that are taken",
        (
            Edit(
                "tiles/packets.py",
                "    waits = _misses(packets)\n    while waits:",
                "    waits = _misses(packets) & (channel.rank < 0)\n    while waits:",
            ),
        ),
        "tiles/packets*",
    ),
    Mutation(
        "packets",
        "wait",
        "for packets that are summed",
        (
            Edit(
                "tiles/packets.py",
                "    waits = late >= 0\n    while waits:",
                "    waits = (late >= 0) & (channel.rank < 0)\n    while waits:",
            ),
        ),
        "tiles/packet-sums*",
    ),
    Mutation(
        "packets",
        "acquire",
        "a look at packets anew (volatile)",
        (
            Edit(
                "tiles/packets.py",
                "    while waits:\n        packets = tl.load(pointers, mask=mask, other=_ZERO, volatile=True)",
                "    while waits:\n        packets = tl.load(pointers, mask=mask, other=_ZERO)",
            ),
            Edit(
                "tiles/packets.py",
                "pointer + rank * stride + offsets, mask=mask, other=_ZERO, volatile=True)",
                "pointer + rank * stride + offsets, mask=mask, other=_ZERO)",
            ),
        ),
        "tiles/packet*",
        (f"{_OPS}test_packets_are_stored_whole_four_at_a_time_and_looked_at_anew",),
    ),
    Mutation(
        "packets",
        "fence",
        "two slots in turn, which stand in for one",
        (Edit("tiles/call_state.py", "    return call_number(channel) & 1", "    return call_number(channel) & 0"),),
        "tiles/packet*,tiles/push-entered,all-reduce/*",
    ),
    # All-gather + GEMM.
    Mutation(
        "all-gather", "barrier", "before a moved piece's signal", (_NO_BARRIER,), "all-gather/pu*", _BARRIER_TESTS
    ),
    Mutation(
        "all-gather",
        "wait",
        "for a tile's rows, by a wait",
        (
            Edit(
                "ops/all_gather_matmul.py",
                "ready = tiles.consumer_tile_wait(channel, consumer, row_tile, before_tma=gemm.by_tma, "
                "producer=producer)",
                "ready = row_tile * 0",
            ),
        ),
        "all-gather/pu*,all-gather/copies-ragged",
        _GATHER_TESTS,
    ),
    Mutation(
        "all-gather",
        "wait",
        "for a tile's rows, by a poll",
        (
            Edit(
                "ops/all_gather_matmul.py",
                "ready = tiles.consumer_tile_poll(channel, consumer, row_tile)",
                "ready = row_tile * 0",
            ),
        ),
        "all-gather/copies,all-gather/copies-one-piece",
        _GATHER_TESTS,
    ),
    Mutation("all-gather", "acquire", "of a wait", _NO_ACQUIRE, "all-gather/pu*", _GATHER_TESTS),
    Mutation(
        "all-gather",
        "acquire",
        "of a poll",
        (
            Edit(
                "tiles/intrinsics.py",
                ".reg .b64 began, time;\n        ld.acquire.sys.global.b32",
                ".reg .b64 began, time;\n        ld.relaxed.sys.global.b32",
            ),
            Edit(
                "tiles/intrinsics.py",
                "look:\n        ld.acquire.sys.global.b32",
                "look:\n        ld.relaxed.sys.global.b32",
            ),
        ),
        "all-gather/copies*",
        _GATHER_TESTS,
    ),
    Mutation("all-gather", "fence", "before TMA's loads", (_NO_FENCE_BEFORE_TMA,), "all-gather/pu*", _GATHER_TESTS),
    # GEMM + reduce-scatter.
    Mutation(
        "reduce-scatter",
        "barrier",
        "before a lane's signal",
        (_NO_BARRIER,),
        "reduce-scatter/programs*",
        _SCATTER_TESTS,
    ),
    Mutation(
        "reduce-scatter",
        "wait",
        "for all lanes",
        (
            Edit(
                "ops/matmul_reduce_scatter.py",
                "ready += tiles.consumer_tile_wait(channel, lanes, source * programs, producer=lanes)",
                "ready += source * 0",
            ),
        ),
        "reduce-scatter/programs*",
        _SCATTER_TESTS,
    ),
    Mutation(
        "reduce-scatter",
        "wait",
        "for tiles that copy engines push",
        (
            Edit(
                "ops/matmul_reduce_scatter_copies.py",
                "ready += tiles.consumer_tile_wait(channel, owners, other * channel.world + channel.rank)",
                "ready += other * 0",
            ),
        ),
        "reduce-scatter/copies*",
    ),
    Mutation("reduce-scatter", "acquire", "of a wait", _NO_ACQUIRE, "reduce-scatter/*", _SCATTER_TESTS),
    Mutation(
        "reduce-scatter",
        "fence",
        "after TMA's stores",
        (Edit("ops/matmul_reduce_scatter.py", "after_tma=gemm.stores_by_tma", "after_tma=False"),),
        "reduce-scatter/programs*",
        (f"{_OPS}test_tiles_are_pushed_by_tma_and_signalled_when_the_stores_are_done",),
    ),
    # GEMM + all-reduce.
    Mutation(
        "all-reduce",
        "barrier",
        "before a part of a tile is counted",
        (
            Edit(
                "ops/gemm/stream_k.py",
                "    _store_sum(gemm, sums, total, own)\n    tl.debug_barrier()",
                "    _store_sum(gemm, sums, total, own)",
            ),
        ),
        "all-reduce/*shared,all-gather/*shared",
        _JOIN_TESTS,
        equivalent=_BEFORE_ATOMICS,
    ),
    Mutation(
        "all-reduce",
        "wait",
        "for packets",
        (
            Edit(
                "tiles/packets.py",
                "    waits = late >= 0\n    while waits:",
                "    waits = (late >= 0) & (channel.rank < 0)\n    while waits:",
            ),
        ),
        "all-reduce/one*,all-reduce/two*",
    ),
    Mutation(
        "all-reduce",
        "acquire",
        "of who joins a tile's parts",
        (Edit("ops/gemm/stream_k.py", 'sem="acq_rel", scope="gpu"', 'sem="release", scope="gpu"'),),
        "all-reduce/*shared",
        _JOIN_TESTS,
    ),
    Mutation(
        "all-reduce",
        "fence",
        "release of a tile's part",
        (Edit("ops/gemm/stream_k.py", 'sem="acq_rel", scope="gpu"', 'sem="acquire", scope="gpu"'),),
        "all-reduce/*shared",
        _JOIN_TESTS,
    ),
    # Embedding look-ups.
    Mutation("embedding", "barrier", "before a slice's signal", (_NO_BARRIER,), "embedding/*", _SLICE_TESTS),
    Mutation(
        "embedding",
        "wait",
        "for a rank to have begun",
        (
            Edit(
                "ops/embedding/forward_kernel.py",
                '    tiles.peer_tile_wait(channel, 0, mode="broadcast")\n',
                "",
            ),
        ),
        "embedding/forward/*",
    ),
    Mutation(
        "embedding",
        "wait",
        "for all slices",
        (
            Edit(
                "ops/embedding/forward_kernel.py",
                "        tiles.consumer_tile_wait(channel, mapping, tile, source=source)\n",
                "        pass\n",
            ),
        ),
        "embedding/forward/*",
    ),
    Mutation(
        "embedding",
        "wait",
        "for all gradients",
        (
            Edit(
                "ops/embedding/backward_kernel.py",
                "            tiles.consumer_tile_wait(channel, mapping, tile, source=source_rank)\n",
                "            pass\n",
            ),
        ),
        "embedding/backward/dense,embedding/update/*",
    ),
    Mutation("embedding", "acquire", "of a wait", _NO_ACQUIRE, "embedding/*", _BARRIER_TESTS),
    Mutation(
        "embedding", "fence", "release of a tile between peers", (_NO_RELEASE_OF_SLOT,), "embedding/*", _BARRIER_TESTS
    ),
    # Collectives by LL.
    Mutation(
        "LL",
        "barrier",
        "before a block's end of the call",
        (
            Edit(
                _PRIMITIVES,
                "  __syncthreads();\n  if (threadIdx.x == 0) state->epochs[blockIdx.x] = epoch;",
                "  if (threadIdx.x == 0) state->epochs[blockIdx.x] = epoch;",
            ),
        ),
        "fused/*/LL",
    ),
    Mutation(
        "LL",
        "wait",
        "for a message",
        (
            Edit(
                _PRIMITIVES,
                "return (u32)(first >> 32) == (u32)(flag >> 32) && (u32)(second >> 32) == (u32)flag;",
                "return true;",
            ),
        ),
        "fused/*/LL",
    ),
    Mutation("LL", "acquire", "of a token", (_NO_ACQUIRE_OF_FLAG,), "fused/*/LL", _SIMPLE_TESTS),
    Mutation("LL", "fence", "before a token", (_NO_FENCE_OF_FLAG,), "fused/*/LL", _SIMPLE_TESTS),
    # Collectives by LL128.
    Mutation(
        "LL128",
        "barrier",
        "of a warp, before its lines",
        (Edit(_PRIMITIVES, "  __syncwarp();\n", ""),),
        "fused/*/LL128",
        (f"{_SOURCE}test_ll128_reads_a_line_by_a_whole_warp",),
    ),
    Mutation(
        "LL128",
        "wait",
        "for a line",
        (Edit(_PRIMITIVES, "return PROTOCOL == SIMPLE || slot % 8 != 7 || second == flag;", "return true;"),),
        "fused/*/LL128",
    ),
    Mutation(
        "LL128",
        "acquire",
        "of a line by all its threads",
        (Edit(_PRIMITIVES, "  return __all_sync(0xffffffffu, here);", "  return here;"),),
        "fused/*/LL128",
        (f"{_SOURCE}test_ll128_reads_a_line_by_a_whole_warp",),
    ),
    Mutation("LL128", "fence", "before a token", (_NO_FENCE_OF_FLAG,), "fused/*/LL128", _SIMPLE_TESTS),
    # Collectives by Simple.
    Mutation(
        "Simple",
        "barrier",
        "before a message's flag",
        (
            Edit(
                _WRITER,
                "        if self.is_simple and level.sends:\n"
                '            yield "    wait.is_given_up = __syncthreads_or(wait.is_given_up);"\n',
                "        if self.is_simple and level.sends:\n",
            ),
        ),
        "fused/*/Simple",
        _SIMPLE_TESTS,
    ),
    Mutation(
        "Simple",
        "wait",
        "for a flag",
        (
            Edit(
                _PRIMITIVES,
                "while (!has_reached(see_flag(flag), value) && wait.again(level, message)) {",
                "while (false && !has_reached(see_flag(flag), value) && wait.again(level, message)) {",
            ),
        ),
        "fused/*/Simple",
    ),
    Mutation("Simple", "acquire", "of a flag", (_NO_ACQUIRE_OF_FLAG,), "fused/*/Simple", _SIMPLE_TESTS),
    Mutation("Simple", "fence", "before a flag", (_NO_FENCE_OF_FLAG,), "fused/*/Simple", _SIMPLE_TESTS),
    Mutation("Simple", "fence", "release of a flag", (_NO_RELEASE_OF_FLAG,), "fused/*/Simple", _SIMPLE_TESTS),
    # The interpreter of schedules.
    Mutation(
        "interpreter",
        "barrier",
        "between a step's waits and its work",
        (
            Edit(
                _INTERPRETER,
                "      is_lost = __syncthreads_or(wait.is_given_up || local_wait.is_given_up);\n"
                "      const char* incoming",
                "      is_lost = wait.is_given_up || local_wait.is_given_up;\n      const char* incoming",
            ),
        ),
        "interpreted/*",
    ),
    Mutation(
        "interpreter",
        "wait",
        "for a free slot",
        (
            Edit(
                _INTERPRETER,
                "if (step.kind & SENDS && sent >= slots) await_flag(freed,",
                "if (false) await_flag(freed,",
            ),
        ),
        "interpreted/*",
    ),
    Mutation(
        "interpreter",
        "wait",
        "for another thread block",
        (Edit(_INTERPRETER, "if (step.awaited_block >= 0) {", "if (false) {"),),
        "interpreted/*",
    ),
    Mutation("interpreter", "acquire", "of a flag", (_NO_ACQUIRE_OF_FLAG,), "interpreted/*", _SIMPLE_TESTS),
    Mutation(
        "interpreter",
        "fence",
        "before a thread block's count",
        (
            Edit(
                _INTERPRETER,
                "          __threadfence();\n          *(volatile u64*)(ended + blockIdx.x)",
                "          *(volatile u64*)(ended + blockIdx.x)",
            ),
        ),
        "interpreted/*",
        (f"{_SOURCE}test_the_interpreter_counts_a_step_for_other_thread_blocks_after_a_barrier_and_a_fence",),
    ),
    # Collectives by copy engines.
    Mutation(
        "copies",
        "barrier",
        "before a call's end is counted",
        (
            Edit(
                _COPIED,
                "  __syncthreads();\n  if (threadIdx.x == 0 && is_last)",
                "  if (threadIdx.x == 0 && is_last)",
            ),
        ),
        "copy/*",
        # A kernel of one warp, whose threads a GPU keeps together: the emulation does not.
        ("tests/collectives/executor/cuda/test_copy_engine.py::test_a_rank_with_a_late_queue_spoils_nothing",),
    ),
    Mutation(
        "copies",
        "wait",
        "for messages",
        (
            Edit(
                _PRIMITIVES,
                "while (see_flag(flag) < tick && wait.again(level, message)) {",
                "while (false && see_flag(flag) < tick && wait.again(level, message)) {",
            ),
        ),
        "copy/*",
    ),
    Mutation("copies", "acquire", "of a message's flag", (_NO_ACQUIRE_OF_FLAG,), "copy/*", _SIMPLE_TESTS),
    Mutation("copies", "fence", "before a message's flag", (_NO_FENCE_OF_FLAG,), "copy/*", _SIMPLE_TESTS),
    # Pushed weights and gradients.
    Mutation(
        "pushed",
        "barrier",
        "before a program has summed",
        (
            Edit(
                "parallel/comm/copy_engine_scatter.py",
                "    tl.debug_barrier()\n    if tl.atomic_add(tickets,",
                "    if tl.atomic_add(tickets,",
            ),
        ),
        "pushed/scatter*",
    ),
    Mutation(
        "pushed",
        "wait",
        "for pushed gradients",
        (
            Edit(
                "parallel/comm/copy_engine_scatter.py",
                "await_slot(channel, peer, ARRIVED, tick, OF_PEER, False)",
                f"await_slot(channel, peer, ARRIVED, tick{_MET}, OF_PEER, False)",
            ),
        ),
        "pushed/scatter*",
    ),
    Mutation(
        "pushed",
        "wait",
        "for a free slot",
        (
            Edit(
                "parallel/comm/copy_engine_scatter.py",
                "await_slot(channel, peer, RELEASED, tick - 1 - lag, OF_PEER, False)",
                f"await_slot(channel, peer, RELEASED, tick - 1 - lag{_MET}, OF_PEER, False)",
            ),
        ),
        "pushed/scatter*",
    ),
    Mutation(
        "pushed",
        "wait",
        "for a gathered weight",
        (
            Edit(
                "parallel/comm/copy_engine_gather.py",
                "            rank_wait_all(self._channel, place.number, len(self._places))\n",
                "            pass\n",
            ),
        ),
        "pushed/gather*",
    ),
    Mutation(
        "pushed",
        "acquire",
        "of who is the last to sum",
        (Edit("parallel/comm/copy_engine_scatter.py", 'sem="acq_rel", scope="gpu"', 'sem="release", scope="gpu"'),),
        "pushed/scatter*",
        ("tests/parallel/comm/test_copy_engines.py::test_a_slot_is_released_when_all_programs_have_summed",),
    ),
    Mutation(
        "pushed",
        "fence",
        "release of a slot's signal",
        (_NO_RELEASE_OF_SLOT,),
        "pushed/scatter*",
        _BARRIER_TESTS,
    ),
)


def apply(mutation: Mutation, package: Path) -> None:
    """Change a copy of the package. ValueError where an old text is not there, or not alone."""
    for edit in mutation.edits:
        path = package / edit.file
        text = path.read_text(encoding="utf-8")
        count = text.count(edit.old)
        if count != 1:
            raise ValueError(f"{mutation.name}: {edit.file} has {count} times, and not once: {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def try_all(
    mutations: Sequence[Mutation],
    *,
    ranks: int,
    minutes: float,
    jobs: int,
    tests: Path,
    stresses: bool = True,
    runs_tests: bool = True,
) -> Iterator[Verdict]:
    """Try mutations, `jobs` at a time, and give what has come of each, in their order.

    ranks: of each stress. minutes: that it takes at most. tests: the folder that the tests' names begin in. stresses:
    False runs the tests alone, which need no GPU. runs_tests: False runs the stress alone.
    """
    # Each stress starts an MPS daemon of its own: a process that is killed in a kernel breaks all others of its daemon.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_MPS_PIPE_DIRECTORY"}
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(
            lambda mutation: _try(
                mutation, ranks, minutes, tests, environment, stresses=stresses, runs_tests=runs_tests
            ),
            mutations,
        )


def _try(
    mutation: Mutation,
    ranks: int,
    minutes: float,
    tests: Path,
    environment: dict[str, str],
    *,
    stresses: bool,
    runs_tests: bool,
) -> Verdict:
    if mutation.equivalent:
        return Verdict(mutation.family, mutation.kind, mutation.what, "", 0.0, "", equivalent=mutation.equivalent)
    with tempfile.TemporaryDirectory(prefix="stretto-mutation-") as folder:
        source = Path(folder) / "src"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(str(files("stretto")), source / "stretto", ignore=ignored)
        apply(mutation, source / "stretto")
        paths = os.pathsep.join([str(source), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        here = environment | {"PYTHONPATH": paths}
        by_stress, seconds, note = _stress(mutation, ranks, minutes, folder, here) if stresses else ("", 0.0, "")
        by_tests = _test(mutation, tests, here) if runs_tests else ""
    return Verdict(mutation.family, mutation.kind, mutation.what, by_stress, seconds, by_tests, note)


def _stress(
    mutation: Mutation, ranks: int, minutes: float, folder: str, environment: dict[str, str]
) -> tuple[str, float, str]:
    """(how the stress has found it, or "", after how many seconds, what else there is to say)."""
    command = [sys.executable, "-m", "stretto", "stress", "--ranks", str(ranks), "--minutes", str(minutes), "--json"]
    command += ["--only", mutation.only, "--stop-at-first", "--limit", str(_BATCH_LIMIT)]
    if mutation.kind != "wait":  # what else is removed shows where warps are far apart
        command.append("--late-warps")
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60 * minutes + _START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", 0.0, "the stress did not end"
    try:
        report = json.loads(done.stdout.splitlines()[-1])
        rows = report["configurations"]
    except (IndexError, ValueError, KeyError):
        return "", 0.0, f"the stress failed: {(done.stdout + done.stderr).strip()[-_MOST_WORDS:]}"
    found = next((row for row in rows if row["wrong"] or row["raised"] or row["hung"]), None)
    if found is None:
        return "", report["seconds"], f"{report['results']:,} results were right"
    how = next(what for what in ("wrong", "hung", "raised") if found[what])
    last = found["findings"][0].strip().splitlines()[-1][-_MOST_WORDS:] if found["findings"] else ""
    return f"{how}: {found['name']}", report["seconds"], last


def _test(mutation: Mutation, tests: Path, environment: dict[str, str]) -> str:
    """Which of the mutation's tests fails, or ""."""
    for test in mutation.tests:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", test]
        try:
            done = subprocess.run(
                command,
                cwd=tests,
                env=environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                timeout=_TEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{test} (did not end)"
        if done.returncode == 1:  # others: pytest itself failed, or found no such test
            return test
    return ""


_FIELDS = [field.name for field in fields(Verdict)]
_JSON = "mutations.json"


def write_table(verdicts: Sequence[Verdict]) -> str:
    """Markdown."""
    lines = ["| family | removed | stress | after | machine code | found |", "|---|---|---|---|---|---|"]
    for verdict in verdicts:
        test = verdict.by_tests.rpartition("::")[2].replace("_", " ")
        seconds = f"{verdict.seconds:.0f} s" if verdict.seconds else ""
        found = (
            f"nothing to find: {verdict.equivalent}" if verdict.equivalent else "yes" if verdict.is_found else "**no**"
        )
        lines.append(
            f"| {verdict.family} | {verdict.kind}: {verdict.what} | {verdict.by_stress or 'no'} | {seconds} | "
            f"{test or 'no'} | {found} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Try what the command line asks for; 1 where something was not found."""
    parser = argparse.ArgumentParser(description="Break the kernels on purpose, and show what finds it.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--only", default="", help="families, kinds or family/kind, with commas")
    parser.add_argument("--tests", type=Path, default=Path(), help="the repository's root")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--tests-only", action="store_true", help="run no stress, and so need no GPU")
    parts.add_argument("--stress-only", action="store_true", help="run no tests of machine code")
    parser.add_argument(
        "--out", type=Path, help="folder for mutations.md and mutations.json: what these have of other runs stays there"
    )
    options = parser.parse_args()
    wanted = {part for part in options.only.split(",") if part}
    known = {name for one in MUTATIONS for name in (one.family, one.kind)}
    if unknown := wanted - known - {f"{one.family}/{one.kind}" for one in MUTATIONS}:
        parser.error(f"--only is {', '.join(sorted(unknown))}, but families and kinds are {', '.join(sorted(known))}")
    chosen = [one for one in MUTATIONS if not wanted or wanted & {one.family, one.kind, f"{one.family}/{one.kind}"}]
    try:
        verdicts = {} if options.out is None else read_verdicts(options.out / _JSON)
    except ValueError as error:
        parser.error(str(error))
    for verdict in try_all(
        chosen,
        ranks=options.ranks,
        minutes=options.minutes,
        jobs=options.jobs,
        tests=options.tests.resolve(),
        stresses=not options.tests_only,
        runs_tests=not options.stress_only,
    ):
        key = verdict.family, verdict.kind, verdict.what
        before = verdicts.get(key)
        if before is not None and options.tests_only:
            verdicts[key] = replace(before, by_tests=verdict.by_tests)
        elif before is not None and options.stress_only:
            verdicts[key] = replace(verdict, by_tests=before.by_tests)
        else:
            verdicts[key] = verdict
        print(f"{verdict.family}, {verdict.kind}, {verdict.what}: {verdict.by_stress or 'no'} after "
              f"{verdict.seconds:.0f} s ({verdict.note}); tests: {verdict.by_tests or 'no'}", flush=True)  # fmt: skip
        if options.out is not None:  # each time: what is cut off loses nothing
            options.out.mkdir(parents=True, exist_ok=True)
            every = _sort(verdicts)
            (options.out / "mutations.md").write_text(write_table(every))
            found = [asdict(one) | {"is_found": one.is_found} for one in every]
            (options.out / _JSON).write_text(json.dumps(found, indent=1) + "\n")
    every = _sort(verdicts)
    print(write_table(every))
    return int(not all(verdict.is_found for verdict in every))


def read_verdicts(path: Path) -> dict[tuple[str, str, str], Verdict]:
    """What earlier runs have found, by family, kind and what was removed. ValueError for a file of something else."""
    if not path.exists():
        return {}
    try:
        rows = [Verdict(**{name: row[name] for name in _FIELDS if name in row}) for row in json.loads(path.read_text())]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no verdicts on mutations") from error
    return {(row.family, row.kind, row.what): row for row in rows}


def _sort(verdicts: Mapping[tuple[str, str, str], Verdict]) -> list[Verdict]:
    """In the order of `MUTATIONS`, without those that are no longer there."""
    keys = [(one.family, one.kind, one.what) for one in MUTATIONS]
    return [verdicts[key] for key in keys if key in verdicts]


if __name__ == "__main__":
    sys.exit(main())
