# SPDX-License-Identifier: Apache-2.0
"""The presets' figures, against what their sources say."""

from dataclasses import replace
from pathlib import Path

import pytest

from stretto.cluster import Cluster, HostLink, InNodeBandwidth, NodeLink
from stretto.cluster.detection import DATASHEETS
from stretto.cluster.schema import dotted_keys

NAMES = (
    "a100-pcie",
    "alps",
    "azure-ndv4",
    "dgx-1v",
    "dgx-2",
    "dgx-a100",
    "dgx-h100",
    "dgx-h200",
    "frontier",
    "h800",
    "mi210-ib",
    "perlmutter",
    "summit",
)


def test_the_presets_are_those_that_the_guide_lists():
    assert Cluster.presets() == NAMES


@pytest.mark.parametrize(
    ("name", "gpus_per_node", "memory_gb", "peak_tflops", "empirical_tflops"),
    [("perlmutter", 4, 40, 312, 280), ("frontier", 8, 64, 191.5, 125), ("alps", 4, 96, 989, 813)],
)
def test_the_dissertations_machines_have_the_figures_of_its_section_5_2(
    name, gpus_per_node, memory_gb, peak_tflops, empirical_tflops
):
    cluster = Cluster.preset(name)
    assert cluster.gpus_per_node == gpus_per_node
    assert cluster.gpu.memory == memory_gb * 1e9
    assert cluster.gpu.peak_flops.bf16 == peak_tflops * 1e12
    assert cluster.gpu.empirical_flops.bf16 == empirical_tflops * 1e12


@pytest.mark.parametrize("name", ["perlmutter", "frontier", "alps"])
def test_four_slingshot_11_nics_of_200_gigabits_give_a_node_100_gigabytes_a_second(name):
    cluster = Cluster.preset(name)
    assert cluster.nics_per_node == 4
    assert cluster.between_nodes.bandwidth == 200e9 / 8
    assert cluster.inter_node_bandwidth == 100e9


def test_a_ring_on_pcie_crosses_numa_domains_as_rarely_as_it_can():
    cluster = Cluster.preset("a100-pcie")
    assert cluster.ring_order(range(8)) == list(range(8))
    assert cluster.ring_order([0, 4, 1, 5, 2, 12, 8]) == [0, 2, 4, 1, 3, 6, 5]
    assert Cluster.preset("dgx-h100").ring_order([9, 1, 8, 0]) == [1, 3, 0, 2]


def test_numa_domains_have_a_link_and_equal_parts_of_the_gpus():
    with pytest.raises(ValueError, match="domains = 2: needs domain_bandwidth"):
        NodeLink(domains=2)
    with pytest.raises(ValueError, match="must divide the node's 8 GPUs; 2 would do"):
        replace(Cluster.preset("a100-pcie"), in_node=NodeLink(domains=6, domain_bandwidth=1e9))


def test_whole_machines_have_as_many_gpus_as_their_sites_state():
    assert Cluster.preset("summit").gpus == 27_648
    assert Cluster.preset("alps").gpus == 10_752
    assert Cluster.preset("perlmutter").gpus == 1536 * 4
    assert Cluster.preset("frontier").gpus == 77 * 128 * 8
    assert Cluster.preset("dgx-h100").gpus is None


@pytest.mark.parametrize(
    ("name", "gpus", "nics", "in_node_gb", "node_to_node_gb"),
    [
        ("azure-ndv4", 8, 8, 300, 200),
        ("dgx-1v", 8, 4, 150, 50),
        ("dgx-2", 16, 8, 150, 200),
        ("dgx-a100", 8, 8, 300, 200),
        ("dgx-h100", 8, 8, 450, 400),
        ("h800", 8, 8, 200, 400),
        ("summit", 6, 2, 100, 25),
    ],
)
def test_links_are_bytes_a_second_in_one_direction(name, gpus, nics, in_node_gb, node_to_node_gb):
    cluster = Cluster.preset(name)
    assert (cluster.gpus_per_node, cluster.nics_per_node) == (gpus, nics)
    assert cluster.in_node.bandwidth == in_node_gb * 1e9
    assert cluster.inter_node_bandwidth == node_to_node_gb * 1e9


def test_a_v100_of_summit_computes_125_tflops_in_half_precision_and_knows_no_bf16():
    gpu = Cluster.preset("summit").gpu
    assert (gpu.peak_flops.fp16, gpu.peak_flops.bf16, gpu.memory) == (125e12, None, 16e9)


def test_mi210_ib_has_table_1_of_its_paper():
    cluster = Cluster.preset("mi210-ib")
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 4)
    assert (cluster.in_node.bandwidth, cluster.between_nodes.bandwidth) == (80e9, 20e9)
    assert cluster.between_nodes.latency == pytest.approx(700e-9)


def test_dgx_h200_knows_what_was_measured_on_four_h200():
    cluster = Cluster.preset("dgx-h200")
    assert cluster.gpu.empirical_flops.bf16 == 812e12
    all_gather = 3 / 4 * 2**30 / 2.478e-3  # bytes that a ring sends from one of 4 GPUs, over the measured time
    assert cluster.measured_in_node_bandwidth(1, 4) == pytest.approx(all_gather, rel=1e-3)
    assert cluster.measured_in_node_bandwidth(2, 2) is None
    assert cluster.in_node_bandwidths == (InNodeBandwidth(preceding=1, size=4, bandwidth=325e9),)


@pytest.mark.parametrize(
    ("name", "memory_gb", "direction_gb", "both_gb"),
    [
        ("dgx-h200", 2000, 55, 101),
        ("dgx-h100", 2000, 55, 101),
        ("frontier", 512, 36, 72),
        ("summit", 512, 50, 100),
        ("alps", 4 * 120, 450, 900),
    ],
)
def test_host_memory_and_its_link(name, memory_gb, direction_gb, both_gb):
    cluster = Cluster.preset(name)
    assert cluster.host_memory == memory_gb * 1e9
    assert cluster.host_link == HostLink(direction_gb * 1e9, direction_gb * 1e9, both_gb * 1e9)
    assert cluster.require("host_link.duplex_bandwidth") == both_gb * 1e9


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_preset_has_a_source(name):
    cluster = Cluster.preset(name)
    for key in dotted_keys(Cluster):
        if key in ("name", "description", "sources"):
            continue
        value = cluster
        for part in key.split("."):
            value = getattr(value, part)
        is_a_known_figure = isinstance(value, int | float) or (isinstance(value, tuple) and value)
        table, _, _ = key.rpartition(".")
        assert not is_a_known_figure or key in cluster.sources or table in cluster.sources, key


@pytest.mark.parametrize("name", NAMES)
def test_no_gpu_is_faster_when_measured_than_at_its_peak(name):
    gpu = Cluster.preset(name).gpu
    for dtype, rate in vars(gpu.empirical_flops).items():
        assert rate is None or rate < getattr(gpu.peak_flops, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_and_the_datasheet_of_its_gpu_agree(name):
    gpu = Cluster.preset(name).gpu
    datasheet = DATASHEETS[gpu.name]
    assert gpu.peak_flops == datasheet.peak_flops
    assert gpu.memory_bandwidth == datasheet.memory_bandwidth


def test_a_misspelt_preset_names_the_nearest_and_all_of_them():
    with pytest.raises(ValueError, match="unknown cluster 'perlmuter'; did you mean 'perlmutter'") as caught:
        Cluster.preset("perlmuter")
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", ["", "../presets/alps", "/etc/passwd", "zzz"])
def test_a_name_that_is_no_preset_is_never_read_as_a_path(name):
    with pytest.raises(ValueError, match="unknown cluster"):
        Cluster.preset(name)


def test_the_guide_names_every_preset_and_every_key_of_a_file():
    guide = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    for word in (*NAMES, *dotted_keys(Cluster)):
        assert f"`{word}`" in guide, word


def test_the_guides_own_cluster_file_can_be_loaded(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    example = tmp_path / "example.toml"
    example.write_text(guide.partition("```toml\n")[2].partition("```")[0], encoding="utf-8")
    cluster = Cluster.load(example)
    assert (cluster.gpus, cluster.inter_node_bandwidth) == (64, 100e9)
    assert cluster.measured_in_node_bandwidth(2, 2) == 210e9
