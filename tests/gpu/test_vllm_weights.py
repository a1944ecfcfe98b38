# SPDX-License-Identifier: Apache-2.0
"""A worker of vLLM (a stand-in) on one GPU takes weights from a trainer on another by NCCL, and by patches."""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.inference import vllm_weights
from stretto.inference.vllm_weights import WeightSender
from stretto.models import GPT
from tests.inference.test_vllm_weights import SHAPE, Served, install, train

pytestmark = [pytest.mark.ranks(2, own=(2,)), pytest.mark.own_gpus("NCCL does not take a GPU twice")]


class Caller:
    """Calls the worker of rank 1 through the store of the ranks."""

    def __init__(self) -> None:
        self._store, self._numbers = dist.distributed_c10d._get_default_store(), count()

    def _call(self, name: str, given: dict[str, Any]) -> None:
        number = next(self._numbers)
        self._store.set(f"weights {number}", json.dumps([name, given]))
        self._store.wait([f"weights done {number}"])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init", init_info)

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def update_weights(self, update: dict[str, Any]) -> None:
        self._call("update", update)

    def end(self) -> None:
        self._call("end", {})


def work(device: torch.device) -> list[dict[str, Any]]:
    """The worker: what its model holds after each update."""
    store, found = dist.distributed_c10d._get_default_store(), []
    model = Served(0, workers=1).to(device)
    engine: Any = vllm_weights._make_engine()(model, 0)
    engine.device, engine.parallel_config.world_size = device, 1
    for number in count():
        name, given = json.loads(store.get(f"weights {number}"))
        if name == "init":
            engine.init_transfer_engine(vllm_weights.InitInfo(**given))
        elif name == "update":
            engine.update_weights(given)
            found.append({key: value.clone().cpu() for key, value in model.state_dict().items()})
        store.set(f"weights done {number}", "")
        if name == "end":
            break
    return found


def run(device_type: str) -> list[dict[str, Any]]:
    """What rank 0's weights should be on the worker after each update, and what rank 1's are."""
    device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else None)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        if dist.get_rank() == 1:
            return work(device)
        caller, expected = Caller(), []
        patch.setattr(dist, "is_initialized", lambda: False)  # a job of one rank
        torch.manual_seed(0)
        model = GPT(SHAPE).to(device)
        sender = WeightSender(model, caller, 1, changes_only=True, timeout=60)
        for step in range(3):
            sender.send()
            served = Served(0, workers=1)
            served.load_weights((name, each.detach().cpu().bfloat16()) for name, each in model.named_parameters())
            expected.append(served.state_dict())
            train(model, step)
        caller.end()
        return expected


def test_a_worker_on_another_gpu_follows_by_nccl(run_ranks: Callable[..., list[Any]], world: int) -> None:
    expected, found = run_ranks(world, run, "cuda")
    assert len(expected) == len(found) == 3
    for wanted, held in zip(expected, found, strict=True):
        assert wanted.keys() == held.keys()
        assert [name for name in wanted if not torch.equal(wanted[name], held[name])] == []
