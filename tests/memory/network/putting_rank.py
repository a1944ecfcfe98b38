# SPDX-License-Identifier: Apache-2.0
"""One of two ranks, each a node, whose kernels gather by puts until all calls are made: for faults from outside.

`python -m tests.memory.network.putting_rank RANK FOLDER PROXY SECONDS`. Rank 0 connects through the relay whose port is
in FOLDER/relay, once FOLDER/target has the port that the relay is for. After each call a line is printed with its
number, and at the end "right", or the error. Calls end once FOLDER/stop is there. SIGUSR1 ends the rank's proxy.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.memory import PeerError
from stretto.memory.network.native import NativeProxy
from stretto.memory.network.proxy import Proxy
from stretto.tiles.put_channel import PutChannel

SIZE = 300


def connect_through_relay(folder, kind):
    """Have this rank's proxy connect to the relay in place of its peer."""
    connect = kind.connect

    def connect_to_relay(self, far):
        ((peer, (host, port)),) = far.items()
        (folder / "target.new").write_text(str(port))
        (folder / "target.new").rename(folder / "target")
        while not (folder / "relay").exists():
            time.sleep(0.01)
        connect(self, {peer: (host, int((folder / "relay").read_text()))})

    kind.connect = connect_to_relay


def gather_until_stopped(channel, rank, folder):
    """Gather again and again; AssertionError for a wrong result. Both ranks stop after the same call."""
    call, stops = 0, False
    while not stops:
        # The last number says whether rank 0 has been told to stop.
        shard = torch.arange(SIZE, dtype=torch.int32) + 1000 * rank + call
        shard[-1] = (folder / "stop").exists()
        out = torch.full((2, SIZE), -1, dtype=torch.int32)
        channel.all_gather(shard, out)
        for peer in range(2):
            assert torch.equal(out[peer, :-1], torch.arange(SIZE - 1, dtype=torch.int32) + 1000 * peer + call)
        stops = bool(out[0, -1])
        call += 1
        print(call, flush=True)


def main():
    rank, folder, proxy, seconds = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    os.environ |= {"STRETTO_NODES": "2x1", "STRETTO_PROXY": proxy, "GLOO_SOCKET_IFNAME": "lo"}
    if rank == 0:
        connect_through_relay(folder, NativeProxy if proxy == "native" else Proxy)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    try:
        with PutChannel.allocate(group, slots=2, slot_bytes=256, backend="host") as channel:
            signal.signal(signal.SIGUSR1, lambda *_: channel._endpoint.proxy.close(0.0))
            channel.limit.begin_call()  # the proxy may have been compiled: one call may take longer
            gather_until_stopped(channel, rank, folder)
        print("right", flush=True)
    except PeerError as error:
        print(f"error {error}", flush=True)


if __name__ == "__main__":
    main()
