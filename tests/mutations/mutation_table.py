# SPDX-License-Identifier: Apache-2.0
"""The table of mutations that `tests.mutations.mutations` tries: each removes a barrier, wait, acquire or fence.

An edit quotes a line of the package's source. Change the quotation together with the line: a test applies them all.
"""

from dataclasses import dataclass

KINDS = ("barrier", "wait", "acquire", "fence")


@dataclass(frozen=True)
class Edit:
    """A change of one file, below the package's folder: `old`, which it has exactly once, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    """One removal. kind: of `KINDS`; a release counts as a fence in a family that has no fence.

    only: the configurations to stress. tests: the tests of machine code that may find it. equivalent: why the removal
    changes nothing that runs, or "" if it does; an equivalent mutation is not tried.
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
        """A name for messages."""
        return f"{self.family}: {self.kind}, {self.what}"


_TILES = "tests/tiles/test_machine_code.py::"
_OPS = "tests/ops/test_machine_code.py::"
_EMBEDDING = "tests/ops/test_embedding_machine_code.py::"
_SOURCE = "tests/collectives/executor/cuda/test_codegen.py::"

_SIGNALS = "tiles/signals.py"
_WAITS = "tiles/waits.py"
_CALLS = "tiles/calls.py"
_PUTS = "tiles/puts.py"
_PTX = "collectives/executor/cuda/ptx.cu"
_PRIMITIVES = "collectives/executor/cuda/primitives.cu"
_WRITER = "collectives/executor/cuda/fused/codegen.py"
_INTERPRETER = "collectives/executor/cuda/interpreter.cu"
_COPIED = "collectives/executor/cuda/copy_engine/flags.cu"

# Lowers a target to one that the counter reached long ago: the wait remains, and ends at once.
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

# tests/stress/test_stress.py compiles both. The source keeps its own barriers: nothing guarantees the compiler's.
_BEFORE_ATOMICS = "Triton puts a barrier before this atomic by itself, since its result goes by way of shared memory"

_BARRIER_TESTS = (f"{_TILES}test_a_barrier_of_the_block_stands_between_a_tiles_stores_and_its_signal",)
_GATHER_TESTS = (f"{_OPS}test_gathered_rows_are_loaded_after_the_wait_and_from_coordinates_that_it_made",)
_JOIN_TESTS = (f"{_OPS}test_steps_that_programs_share_are_joined_after_a_barrier_and_an_acquire",)
_SLICE_TESTS = (f"{_EMBEDDING}test_a_slice_is_signalled_after_its_stores_and_a_barrier",)
_EXCHANGE_TESTS = ("tests/ops/moe/test_exchange_kernels.py::test_rows_are_stored_before_their_signal_in_wide_pieces",)
_PUT_TESTS = (
    "tests/tiles/test_puts.py::test_a_descriptor_follows_the_barrier_and_its_first_word_is_a_release",
    "tests/tiles/test_puts.py::test_a_kernel_gathers_from_other_nodes_and_its_own_by_puts",
)
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
        (f"{_TILES}test_loads_after_a_wait_use_addresses_that_it_computed", *_BARRIER_TESTS),
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
        "wait",
        "for numbered words",
        (
            Edit(
                "tiles/packets.py",
                "    waits = missing >= 0\n    while waits:",
                "    waits = (missing >= 0) & (channel.rank < 0)\n    while waits:",
            ),
        ),
        "experts/few-*",
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
                "pointer + rank * stride + offsets, mask=is_stored, other=_ZERO, volatile=True)",
                "pointer + rank * stride + offsets, mask=is_stored, other=_ZERO)",
            ),
        ),
        "tiles/packet*",
        (f"{_OPS}test_packets_are_stored_whole_four_at_a_time_and_polled_again",),
    ),
    Mutation(
        "packets",
        "fence",
        "two slots in turn, which stand in for one",
        (Edit("tiles/call_state.py", "    return call_number(channel) & 1", "    return call_number(channel) & 0"),),
        "tiles/packet*,tiles/push-entered,all-reduce/*",
    ),
    # Puts.
    Mutation(
        "puts",
        "barrier",
        "before a slice's descriptor",
        (Edit(_PUTS, "    tl.debug_barrier()\n    tl.atomic_add(puts.used", "    tl.atomic_add(puts.used"),),
        "tiles/puts",
        _PUT_TESTS,
    ),
    Mutation(
        "puts",
        "barrier",
        "before a slice's credit",
        (Edit(_PUTS, "    tl.debug_barrier()\n    tl.atomic_add(puts.taken", "    tl.atomic_add(puts.taken"),),
        "tiles/puts",
        _PUT_TESTS,
    ),
    Mutation(
        "puts",
        "wait",
        "for a slot's credit",
        (Edit(_PUTS, "word, used, OF_CREDIT", f"word, used{_MET}, OF_CREDIT"),),
        "tiles/puts",
        _PUT_TESTS[1:],
    ),
    Mutation(
        "puts",
        "wait",
        "for a slice",
        (Edit(_PUTS, "word, taken + 1, OF_SLICE", f"word, taken + 1{_MET}, OF_SLICE"),),
        "tiles/puts",
        _PUT_TESTS[1:],
    ),
    Mutation("puts", "acquire", "of a wait", _NO_ACQUIRE, "tiles/puts", _PUT_TESTS),
    Mutation(
        "puts",
        "fence",
        "release of a descriptor",
        (Edit(_PUTS, 'mask=publishes, sem="release", scope="sys")', 'mask=publishes, sem="relaxed", scope="sys")'),),
        "tiles/puts",
        _PUT_TESTS,
    ),
    Mutation(
        "puts",
        "fence",
        "the order of a slice and its signal",
        (
            Edit(
                _PUTS,
                "            tl.store(tl.multiple_of(slot + zero, 16) + index, value, mask=mask)\n"
                "            put_slice(puts, program, size, peer, program)\n",
                "            put_slice(puts, program, size, peer, program)\n"
                "            tl.store(tl.multiple_of(slot + zero, 16) + index, value, mask=mask)\n",
            ),
        ),
        "tiles/puts",
        _PUT_TESTS,
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
                "ops/joint/kernel.py",
                "ready = tiles.consumer_tile_wait(channel, row_tiles, row_tile, before_tma=gemm.by_tma)\n"
                "                total, is_complete",
                "ready = row_tile * 0\n                total, is_complete",
            ),
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
                "ops/joint/kernel.py",
                "ready = tiles.consumer_tile_poll(channel, row_tiles, row_tile)",
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
    # GEMM + reduce-scatter and + all-reduce.
    Mutation(
        "sums",
        "barrier",
        "before a part of a tile is counted",
        (
            Edit(
                "ops/gemm.py",
                "    _store_sum(gemm, partials, total, own)\n    tl.debug_barrier()",
                "    _store_sum(gemm, partials, total, own)",
            ),
        ),
        "all-reduce/*shared,all-gather/*shared,reduce-scatter/copies-shared*",
        _JOIN_TESTS,
        equivalent=_BEFORE_ATOMICS,
    ),
    Mutation(
        "sums",
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
        "sums",
        "wait",
        "for sums that copy engines push",
        (
            Edit(
                "ops/joint/copies.py",
                "tiles.rank_wait(self.channel, one.channel, one.sender)",
                "pass",
            ),
        ),
        "reduce-scatter/copies*",
    ),
    Mutation(
        "sums",
        "fence",
        "after TMA's stores, before they are counted",
        (Edit("ops/joint/kernel.py", "after_tma=gemm.stores_by_tma", "after_tma=False"),),
        "reduce-scatter/copies*",
        (f"{_OPS}test_threads_count_a_tile_after_their_stores_and_without_a_barrier",),
    ),
    Mutation(
        "sums",
        "acquire",
        "of who joins a tile's parts",
        (Edit("ops/gemm.py", 'sem="acq_rel", scope="gpu"', 'sem="release", scope="gpu"'),),
        "all-reduce/*shared",
        _JOIN_TESTS,
    ),
    Mutation(
        "sums",
        "fence",
        "release of a tile's part",
        (Edit("ops/gemm.py", 'sem="acq_rel", scope="gpu"', 'sem="acquire", scope="gpu"'),),
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
                '    ready = tiles.peer_tile_wait(channel, 0, mode="broadcast")\n',
                "    ready = 0\n",
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
    Mutation("experts", "barrier", "before a part's signal", (_NO_BARRIER,), "experts/exchange-*", _EXCHANGE_TESTS),
    Mutation(
        "experts",
        "wait",
        "for all ranks' counts",
        (
            Edit(
                "ops/moe/exchange_kernel.py",
                '    ready = tiles.peer_tile_wait(channel, 0, mode="broadcast")\n',
                "    ready = 0\n",
            ),
        ),
        "experts/exchange-*",
    ),
    Mutation(
        "experts",
        "wait",
        "for all parts of rows",
        (
            Edit(
                "ops/moe/exchange_kernel.py",
                "        tiles.consumer_tile_wait(channel, mapping, tile, source=source)\n",
                "        pass\n",
            ),
        ),
        "experts/exchange-*",
    ),
    Mutation(
        "experts",
        "wait",
        "for all tiles that have a token's rows",
        (
            Edit(
                "ops/moe/tensor_parallel_kernels.py",
                "            ready = _await_tiles(ends, done, distance + 1, channel.world, column_tiles)\n",
                "            ready = 0\n",
            ),
        ),
        "experts/tensor-parallel",
    ),
    Mutation(
        "experts",
        "wait",
        "for all ranks' sums of a token",
        (
            Edit(
                "ops/moe/tensor_parallel_kernels.py",
                "ready += tiles.consumer_tile_wait(channel, mapping, channel.rank * units + own, source=source)\n",
                "pass\n",
            ),
        ),
        "experts/tensor-parallel",
    ),
    Mutation("experts", "wait", "for a call to have begun on all ranks", (_NO_MEETING,), "experts/exchange-*"),
    Mutation("experts", "acquire", "of a wait", _NO_ACQUIRE, "experts/exchange-*", _BARRIER_TESTS),
    Mutation("experts", "fence", "release of counts", (_NO_RELEASE_OF_SLOT,), "experts/exchange-*", _BARRIER_TESTS),
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
        (Edit(_PRIMITIVES, "return PROTOCOL == SIMPLE || vector % 8 != 7 || second == flag;", "return true;"),),
        "fused/*/LL128",
    ),
    Mutation(
        "LL128",
        "acquire",
        "of a line by all its threads",
        (Edit(_PRIMITIVES, "  return __all_sync(0xffffffffu, predicate);", "  return predicate;"),),
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
                "      const u64 in_slot",
                "      is_lost = wait.is_given_up || local_wait.is_given_up;\n      const u64 in_slot",
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
                "else if (step.kind & SENDS && sent >= slots)\n          await_flag(freed,",
                "else if (false)\n          await_flag(freed,",
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
                _COPIED, "  __syncthreads();\n  if (threadIdx.x == 0 && is_last)", "  if (threadIdx.x == 0 && is_last)"
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
                "while (see_flag(flag) < epoch && wait.again(level, message)) {",
                "while (false && see_flag(flag) < epoch && wait.again(level, message)) {",
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
        equivalent=_BEFORE_ATOMICS,
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
        "pushed", "fence", "release of a slot's signal", (_NO_RELEASE_OF_SLOT,), "pushed/scatter*", _BARRIER_TESTS
    ),
)
