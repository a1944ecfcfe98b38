# SPDX-License-Identifier: Apache-2.0
"""Trains CONFIG on nodes of a Ray cluster: python ray_train.py --nodes 2 --gpus 8 CONFIG [--set ...].

An actor has all GPUs of a node, so that its ranks reach each other's memory, and torchrun starts them there.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Node:
    """The ranks of one node."""

    def find_address(self) -> tuple[str, int]:
        """This node's address, and a port that is free."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def train(self, nodes: int, number: int, ranks: int, master: tuple[str, int], arguments: list[str]) -> int:
        """Run this node's ranks to their end. Returns torchrun's exit status."""
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
        command += [f"--node-rank={number}", f"--master-addr={master[0]}", f"--master-port={master[1]}"]
        return subprocess.run([*command, "-m", "stretto", "train", *arguments], env=os.environ, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=8, help="of a node; 0 for one rank on CPUs")
    options, arguments = parser.parse_known_args()

    ray.init()
    resources = {"GPU": options.gpus} if options.gpus else {"CPU": 1}
    group = placement_group([resources] * options.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    remote = ray.remote(Node)
    actors = [
        remote.options(
            num_gpus=options.gpus,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number in range(options.nodes)
    ]
    master = ray.get(actors[0].find_address.remote())
    ranks = max(1, options.gpus)
    runs = [
        actor.train.remote(options.nodes, number, ranks, master, [*arguments, "--set", "train.resume=latest"])
        for number, actor in enumerate(actors)
    ]
    sys.exit(max(ray.get(runs)))


if __name__ == "__main__":
    main()
