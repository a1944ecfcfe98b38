# SPDX-License-Identifier: Apache-2.0
"""One rank of `python -m lab checkouts`: builds cases with the checkout on PYTHONPATH, and times them on command.

The bench runs this file by its path, in a process whose PYTHONPATH begins with the checkout to measure, so that
`stretto` is that checkout. The file must therefore work with older checkouts as well as with its own: it uses names
that all of them have, or looks a renamed one up by its new and its old name, and imports nothing from its own folder.

It reads commands from stdin, one line of JSON each, and answers each with one line of JSON on stdout:

    {"do": "prepare", "case": name, "kind": ..., "mode": ..., "options": {...}}    -> {}
    {"do": "run", "case": name, "times": n}     -> {"seconds": a call on the device, "host": a call on the host}

An exception is answered by {"error": its text}. All output is redirected to stderr. The process exits when stdin is
closed, even while a command runs.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import stretto
from stretto import ops, tiles

_GROUP_LIMIT = timedelta(seconds=30)  # for waits on the device too: less than the bench waits for an answer
_WARM_UP = 3
_BLOCK = 256  # columns that a tile's kernel loads at once
_TILE_ROWS = 16


class _CaseCall(NamedTuple):
    """One call of a case, how many a row (or CUDA graph) has, and a check that raises if a wait timed out.

    It holds the tensors of the calls. A CUDA graph has only their addresses, which other tensors get, or nothing has
    any more, when the last reference is gone.
    """

    call: Callable[[], Any]
    calls: int
    check: Callable[[], Any]


def main() -> None:
    """Join the other ranks, then serve commands. argv: JSON with rank, world, store (a path) and device."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not write between the answers
    commands = _read_commands()

    def answer(reply: dict[str, Any]) -> None:
        answers.write(json.dumps(reply) + "\n")

    torch.set_num_threads(1)
    rank = _WorkerRank(**settings)
    answer({"stretto": stretto.__file__, "torch": torch.__version__, "processors": rank.processors})
    while True:
        command = commands.get()
        try:
            answer(rank.prepare(**command) if command["do"] == "prepare" else rank.run(**command))
        except Exception as error:  # noqa: BLE001 - the bench decides about whatever a checkout raises
            answer({"error": f"{type(error).__name__}: {error}"[:500]})


def _read_commands() -> "queue.Queue[dict[str, Any]]":
    """Read commands from stdin. At its end, exit: even in the middle of a case, and without tearing groups down."""
    found: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        with os.fdopen(os.dup(0)) as lines:
            for line in lines:
                found.put(json.loads(line))
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return found


class _WorkerRank:
    """This process as one of `world` ranks, all on the first GPU, or on the CPU with interpreted kernels."""

    def __init__(self, rank: int, world: int, store: str, device: str) -> None:
        self.world, self.rank = world, rank
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.processors = 0
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
            self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        backend = "cpu:gloo,cuda:gloo" if self.device.type == "cuda" else "gloo"
        files = dist.FileStore(store, world)
        dist.init_process_group(backend, store=files, rank=rank, world_size=world, timeout=_GROUP_LIMIT)
        dist.barrier()
        self._cases: dict[str, tuple[Callable[[], Any], _CaseCall]] = {}  # a row of calls, and the call
        self._communicator: Any = None
        self._kernels: dict[Any, Any] = {}

    def prepare(self, do: str, case: str, kind: str, mode: str, options: dict[str, Any]) -> dict[str, Any]:
        """Compile and warm up a case, and capture it if its mode is "graph". Collective."""
        torch.manual_seed(self.rank)
        made: _CaseCall = getattr(self, f"_{kind}")(case, **options)
        for _ in range(_WARM_UP):
            made.call()
        self._synchronize()

        def row() -> None:
            for _ in range(made.calls):
                made.call()

        replay: Callable[[], Any] = row
        if mode == "graph":
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                row()
            replay = graph.replay
        replay()
        self._synchronize()
        made.check()
        self._cases[case] = replay, made
        return {}

    def run(self, do: str, case: str, times: int) -> dict[str, float]:
        """Time `times` rows of calls; returns seconds a call, on the device and for the host to issue."""
        row, made = self._cases[case]
        count = times * made.calls
        row()  # not timed: here ranks that got the command earlier wait for the others
        is_gpu = self.device.type == "cuda"
        start, end = (torch.cuda.Event(enable_timing=True) if is_gpu else None for _ in range(2))
        if start is not None:
            start.record()
        began = time.perf_counter()
        for _ in range(times):
            row()
        seconds = host = time.perf_counter() - began
        if start is not None and end is not None:
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        made.check()
        return {"seconds": seconds / count, "host": host / count}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _collective(
        self, case: str, collective: str, algorithm: str, protocol: str, unroll: int, size: int, calls: int
    ) -> _CaseCall:
        """A collective's schedule with a protocol; size: bytes of the whole array, in bf16."""
        from stretto.collectives import selection
        from stretto.collectives.executor.cuda.communicator import CudaCommunicator
        from stretto.collectives.selection import Table

        names = ("AlgorithmChoice", "Way")  # the latter: in older checkouts
        make_choice: Any = next(getattr(selection, name) for name in names if hasattr(selection, name))
        if self._communicator is None:
            self._communicator = CudaCommunicator(table=Table())
        choice = make_choice(algorithm, protocol, unroll)
        if choice not in self._kernels:
            self._kernels[choice] = self._communicator.kernel(choice, "bfloat16", in_place=False)
        kernel = self._kernels[choice]
        whole = max(size // 2 // self.world, 1) * self.world
        given = whole // self.world if collective == "allgather" else whole
        taken = whole // self.world if collective == "reducescatter" else whole
        input = torch.randn(given, device=self.device).bfloat16()
        output = torch.empty(taken, dtype=torch.bfloat16, device=self.device)
        return _CaseCall(lambda: kernel(input, output), calls, self._communicator.workspace.check)

    def _operator(
        self, case: str, operator: str, m: int, n: int, k: int, dtype: str, plan: dict[str, Any], calls: int
    ) -> _CaseCall:
        """An overlapped GEMM by a pinned plan; m: rows of the whole; n, k: of a rank's weight."""
        rows = m // self.world if operator == "all_gather_matmul" else m
        kind = getattr(torch, dtype)
        x = torch.randn(rows, k, device=self.device).to(kind)
        weight = (torch.randn(n, k, device=self.device) / k**0.5).to(kind)
        names = ("KernelConfig", "Plan")  # the latter: in older checkouts
        make_config = next(getattr(ops, name) for name in names if hasattr(ops, name))
        run, implementation = getattr(ops, operator), make_config(**plan)
        return _CaseCall(lambda: run(x, weight, implementation=implementation), calls, _nothing)

    def _embedding(
        self, case: str, part: str, tables: int, rows: int, dim: int, pooling: int, batch: int, calls: int
    ) -> _CaseCall:
        """An embedding look-up with its exchange, its backward pass or its fused SGD step; batch: the global one."""
        device, count = self.device, tables * batch
        weights = [torch.rand(rows, dim, device=device, requires_grad=part == "backward") for _ in range(tables)]
        indices = torch.randint(0, rows, (count * pooling,), device=device)
        offsets = torch.arange(count + 1, device=device) * pooling

        def look_up() -> Any:
            return ops.embedding_all_to_all(indices, offsets, weights, batch=batch, name=case)

        grad = torch.randn(batch // self.world, tables * dim * self.world, device=device) * 1e-3
        if part == "forward":
            return _CaseCall(look_up, calls, _nothing)
        if part == "backward":
            out = look_up()
            return _CaseCall(lambda: torch.autograd.grad(out, weights, grad, retain_graph=True), calls, _nothing)
        look_up()
        settings = torch.tensor([1e-6, 1e-8], device=device)

        def update() -> None:
            ops.embedding_all_to_all_update(
                grad, indices, offsets, weights, optimizer="sgd", settings=settings, batch=batch, name=case
            )

        return _CaseCall(update, calls, _nothing)

    def _training(self, case: str, layers: int, hidden: int, seq_len: int, calls: int) -> _CaseCall:
        """A step of a small GPT on this rank alone: forward, backward, norm, and AdamW with clipping."""
        from stretto.models import GPT, GPTConfig
        from stretto.optim import AdamW
        from stretto.parallel import Grid, clip_scale, gradient_norm, parallelize

        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        config = GPTConfig(layers, hidden, heads=4, vocab=1024, max_seq_len=seq_len)
        grid = Grid(device=self.device.type)
        with torch.device("meta"):
            model = GPT(config)
        parallelize(model, grid, dtype=dtype)
        optimizer = AdamW(model.parameters(), lr=1e-5)
        tokens = torch.randint(0, config.vocab, (2, seq_len), device=self.device)

        def step() -> None:
            model(tokens, tokens).backward()
            norm = gradient_norm(model.parameters(), grid)
            optimizer.step(scale=clip_scale(norm, 1.0))
            optimizer.zero_grad()

        return _CaseCall(step, calls, _nothing)

    def _tiles(self, case: str, transfer: str, rows: int, columns: int, calls: int) -> _CaseCall:
        """An all-gather by tiles: `begin`, tiles or copies that notify, and a kernel that waits for tiles."""
        world, device = self.world, self.device
        producer = tiles.shard_tiles(rows, world, _TILE_ROWS, channels=2)
        consumer = tiles.shard_tiles(rows, world, _TILE_ROWS, channels=2, channel_rows=producer.channel_rows)
        channel = tiles.BlockChannel.allocate(
            channels=2 * world,
            data_bytes=4 * rows * world * columns + 128,
            backend="cuda" if device.type == "cuda" else "host",
        )
        x = torch.randn(rows, columns, device=device)
        gathered = channel.tensor((rows * world, columns), torch.float32)
        out = torch.empty(rows * world, columns, device=device)
        count = tiles.count_tiles(consumer)
        # Fewer programs than a rank's share of the multiprocessors: all pushes are issued before a program waits.
        programs = 8 if device.type == "cuda" else 2

        def call() -> None:
            begun = channel.begin(case, producer, consumer, "broadcast")
            if transfer == "push":
                _push_tiles[(programs,)](begun, producer, x, gathered, columns, programs, _TILE_ROWS, _BLOCK)
            else:
                self._copy_to_peers(channel, x, rows, columns)
            _take_tiles[(programs,)](begun, consumer, gathered, out, columns, count, programs, _TILE_ROWS, _BLOCK)
            if transfer == "copies":
                tiles.join_copies(channel)

        return _CaseCall(call, calls, channel.check)

    def _copy_to_peers(self, channel: Any, x: torch.Tensor, rows: int, columns: int) -> None:
        shape = rows * self.world, columns
        with tiles.copy_engine(channel):
            for distance in range(self.world):
                peer = (self.rank + distance) % self.world
                there = channel.tensor(shape, torch.float32, rank=peer)
                tiles.rank_copy_data(there[self.rank * rows : (self.rank + 1) * rows], x)
                for index in (2 * self.rank, 2 * self.rank + 1):
                    tiles.rank_notify(channel, index, peer)


def _nothing() -> None:
    """No check: an operator raises at its next call."""


@triton.jit
def _push_tiles(  # type: ignore[no-untyped-def]
    channel, producer, x, gathered, columns, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Push this rank's x [rows, columns] to its place in all ranks' gathered, and notify all of each tile."""
    own = tiles.rank_tiles(producer)
    for index in range(tl.program_id(0), own, PROGRAMS):
        tile = channel.rank * own + index
        low, high = tiles.tile_rows(producer, tile)
        rows = low + tl.arange(0, ROWS)[:, None]
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)[None, :]
            mask = (rows < high) & (at < columns)
            value = tl.load(x + (rows - channel.rank * producer.rows) * columns + at, mask=mask)
            tiles.tile_push_data(channel, gathered, rows * columns + at, value, mask=mask, mode="broadcast")
        tiles.producer_tile_notify(channel, producer, tile, "broadcast")


@triton.jit
def _take_tiles(  # type: ignore[no-untyped-def]
    channel, consumer, gathered, out, columns, TILES: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = gathered, each tile as soon as its producer has notified it."""
    for tile in range(tl.program_id(0), TILES, PROGRAMS):
        ready = tiles.consumer_tile_wait(channel, consumer, tile)
        low, high = tiles.tile_rows(consumer, tile)
        rows = low + tl.arange(0, ROWS)[:, None]
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)[None, :]
            mask = (rows < high) & (at < columns)
            value = tl.load(gathered + ready + rows * columns + at, mask=mask)
            tl.store(out + rows * columns + at, value, mask=mask)


if __name__ == "__main__":
    main()
