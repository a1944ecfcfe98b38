"""Figures of known GPUs from their vendors' datasheets, by the exact name that torch.cuda reports.

Exact, because a near name is another chip: "NVIDIA H100 PCIe" computes three quarters of what "NVIDIA H100 80GB
HBM3" does, and a MIG slice carries its parent's name with more behind it. Rates are dense; where a datasheet
prints them with 2:4 sparsity, they are halved.
"""

from dataclasses import dataclass

from stretto.cluster.model import FlopRates


@dataclass(frozen=True)
class Datasheet:
    """One GPU: dense peak FLOP/s, memory bandwidth in bytes/s, and the document that says so."""

    peak_flops: FlopRates
    memory_bandwidth: float | None
    source: str


_V100 = FlopRates(fp64=7.8e12, fp32=15.7e12, fp16=125e12)
_A100 = FlopRates(fp64=19.5e12, fp32=19.5e12, tf32=156e12, bf16=312e12, fp16=312e12)
_H100_SXM = FlopRates(fp64=67e12, fp32=67e12, tf32=494e12, bf16=989e12, fp16=989e12, fp8=1979e12)
_H100_PCIE = FlopRates(fp64=51e12, fp32=51e12, tf32=378e12, bf16=756e12, fp16=756e12, fp8=1513e12)
_L40S = FlopRates(fp32=91.6e12, tf32=183e12, bf16=362e12, fp16=362e12, fp8=733e12)
_MI210 = FlopRates(fp64=45.3e12, fp32=45.3e12, bf16=181e12, fp16=181e12)
_MI250X_DIE = FlopRates(fp64=47.85e12, fp32=47.85e12, bf16=191.5e12, fp16=191.5e12)
_MI300X = FlopRates(fp64=163.4e12, fp32=163.4e12, tf32=653.7e12, bf16=1307.4e12, fp16=1307.4e12, fp8=2614.9e12)

_V100_SOURCE = "NVIDIA V100 datasheet"
_A100_SOURCE = "NVIDIA A100 datasheet"
_H100_SOURCE = "NVIDIA H100 datasheet; rates printed with sparsity are halved"
_GH200_SOURCE = "NVIDIA GH200 datasheet (the 96 GB HBM3 part); rates printed with sparsity are halved"

DATASHEETS = {
    "Tesla V100-SXM2-16GB": Datasheet(_V100, 900e9, _V100_SOURCE),
    "Tesla V100-SXM2-32GB": Datasheet(_V100, 900e9, _V100_SOURCE),
    # DGX-2's own part: no datasheet gives its bandwidth and its other rates.
    "Tesla V100-SXM3-32GB": Datasheet(
        FlopRates(fp16=125e12), None, "NVIDIA DGX-2 datasheet: 2 petaFLOPS of 16 GPUs on tensor cores"
    ),
    "NVIDIA A100-SXM4-40GB": Datasheet(_A100, 1555e9, _A100_SOURCE),
    "NVIDIA A100-PCIE-40GB": Datasheet(_A100, 1555e9, _A100_SOURCE),
    "NVIDIA A100-SXM4-80GB": Datasheet(_A100, 2039e9, _A100_SOURCE),
    "NVIDIA A100 80GB PCIe": Datasheet(_A100, 1935e9, _A100_SOURCE),
    "NVIDIA H100 80GB HBM3": Datasheet(_H100_SXM, 3.35e12, _H100_SOURCE),
    "NVIDIA H100 PCIe": Datasheet(_H100_PCIE, 2e12, _H100_SOURCE),
    "NVIDIA H200": Datasheet(_H100_SXM, 4.8e12, "NVIDIA H200 datasheet; rates printed with sparsity are halved"),
    "NVIDIA GH200 120GB": Datasheet(_H100_SXM, 4e12, _GH200_SOURCE),
    "NVIDIA GH200 480GB": Datasheet(_H100_SXM, 4e12, _GH200_SOURCE),
    "NVIDIA L40S": Datasheet(_L40S, 864e9, "NVIDIA L40S datasheet"),
    "AMD Instinct MI210": Datasheet(_MI210, 1638.4e9, "AMD Instinct MI210 datasheet; fp64 and fp32 on matrix cores"),
    "AMD Instinct MI250X": Datasheet(
        _MI250X_DIE,
        1638.4e9,
        "AMD Instinct MI250X datasheet, halved: torch sees each of its two dies as a device",
    ),
    "AMD Instinct MI300X": Datasheet(_MI300X, 5.3e12, "AMD Instinct MI300X datasheet"),
}
