# SPDX-License-Identifier: Apache-2.0
"""Watches ranks that train as closely as it can, to show that it does them no harm: `make stress-watching`.

Four processes train with everything that has crashed a watchdog inside: autograd Functions, compiled code, generators,
checkpoints, and a garbage collector that runs often. Each stores its counters millions of times more than training
would. Meanwhile this process reads the counters and takes stacks by py-spy, without a pause. A process that crashes, an
error, a counter that goes back or a stack that cannot be read is a fault; all are counted, and the exit status says
whether there was one. It runs on every Python that has torch and py-spy:

    PYTHONPATH=src:. python tests/stress/watching.py [--updates 20e6] [--reads 1e5] [--stacks 3000]
"""

import argparse
import contextlib
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

RANKS = 4


def train(folder: str, rank: int, updates: int) -> None:
    """A rank: trains and stores until it has made so many updates and is told to end."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from stretto import counters
    from stretto.launch.watching.joining import join_watched
    from stretto.parallel.comm.collectives import all_reduce

    gc.set_threshold(20, 2, 2)
    torch.set_num_threads(1)
    join_watched(Path(folder), rank)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    def batches() -> Iterator[torch.Tensor]:
        while True:
            cycle = [torch.randn(8, 16)]
            cycle.append(cycle)  # for the collector
            yield cycle[0]

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters())
    made, step, group = 0, 0, dist.group.WORLD
    while made < updates or not Path(folder, "end").exists():
        with counters.phase("data", step):
            batch = next(batches())
        loss = Square.apply(compiled(batch)).mean()
        loss.backward()
        for parameter in model.parameters():
            all_reduce(parameter.grad, group)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(20_000):
            counters.note("step", step)
            counters.advance()
            counters.end_wait(counters.begin_wait("all_reduce"))
        made += 80_000
        if step % 50 == 0:
            with counters.phase("save", step), counters.saving(step):
                dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/checkpoint-{step % 100}")
        step += 1
        # All ranks leave after the same step.
        wants_more = torch.tensor(float(made < updates or not Path(folder, "end").exists()))
        if not all_reduce(wants_more, group):
            break
    counters.mark_done()
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"made-{rank}").write_text(str(made))


def watch(updates: int, reads: int, wanted: int) -> dict[str, object]:
    from stretto.counters import Reader, read_folder
    from stretto.launch.watching import stacks

    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="stretto-watching-") as folder:
        command = [sys.executable, __file__, "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank), "--folder", folder, "--updates", str(updates // RANKS)])
            for rank in range(RANKS)
        ]
        readers: dict[str, Reader] = {}
        last: dict[int, tuple[int, ...]] = {}
        done, taken, empty, began = 0, 0, 0, time.monotonic()
        while (done < reads or taken < wanted) and all(rank.poll() is None for rank in ranks):
            found = read_folder(Path(folder), readers)
            for each in found:
                done += 1
                if each.progress[:2] < last.get(each.rank, (0, 0)):
                    faults.append(f"rank {each.rank} went back: {last[each.rank]} to {each.progress[:2]}")
                last[each.rank] = each.progress[:2]
            if found and taken < wanted and done * wanted >= taken * reads:
                each = found[taken % len(found)]
                taken += 1
                empty += not any(thread.frames for thread in stacks.read_threads(each.pid))
        Path(folder, "end").touch()
        for rank, process in enumerate(ranks):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(600)
            if process.poll() != 0:
                faults.append(f"rank {rank} ended with status {process.poll()}")
                process.kill()
        made = sum(int(path.read_text()) for path in Path(folder).glob("made-*"))
    return {
        "python": platform.python_version(),
        "updates": made,
        "reads": done,
        "stacks": taken,
        "stacks without frames": empty,
        "seconds": round(time.monotonic() - began, 1),
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Watch ranks that train as closely as possible.")
    parser.add_argument("--updates", type=float, default=20e6)
    parser.add_argument("--reads", type=float, default=1e5)
    parser.add_argument("--stacks", type=int, default=3000)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.folder, given.rank, int(given.updates))
        return 0
    found = watch(int(given.updates), int(given.reads), given.stacks)
    print(json.dumps(found))
    return 1 if found["faults"] or found["updates"] < given.updates else 0


if __name__ == "__main__":
    sys.exit(main())
