# SPDX-License-Identifier: Apache-2.0
"""Weights go from a training grid to vLLM's workers, with stand-ins for the classes of vLLM 0.32 that they extend.

The workers are threads of rank 0, each with a part of a model whose loader packs and computes as vLLM's do.
"""

import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Ranks
from torch import Tensor, nn

from stretto.inference import vllm_weights
from stretto.inference.vllm_weights import WeightSender, _rectangle
from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, gather, parallelize

MakeRanks = Callable[[int], Ranks]
WORKERS = 2
SHAPE = GPTConfig(layers=1, hidden=16, heads=4, vocab=24, max_seq_len=8)


class Base:
    """vLLM's base class of a worker's engine: what the plug-in reads of it."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.model, self.device, self.model_config = model, torch.device("cpu"), None
        self.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=WORKERS, rank=rank)

    def parse_update_info(self, update: dict[str, Any]) -> Any:
        return vllm_weights.UpdateInfo(**update)


class Served(nn.Module):
    """A worker's model: parts of tensors, two of them packed into one, and one that its loader computes."""

    def __init__(self, rank: int, workers: int = WORKERS) -> None:
        super().__init__()
        self.vocab, self.width = 24 // workers, 16 // workers
        self.rank, self.refused = rank, ""
        self.embedding = nn.Parameter(torch.zeros(self.vocab, 16, dtype=torch.bfloat16), requires_grad=False)
        self.joined = nn.Parameter(torch.zeros(3 * self.width, dtype=torch.bfloat16), requires_grad=False)
        self.doubled = nn.Parameter(torch.zeros(16, self.width, dtype=torch.bfloat16), requires_grad=False)
        self.others: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        first = self.rank * self.width
        for name, loaded in weights:
            if name == self.refused:
                continue
            if name == "embedding.weight":
                self.embedding.data.copy_(loaded.narrow(0, self.rank * self.vocab, self.vocab))
            elif name.endswith("qkv.bias"):
                parts = loaded.view(3, 16)[:, first : first + self.width]
                for number, part in enumerate(parts.unbind(0)):
                    self.joined.data[number * self.width :][: self.width].copy_(part)
            elif name == "blocks.0.attention.out.weight":
                self.doubled.data.copy_((2 * loaded)[:, first : first + self.width])
            else:
                mine = self.others.setdefault(name, torch.zeros(loaded.shape, dtype=loaded.dtype))
                mine.copy_(loaded)


class Server:
    """A client, and the workers that it calls, each in a thread."""

    def __init__(self) -> None:
        made = vllm_weights._make_engine()
        self.models = [Served(rank) for rank in range(WORKERS)]
        self.engines = [made(model, rank) for rank, model in enumerate(self.models)]
        self.pool = ThreadPoolExecutor(WORKERS)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        info = vllm_weights.InitInfo(**init_info)
        list(self.pool.map(lambda engine: engine.init_transfer_engine(info), self.engines))

    def start_weight_update(self) -> None: ...

    def finish_weight_update(self) -> None: ...

    def update_weights(self, update: dict[str, Any]) -> None:
        list(self.pool.map(lambda engine: engine.update_weights(update), self.engines))


def install(patch: pytest.MonkeyPatch) -> None:
    def initialize(model: nn.Module) -> None:
        model._original_do_torchao_reload = False  # type: ignore[assignment]

    modules: dict[str, dict[str, Any]] = {
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": Base},
        "vllm.model_executor.model_loader.reload.layerwise": {
            "initialize_layerwise_reload": initialize,
            "finalize_layerwise_reload": lambda model, config: None,
            "get_layerwise_info": lambda module: SimpleNamespace(can_load=lambda: False),
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        patch.setitem(sys.modules, name, module)
    vllm_weights._make_engine.cache_clear()


def train(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]
            shard.view(-1)[step + number :: 50] += 0.5


def differ(server: "Server | None", model: nn.Module) -> list[str]:
    """What a worker has that is not the trainer's, rounded. Collective."""
    whole = {name: gather(each).detach().to(torch.bfloat16) for name, each in model.named_parameters()}
    wrong = []
    for rank, served in enumerate([] if server is None else server.models):
        expected = Served(rank)
        expected.load_weights(whole.items())
        for name in ("embedding", "joined", "doubled"):
            if not torch.equal(getattr(served, name), getattr(expected, name)):
                wrong.append(f"{rank} {name}")
        wrong += [f"{rank} {n}" for n in expected.others if not torch.equal(served.others[n], expected.others[n])]
    return wrong


def serve() -> list[Any]:
    """Follow some steps by patches, then all of it; what was wrong, bytes sent, and what is raised."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        torch.manual_seed(0)
        model = parallelize(GPT(SHAPE), Grid(z=2))
        server = Server() if dist.get_rank() == 0 else None
        client: Any = server
        sender = WeightSender(model, client, WORKERS, changes_only=True, timeout=20)
        found: list[Any] = []
        for step in range(4):
            sent = sender.send(everything=step == 3)
            found.append((differ(server, model), sent))
            train(model, step)
        if server is not None:  # a worker that lost a patch
            server.engines[1].step = 7
        with pytest.raises(RuntimeError, match="the server has raised ValueError: this is the patch of step 1"):
            sender.send()
        sender.send(everything=True)
        found.append((differ(server, model), 0))
        if server is not None:
            server.models[1].refused = "embedding.weight"
            server.models[0].refused = "embedding.weight"
        with pytest.raises(ValueError, match=r"the server's model does not take embedding\.weight \(1 of"):
            WeightSender(model, client, WORKERS, timeout=20)
        with pytest.raises(RuntimeError, match="held: no answer within 3 s from worker 2"):  # a rank's, or a worker's
            WeightSender(model, client, WORKERS + 1, timeout=3.0)
        return found


def test_workers_hold_the_trainers_weights_in_bits_after_all_and_after_patches(ranks: MakeRanks) -> None:
    by_rank = ranks(2).run(serve)
    numbers = sum(parameter.numel() for parameter in GPT(SHAPE).parameters())
    for found in by_rank:
        assert [wrong for wrong, _ in found] == [[]] * 5
    first, patch, *_, whole, _ = (sum(of_rank[step][1] for of_rank in by_rank) for step in range(5))
    assert first == whole
    assert 2 * numbers < first < 2 * WORKERS * numbers  # parts that one worker reads go to it alone
    assert patch < 2 * WORKERS * numbers


def test_views_that_are_no_rectangle_are_not_taken_for_one() -> None:
    whole = torch.empty(4, 6, device="meta")
    assert _rectangle(whole, (4, 6)) == ((0, 0), (4, 6))
    assert _rectangle(whole[1:3, 2:5], (4, 6)) == ((1, 2), (2, 3))
    assert _rectangle(whole[2], (4, 6)) == ((2, 0), (1, 6))
    assert _rectangle(whole.t()[1:3], (4, 6)) == ((0, 1), (4, 2))
    for view in (whole[::2], whole[:, ::2], whole.flatten()[3:10], whole.flatten()[::7]):
        assert _rectangle(view, (4, 6)) is None


def test_arguments_that_cannot_work_are_refused_before_anything_is_opened() -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="workers is 0, but must be a whole number, at least 1, as many"):
        WeightSender(model, None, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"16-bit weights, not torch\.float32"):
        WeightSender(model, None, 1, dtype=torch.float32, changes_only=True)  # type: ignore[arg-type]
