# SPDX-License-Identifier: Apache-2.0
"""Measures what being watched costs a training step: `PYTHONPATH=src:. python tests/stress/watching_cost.py`.

Ranks train a GPT with tensor parallelism (on GPUs, where there are some; ranks may share one), in turns of some steps
with their counters shared and stored, and some with every store replaced by nothing. Meanwhile a process outside reads
the counters and takes a stack of each rank once a second, which a watcher does only when it suspects a stall. Prints
the median step of both, the median of the differences of neighbouring turns with its 95% interval, the time of the
stores of a step by themselves, and the peak of allocated GPU memory in turns of either kind.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

TURN = 10  # steps


def train(folder: str, turns: int, hidden: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from stretto import Grid, counters, parallelize
    from stretto.launch.watching.joining import join_watched
    from stretto.memory import shared_gpus
    from stretto.models import GPT, GPTConfig

    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    grid = Grid(x=ranks)
    rank, device = dist.get_rank(), grid.device
    join_watched(Path(folder), rank)
    torch.manual_seed(0)
    config = GPTConfig(layers=4, hidden=hidden, heads=8, vocab=512, max_seq_len=256)
    model = parallelize(GPT(config).to(device), grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(512, (4, 257), generator=torch.Generator().manual_seed(1)).to(device)
    names = ("note", "advance", "begin_wait", "end_wait", "enter_collective")
    stored = {name: getattr(counters, name) for name in names}
    calls = dict.fromkeys(names, 0)
    nothing = {
        "note": lambda phase, step=None: None,
        "advance": lambda: None,
        "begin_wait": lambda name, group=-1, number=0: None,
        "end_wait": lambda before: None,
        "enter_collective": lambda index: 0,
    }

    def use(functions: dict[str, Any]) -> None:
        for name, function in functions.items():
            setattr(counters, name, function)

    def step(number: int) -> None:
        counters.note("data", number)
        counters.note("step", number)
        model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run_turn(number: int) -> tuple[float, int]:
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        began = time.perf_counter()
        for each in range(TURN):
            step(number * TURN + each)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / TURN
        return seconds, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return stored[name](*args, **kwargs)

        return call

    use({name: counting(name) for name in names})
    step(0)
    of_step = dict(calls)
    use(stored)
    for number in range(3):
        run_turn(number)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    memory: dict[bool, set[int]] = {True: set(), False: set()}
    order = random.Random(0)
    for number in range(turns):
        for stores in order.sample((True, False), 2):
            use(stored if stores else nothing)
            one, peak = run_turn(number)
            seconds[stores].append(one)
            memory[stores].add(peak)
    use(stored)
    began = time.perf_counter()
    for _ in range(1000):
        for _ in range(of_step["begin_wait"]):
            counters.end_wait(counters.begin_wait("all_reduce"))
        for _ in range(of_step["enter_collective"]):
            counters.enter_collective(-1)
        for _ in range(of_step["note"]):
            counters.note("step", 1)
    stores_alone = (time.perf_counter() - began) / 1000
    is_shared = shared_gpus.is_enabled()
    Path(folder, "end").touch()
    dist.barrier()
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"seconds": seconds, "memory": {str(key): sorted(value) for key, value in memory.items()},
            "stores_alone": stores_alone, "calls": of_step, "device": device_name, "shared": is_shared}  # fmt: skip


def watch(folder: Path) -> None:
    """Read all counters and take all stacks once a second, until the ranks end."""
    from stretto.counters import Reader, read_folder
    from stretto.launch.watching import stacks

    readers: dict[str, Reader] = {}
    while not (folder / "end").exists():
        for each in read_folder(folder, readers):
            stacks.read_threads(each.pid)
        time.sleep(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what being watched costs a step.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=256)
    given = parser.parse_args()

    from stretto.bench.harness import run_ranks, shared_where_few
    from stretto.cluster.detection import machine_kind

    with tempfile.TemporaryDirectory(prefix="stretto-watching-") as folder, shared_where_few(given.ranks):
        threading.Thread(target=watch, args=(Path(folder),), daemon=True).start()
        found = run_ranks(given.ranks, train, folder, given.turns, given.hidden)
    with_stores, without = found["seconds"][True], found["seconds"][False]
    differences = sorted((a - b) / b for a, b in zip(with_stores, without, strict=True))
    count = len(differences)
    spread = int(0.98 * count**0.5)  # of ranks around the median: its 95% interval
    print(
        json.dumps(
            {
                "command": f"python tests/stress/watching_cost.py --ranks {given.ranks} --turns {given.turns} "
                f"--hidden {given.hidden}",
                "date": time.strftime("%Y-%m-%d"),
                "machine": machine_kind(),
                "ranks share a GPU": found["shared"],
                "step with stores (ms)": round(1e3 * statistics.median(with_stores), 3),
                "step without (ms)": round(1e3 * statistics.median(without), 3),
                "difference, median (%)": round(100 * statistics.median(differences), 3),
                "its 95% interval (%)": [
                    round(100 * differences[max(0, count // 2 - spread)], 3),
                    round(100 * differences[min(count - 1, count // 2 + spread)], 3),
                ],
                "stores of a step alone (us)": round(1e6 * found["stores_alone"], 1),
                "stores alone, of a step (%)": round(100 * found["stores_alone"] / statistics.median(without), 4),
                "calls of a step": found["calls"],
                "peak GPU memory with stores, without (bytes)": [found["memory"]["True"], found["memory"]["False"]],
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
