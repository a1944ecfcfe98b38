# SPDX-License-Identifier: Apache-2.0
"""Look-ups that store to some ranks and put to others through NVSHMEM, in processes of their own.

The puts are between GPUs of one host, which NVSHMEM carries over NVLink too: what is proved is the path, not a network.
"""

import json
import os
import random
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from stretto import ops
from stretto.memory import PeerError, compilation
from stretto.ops.embedding.forward import look_up_alone
from stretto.ops.embedding.index_errors import IndexErrors
from stretto.ops.embedding.launch_config import LaunchConfig
from stretto.ops.embedding.put import operator as put
from tests.gpu.watched import run_watched
from tests.ops.embedding.jagged import Case, Kind, fill_case, is_close

RANKS = max((n for n in (1, 2, 3, 4) if n <= torch.cuda.device_count()), default=0)
CALLS = 20
SEED = random.randrange(2**31)

pytestmark = [
    pytest.mark.skipif(RANKS < 2, reason="NVSHMEM's ranks need a GPU each, and there are not two"),
    pytest.mark.skipif(not symmetric.is_nvshmem_available(), reason="torch found no NVSHMEM on this machine"),
]

# Rank 1 has no tables. Each kind with its way is a kernel to compile, with NVSHMEM's device library: few.
UNEQUAL = [[(1, 4), (300, 92), (50, 256)], [], [(5000, 64)], [(3, 8), (70, 32), (9, 12), (11, 260)]]
KINDS = [
    (Kind(UNEQUAL[:RANKS], 48 * RANKS, torch.float32, torch.int64, "mean", True, 20),
     LaunchConfig(1, 8, 8, 1, 4, "by_table")),
    (Kind([[(1000, 128)] * 3] * RANKS, 20 * RANKS, torch.bfloat16, torch.int32, "sum", False, 9),
     LaunchConfig(8, 1, 8, 2, 8, "mixed")),
]  # fmt: skip


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(f"{time.monotonic() % 1000:7.1f}", *words, flush=True)


def begin() -> torch.device:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    symmetric.set_backend("NVSHMEM")
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def call(case: Case, way: LaunchConfig, peer_access: list[bool] | None) -> torch.Tensor:
    put.find_launch_config = lambda *_: way  # type: ignore[assignment]
    own = case.owners[dist.get_rank()]
    return ops.embedding_all_to_all_put(
        own.indices,
        own.offsets,
        own.tables,
        weights=own.weights,
        mode=case.mode,
        batch=case.batch,
        name=str((case.batch, case.mode)),
        peer_access=peer_access,
    )


def pool_without_exchange(case: Case, way: LaunchConfig, device: torch.device) -> torch.Tensor:
    """This rank's rows of what each rank pools by the kernel that has no exchange: what must come of it, to the bit."""
    rank, world = dist.get_rank(), dist.get_world_size()
    columns = []
    for owner in case.owners:
        if owner.tables:
            width = sum(table.shape[1] for table in owner.tables)
            out = torch.empty(world, case.batch // world, width, dtype=case.grad.dtype, device=device)
            look_up_alone(
                owner.indices, owner.offsets, owner.tables, owner.weights, world, case.mode, out,
                IndexErrors(rank, device), config=way,
            )  # fmt: skip
            columns.append(out[rank])
    return torch.cat(columns, 1)


def choose_reach(pattern: str, rng: random.Random) -> list[bool] | None:
    match pattern:
        case "all":
            return None
        case "none":
            return [False] * RANKS
        case _:
            return [rng.random() < 0.5 for _ in range(RANKS)]


def look_up(device: torch.device, seed: int, kinds: int = 1) -> list[object]:
    """Every pattern of peer_access, `CALLS` calls of changing data back to back, some ranks late."""
    rank, wrong = dist.get_rank(), []
    rng = random.Random(seed + rank)  # each rank reaches others of its own choice
    for place, (kind, way) in enumerate(KINDS[-kinds:]):
        cases = [fill_case(kind, seed + number, device) for number in range(CALLS)]
        expected = [pool_without_exchange(case, way, device) for case in cases]
        for pattern in ("all", "none", "mixed"):
            call(cases[0], way, choose_reach(pattern, rng))
            torch.cuda.synchronize()
            say("kind", place, pattern, "compiled")
            outs = []
            for case in cases:
                if rng.random() < 0.2:
                    torch.cuda._sleep(rng.choice([100_000, 2_000_000]))
                outs.append(call(case, way, choose_reach(pattern, rng)))
            torch.cuda.synchronize()
            ops.check_indices()
            for number, (out, right) in enumerate(zip(outs, expected, strict=True)):
                if not torch.equal(out, right):
                    wrong.append((place, pattern, number, (out.double() - right.double()).abs().max().item()))
            say("kind", place, pattern, "wrong" if wrong else "right")
        rows = cases[0].expected().chunk(RANKS)[rank]
        if not is_close(expected[0], rows, expected[0].dtype):
            wrong.append((place, "far from fp64"))
    return wrong


def refuse(device: torch.device, seed: int) -> list[object]:
    """A bad index is named by its rank and hangs nobody; gradients and other backends' memory are refused."""
    kind, way = KINDS[1]
    case = fill_case(kind, seed, device)
    rank, wrong = dist.get_rank(), []
    own = case.owners[rank]
    kept = own.indices[3].clone()
    if rank == RANKS - 1:
        own.indices[3] = 1000
    call(case, way, None)
    try:
        ops.check_indices()
        reported = ""
    except ValueError as error:
        reported = str(error)
    # Which table the index is of depends on how many the bags before it have.
    if bool(re.search(rf"rank {rank}: indices\[3\] is 1000, but table \d of", reported)) != (rank == RANKS - 1):
        wrong.append(reported)
    own.indices[3] = kept
    for attempt, message, needs_gradients in (
        (lambda: call(case, way, None), "has no gradients", True),
        (lambda: ops.embedding_all_to_all(own.indices, own.offsets, own.tables), "NVSHMEM", False),
    ):
        for table in own.tables:
            table.requires_grad_(needs_gradients)
        try:
            attempt()
            wrong.append(f"{message} was taken")
        except ValueError as error:
            if message not in str(error):
                wrong.append(str(error))
    return wrong


def lose_a_rank(device: torch.device, seed: int) -> list[object]:
    """A rank that does not come is named, in time."""
    kind, way = KINDS[1]
    case, wrong = fill_case(kind, seed, device), []
    compilation.ALLOWANCE = 0.0
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == 0:
        for slots in put.find_put_slots(dist.group.WORLD.group_name):  # type: ignore[union-attr]
            slots.limit.seconds = 0.5
        call(case, way, [False] * RANKS)
        try:
            ops.check_indices()
            wrong.append("nobody was missed")
        except PeerError as error:
            if "waited in vain for rank" not in str(error):
                wrong.append(str(error))
    dist.barrier()
    return wrong


def run_all(folder: Path, seed: int, kinds: int) -> None:
    device = begin()
    wrong = {"look_up": look_up(device, seed, kinds)}
    for part in (refuse, lose_a_rank):
        wrong[part.__name__] = part(device, seed)
        say(part.__name__, "wrong" if wrong[part.__name__] else "right")
    (folder / f"wrong-{dist.get_rank()}.json").write_text(json.dumps(wrong))
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.exhaustive  # NVSHMEM's own processes and compiler take most of a minute
@pytest.mark.parametrize("kinds", [1, 2])
def test_stores_and_puts_give_the_same_bits_whichever_ranks_have_peer_access(tmp_path: Path, kinds: int) -> None:
    run_watched(RANKS, run_all, tmp_path, SEED, kinds)
    for rank in range(RANKS):
        wrong = json.loads((tmp_path / f"wrong-{rank}.json").read_text())
        assert wrong == {"look_up": [], "refuse": [], "lose_a_rank": []}, (rank, SEED)
