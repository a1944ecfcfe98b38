# SPDX-License-Identifier: Apache-2.0
"""One rank of `python -m lab ddp`: times and traces DistributedDataParallel over the checkout on PYTHONPATH.

The bench runs this file by its path, so that `stretto` is the checkout to measure: the file must work with older
checkouts too, and imports nothing from its own folder.

argv: JSON with rank, world, store (a path), device ("cuda" or "cpu"), width, layers, rows, bucket_mb and steps. Writes
a line of JSON to stdout: "seconds" of each step, and of one step "forward_us", its forward pass's end, and
"kernels", its kernels as [is a collective, start, end] in microseconds from the first one's start.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stretto
from stretto.collectives import install
from stretto.collectives.algorithms import find

_WARM_UP = 5
_COLLECTIVE = "run"  # the name of the kernel of every schedule


def main() -> None:
    """Train a stack of linear layers, and write the measurements."""
    setting = json.loads(sys.argv[1])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    is_cuda = setting["device"] == "cuda"
    store = dist.FileStore(setting["store"], setting["world"])
    rank, world = setting["rank"], setting["world"]
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("stretto", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    install(find("two-shot-all-reduce").compile(ranks=world))
    torch.manual_seed(0)
    width = setting["width"]
    layers = [layer for _ in range(setting["layers"]) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device), bucket_cap_mb=setting["bucket_mb"])
    x = torch.randn(setting["rows"], width, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        if is_cuda:
            torch.cuda.synchronize()

    seconds = []
    for number in range(_WARM_UP + setting["steps"]):
        dist.barrier()
        began = time.perf_counter()
        step()
        if number >= _WARM_UP:
            seconds.append(time.perf_counter() - began)
    dist.barrier()
    kernels = _trace(step, Path(setting["store"]).with_name(f"{rank}.trace")) if is_cuda else []
    result = {"stretto": stretto.__file__, "seconds": seconds, "kernels": kernels}
    dist.destroy_process_group()
    print(json.dumps(result), file=answer, flush=True)


def _trace(step: Any, file: Path) -> list[tuple[bool, float, float]]:
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step()
    profile.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    file.unlink()
    first = min(event["ts"] for event in events)
    return sorted(
        (event["name"] == _COLLECTIVE, round(event["ts"] - first, 2), round(event["ts"] + event["dur"] - first, 2))
        for event in events
    )


if __name__ == "__main__":
    main()
