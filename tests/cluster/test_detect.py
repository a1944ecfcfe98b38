# SPDX-License-Identifier: Apache-2.0
"""Cluster.detect on this machine, on machines with GPUs (torch.cuda replaced), and on odd ones."""

import builtins
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from stretto.cluster import Cluster, FlopRates, HostLink
from stretto.cluster.host_memory import host_memory_limit


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def gpus(monkeypatch):
    """Makes torch.cuda report these (name, bytes) devices."""

    def pretend(*devices: tuple[str, int]) -> None:
        properties = [SimpleNamespace(name=name, total_memory=memory) for name, memory in devices]
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(properties))
        monkeypatch.setattr("torch.cuda.get_device_properties", properties.__getitem__)

    return pretend


def test_without_gpus_each_usable_core_counts_as_one_with_its_share_of_memory(no_gpus):
    cluster = Cluster.detect()
    assert (cluster.nodes, cluster.gpus_per_node) == (1, len(os.sched_getaffinity(0)))
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < cluster.gpu.memory * cluster.gpus_per_node <= installed
    assert cluster.gpu.peak_flops == FlopRates()
    assert cluster.in_node.bandwidth is cluster.inter_node_bandwidth is None
    assert cluster.host_memory == pytest.approx(cluster.gpu.memory * cluster.gpus_per_node)


def test_a_known_gpu_has_its_datasheets_figures_and_the_memory_that_it_reports(gpus):
    gpus(*[("NVIDIA H200", 150_110_011_392)] * 4)
    cluster = Cluster.detect()
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.name) == (1, 4, "NVIDIA H200")
    assert cluster.gpu.memory == 150_110_011_392
    assert cluster.gpu.peak_flops.bf16 == 989e12
    assert cluster.gpu.memory_bandwidth == 4.8e12
    assert cluster.gpu.empirical_flops == FlopRates()
    assert "datasheet" in cluster.sources["gpu.peak_flops"]
    assert cluster.host_memory == host_memory_limit().bytes
    assert cluster.sources["host_memory"] == f"read from this machine: {host_memory_limit().source}"
    assert cluster.host_link == HostLink()  # only a measurement finds it


@pytest.mark.parametrize("name", ["NVIDIA H300", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 NVL", "nvidia h200"])
def test_an_unknown_gpu_has_no_guessed_figures(gpus, name):
    gpus((name, 10**10))
    gpu = Cluster.detect().gpu
    assert (gpu.name, gpu.memory) == (name, 1e10)
    assert gpu.peak_flops == FlopRates()
    assert gpu.memory_bandwidth is None


def test_a_mixed_node_counts_its_smallest_memory_and_no_peak(gpus):
    gpus(("NVIDIA H200", 141 * 10**9), ("NVIDIA A100-SXM4-40GB", 42 * 10**9), ("NVIDIA H200", 141 * 10**9))
    cluster = Cluster.detect()
    assert cluster.gpus_per_node == 3
    assert cluster.gpu.name == "NVIDIA H200 + NVIDIA A100-SXM4-40GB"
    assert cluster.gpu.memory == 42e9
    assert cluster.gpu.peak_flops == FlopRates()


def test_a_detected_cluster_survives_saving_and_loading(gpus, tmp_path):
    gpus(("Tesla V100-SXM2-16GB", 16_928_342_016))
    detected = Cluster.detect()
    detected.save(tmp_path / "here.toml")
    assert Cluster.load(tmp_path / "here.toml") == detected


@pytest.mark.parametrize("error", [RuntimeError("the driver is too old"), AssertionError("compiled without CUDA")])
def test_a_gpu_that_cannot_be_asked_falls_back_to_the_cpu(gpus, monkeypatch, error):
    def fail(index: int) -> None:
        raise error

    gpus(("NVIDIA H200", 1))
    monkeypatch.setattr("torch.cuda.get_device_properties", fail)
    assert "core" in Cluster.detect().gpu.name


def test_a_driver_without_devices_falls_back_to_the_cpu(gpus):
    gpus()
    assert "core" in Cluster.detect().gpu.name


def test_a_gpu_that_reports_no_memory_and_a_strange_name_is_described_without_them(gpus):
    gpus(("Odd\x1b GPU\n", 0))
    cluster = Cluster.detect()
    assert (cluster.gpu.name, cluster.gpu.memory) == ("Odd GPU", None)


@pytest.mark.parametrize("error", [ImportError("no torch"), OSError("libcudart.so: not found")])
def test_a_machine_without_a_working_torch_is_its_cpu(monkeypatch, error):
    plain_import = builtins.__import__

    def refuse_torch(name: str, *args: object) -> object:
        if name == "torch":
            raise error
        return plain_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse_torch)
    assert "core" in Cluster.detect().gpu.name


def test_a_system_that_reports_nothing_is_one_unknown_core(no_gpus, monkeypatch):
    def unknown(*args: object, **kwargs: object) -> None:
        raise OSError("not here")

    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr("pathlib.Path.read_text", unknown)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "")
    cluster = Cluster.detect()
    assert (cluster.gpus_per_node, cluster.gpu.name, cluster.gpu.memory) == (1, "CPU (one core)", None)
    assert cluster.host_memory is None
    assert "host_memory" not in cluster.sources


def test_a_containers_memory_limit_is_what_its_cores_share(no_gpus, monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 8388608 kB\n",
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "/sys/fs/cgroup/memory.max": "1073741824\n",
        "/proc/cpuinfo": "model name : A CPU\n",
    }

    monkeypatch.setattr("pathlib.Path.read_text", lambda path, **kwargs: files.get(str(path), ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    cluster = Cluster.detect()
    assert (cluster.gpus_per_node, cluster.gpu.name, cluster.gpu.memory) == (4, "A CPU (one core)", 2**28)
    assert cluster.host_memory == 2**30
    assert cluster.sources["host_memory"] == "read from this machine: the cgroup limit /sys/fs/cgroup/memory.max"


def test_planning_on_a_preset_imports_no_gpu_library():
    code = "from stretto import Cluster; print(Cluster.preset('alps')); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
