# SPDX-License-Identifier: Apache-2.0
"""Steps that the lab alone times: captured in a CUDA graph, of whole models, and the bytes that a step sends."""

from dataclasses import replace

import torch

from stretto.bench.training.runs import Step, Stepped, TrainingRun
from stretto.cluster import GPU, Cluster, FlopRates, NodeLink
from stretto.models import GPT, GPTConfig
from stretto.parallel import CapturedStep


def captured(run: TrainingRun) -> TrainingRun:
    """The same run with each step as one CUDA graph."""

    def build() -> Step:
        step = CapturedStep(run.build())
        return lambda: Stepped(*step())

    return replace(run, name=f"{run.name}, captured", build=build)


def whole_gpt(config: GPTConfig, device: torch.device) -> GPT:
    """The whole model, with the same fp32 weights on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(config)


def cluster_of_a_byte_a_second(ranks: int) -> Cluster:
    """A node of CPU ranks with links of 1 byte/s: predicted seconds equal the bytes that a rank sends."""
    return Cluster(
        name="CPU ranks",
        gpus_per_node=ranks,
        gpu=GPU(name="CPU", memory=1e12, memory_bandwidth=1e10, peak_flops=FlopRates(fp32=1e11, bf16=1e11)),
        in_node=NodeLink(bandwidth=1.0, latency=1e-30),
    )
