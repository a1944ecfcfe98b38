# SPDX-License-Identifier: Apache-2.0
"""Cluster files: what is read, what is written, and what is refused with which words."""

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from stretto.cluster import GPU, Cluster, FlopRates, HostLink, InNodeBandwidth, NetworkLink, NodeLink

SMALLEST = 'name = "mine"\ngpus_per_node = 4\n[gpu]\nname = "NVIDIA H200"\n'


def load(tmp_path: Path, text: str | bytes) -> Cluster:
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Cluster.load(path)


def refusal(tmp_path: Path, text: str | bytes) -> str:
    """The message that refuses a file, which must name the file."""
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'mine.toml'}: ")
    return message


# What is read and written.


def test_the_smallest_file_leaves_everything_else_unknown(tmp_path):
    cluster = load(tmp_path, SMALLEST)
    assert (cluster.name, cluster.gpus_per_node, cluster.gpu.name) == ("mine", 4, "NVIDIA H200")
    assert cluster.nodes is cluster.gpus is cluster.gpu.memory is cluster.inter_node_bandwidth is None
    assert cluster.gpu.peak_flops == FlopRates()
    assert cluster.in_node == NodeLink()
    assert cluster.host_link == HostLink()
    assert cluster.host_memory is None
    assert cluster.in_node_bandwidths == ()


def test_whole_numbers_and_decimals_mean_the_same_figure(tmp_path):
    whole = load(tmp_path, SMALLEST + "memory = 80_000_000_000\n")
    decimal = load(tmp_path, SMALLEST + "memory = 80e9\n")
    assert whole == decimal
    assert whole.gpu.memory == 80e9


@pytest.mark.parametrize("name", Cluster.presets())
def test_every_preset_survives_saving_and_loading(tmp_path, name):
    preset = Cluster.preset(name)
    preset.save(tmp_path / "saved.toml")
    assert Cluster.load(tmp_path / "saved.toml") == preset


def test_a_cluster_made_in_python_survives_saving_loading_and_pickling(tmp_path):
    made = Cluster(
        name='ä "quoted" \\ name',
        gpus_per_node=8,
        nodes=3,
        nics_per_node=2,
        gpu=GPU(name="a GPU", memory=42505273344.0, peak_flops=FlopRates(bf16=1 / 3, fp8=989.4e12)),
        host_memory=2.0**40,
        host_link=HostLink(to_host_bandwidth=25.5e9),
        in_node=NodeLink(bandwidth=123456789.123, latency=1.3e-6),
        between_nodes=NetworkLink(bandwidth=1e24, latency=5e-324),
        in_node_bandwidths=(InNodeBandwidth(1, 2, 100e9), InNodeBandwidth(4, 2, 1.5e9)),
        sources={"gpu.memory": "read off the machine", "in_node": 'with "quotes"'},
    )
    made.save(tmp_path / "made.toml")
    assert Cluster.load(tmp_path / "made.toml") == made
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(pickle.loads(pickle.dumps(made)))


def test_a_saved_file_names_its_units(tmp_path):
    Cluster.preset("perlmutter").save(tmp_path / "saved.toml")
    text = (tmp_path / "saved.toml").read_text()
    assert "bandwidth = 25e9  # bytes/s, one direction, one NIC" in text
    assert "bf16 = 312e12  # FLOP/s" in text


def test_a_saved_number_of_1000_or_more_has_an_exponent(tmp_path):
    made = Cluster.preset("perlmutter")
    replace(made, between_nodes=NetworkLink(bandwidth=1000.0, latency=999.0)).save(tmp_path / "saved.toml")
    text = (tmp_path / "saved.toml").read_text()
    assert "bandwidth = 1e3  # bytes/s" in text
    assert "latency = 999.0  # " in text


def test_source_keys_may_be_quoted_or_not(tmp_path):
    plain = load(tmp_path, SMALLEST + '[sources]\ngpu.name = "its label"\n')
    quoted = load(tmp_path, SMALLEST + '[sources]\n"gpu.name" = "its label"\n')
    assert plain.sources == quoted.sources == {"gpu.name": "its label"}


def test_the_case_1_database_is_looked_up_by_both_sizes(tmp_path):
    rows = "{ preceding = 1, size = 2, bandwidth = 90e9 }, { preceding = 2, size = 2, bandwidth = 70e9 }"
    cluster = load(tmp_path, f"in_node_bandwidths = [{rows}]\n" + SMALLEST)
    assert cluster.measured_in_node_bandwidth(1, 2) == 90e9
    assert cluster.measured_in_node_bandwidth(2, 2) == 70e9
    assert cluster.measured_in_node_bandwidth(1, 4) is None


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"])
def test_a_gpu_on_pci_express_5_has_a_default_host_link_which_any_figure_of_the_file_replaces(tmp_path, name):
    text = SMALLEST.replace("NVIDIA H200", name)
    cluster = load(tmp_path, text)
    assert cluster.host_link == HostLink()  # what is saved does not get the default
    assert cluster.host_link_or_default == HostLink(55e9, 55e9, 101e9)
    assert "host to GPU                      55 GB/s, default of this kind of GPU" in cluster.describe()
    narrow = load(tmp_path, text + "[host_link]\nto_device_bandwidth = 12e9\n")
    assert narrow.host_link_or_default == narrow.host_link == HostLink(to_device_bandwidth=12e9)
    assert "host to GPU                      12 GB/s\n" in narrow.describe()
    assert "default" not in narrow.describe()


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA H200 NVL", "NVIDIA GH200 120GB"])
def test_other_gpus_have_no_default_host_link(tmp_path, name):
    assert load(tmp_path, SMALLEST.replace("NVIDIA H200", name)).host_link_or_default == HostLink()


# What is refused.


@pytest.mark.parametrize("key", ["name", "gpus_per_node", "gpu.name"])
def test_a_missing_key_is_named(tmp_path, key):
    line = {"name": 'name = "mine"\n', "gpus_per_node": "gpus_per_node = 4\n", "gpu.name": 'name = "NVIDIA H200"\n'}
    assert f"{key} is missing; it must be" in refusal(tmp_path, SMALLEST.replace(line[key], "", 1))


def test_a_missing_gpu_table_is_named(tmp_path):
    assert "gpu is missing; it must be a table" in refusal(tmp_path, SMALLEST.partition("[gpu]")[0])


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("node = 3\n" + SMALLEST, "node", "nodes"),
        (SMALLEST + "memroy = 80e9\n", "gpu.memroy", "memory"),
        (SMALLEST + "[gpu.peak_flops]\nbf61 = 1e12\n", "gpu.peak_flops.bf61", "bf16"),
        (SMALLEST + "[between_node]\nbandwidth = 1e9\n", "between_node", "between_nodes"),
        (SMALLEST + "[in_node]\nband_width = 1e9\n", "in_node.band_width", "bandwidth"),
        (
            "in_node_bandwidths = [{preceeding = 1, size = 2, bandwidth = 1e9}]\n" + SMALLEST,
            "in_node_bandwidths[0].preceeding",
            "preceding",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(tmp_path, text, unknown, nearest):
    message = refusal(tmp_path, text)
    assert f"unknown key {unknown!r}; did you mean {nearest!r}?" in message


def test_an_unknown_key_like_no_other_lists_the_known_ones(tmp_path):
    message = refusal(tmp_path, SMALLEST + "[between_nodes]\nqqq = 1\n")
    assert "unknown key 'between_nodes.qqq'; Known here: bandwidth, latency" in message


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("0", "leave the key out if the figure is not known"),
        ("-25e9", "2.5e+10 would do"),
        ("nan", "leave the key out"),
        ("inf", "leave the key out"),
        ("-inf", "leave the key out"),
        ("1e400", "leave the key out"),
        ("1e25", "leave the key out"),
        ("0x" + "f" * 4000, "leave the key out"),
        ("true", "leave the key out"),
        ('"25 GB/s"', "write it as a bare number"),
        ("[25e9]", "leave the key out"),
        ("2026-11-21", "leave the key out"),
    ],
)
def test_a_bandwidth_that_is_no_positive_number_is_refused(tmp_path, value, remedy):
    message = refusal(tmp_path, SMALLEST + f"[between_nodes]\nbandwidth = {value}\n")
    assert re.search(r": between_nodes\.bandwidth = .*: must be a finite number greater than 0", message)
    assert remedy in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("0", "leave the key out"),
        ("-4", "4 would do"),
        ("3.6", "4 would do"),
        ("4.0", "4 would do"),
        ("nan", ""),
        ("true", ""),
        ('"4"', "bare number"),
        ("10000000000", ""),
    ],
)
def test_a_count_that_is_no_positive_whole_number_is_refused(tmp_path, value, remedy):
    message = refusal(tmp_path, f"nodes = {value}\n" + SMALLEST)
    assert ": nodes = " in message
    assert "must be a whole number from 1" in message
    assert remedy in message


@pytest.mark.parametrize("value", ['""', "3", '"a\\nb"', '"\\u001b[31m"', '"' + "x" * 1001 + '"', "[]"])
def test_a_name_that_is_no_printable_text_is_refused(tmp_path, value):
    message = refusal(tmp_path, SMALLEST.replace('"mine"', value))
    assert re.search(r": name = .*: must be printable text", message)
    assert "\x1b" not in message


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('gpu = "H200"\nname = "a"\ngpus_per_node = 1\n', "gpu = 'H200': must be a table"),
        ("in_node = 3\n" + SMALLEST, "in_node = 3: must be a table"),
        ("in_node_bandwidths = 3\n" + SMALLEST, "in_node_bandwidths = 3: must be a list"),
        ("in_node_bandwidths = [3]\n" + SMALLEST, "in_node_bandwidths = [3]: must be a list"),
        ("sources = 3\n" + SMALLEST, "sources = 3: must be a table of texts"),
        ("sources = {nodes = 3}\n" + SMALLEST, "sources.nodes = 3: must be printable text"),
    ],
)
def test_a_value_of_the_wrong_shape_is_refused(tmp_path, text, key):
    assert key in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ("{preceding = 1, bandwidth = 1e9}", "in_node_bandwidths[0].size is missing"),
        ("{preceding = 0, size = 2, bandwidth = 1e9}", "in_node_bandwidths[0].preceding = 0"),
        ("{preceding = 1, size = 1, bandwidth = 1e9}", "in_node_bandwidths[0].size = 1: must be 2 or more"),
        ("{preceding = 1, size = 2, bandwidth = -1.0}", "in_node_bandwidths[0].bandwidth = -1.0"),
        ("{preceding = 2, size = 4, bandwidth = 1e9}", "more than the node's 4 GPUs; size 2 would do"),
        (
            "{preceding = 1, size = 2, bandwidth = 1e9}, {preceding = 1, size = 2, bandwidth = 2e9}",
            "in_node_bandwidths[1]: preceding 1, size 2 is there twice",
        ),
    ],
)
def test_a_row_of_the_case_1_database_must_fit_the_node(tmp_path, rows, complaint):
    assert complaint in refusal(tmp_path, f"in_node_bandwidths = [{rows}]\n" + SMALLEST)


def test_one_pair_of_gpus_is_never_faster_than_all_links_of_one(tmp_path):
    message = refusal(tmp_path, SMALLEST + "[in_node]\nbandwidth = 50e9\npair_bandwidth = 100e9\n")
    assert "in_node.pair_bandwidth = 1e+11: must be at most bandwidth; 5e+10 would do" in message


def test_both_directions_of_a_host_link_are_never_faster_at_once_than_alone(tmp_path):
    link = "[host_link]\nto_device_bandwidth = 20e9\nto_host_bandwidth = 30e9\nduplex_bandwidth = 51e9\n"
    message = refusal(tmp_path, SMALLEST + link)
    assert "host_link.duplex_bandwidth = 5.1e+10: must be at most both directions' bandwidths" in message
    assert "5e+10 would do" in message


def test_a_source_of_no_figure_is_refused_with_the_nearest(tmp_path):
    message = refusal(tmp_path, SMALLEST + '[sources]\ngpu.memmory = "x"\n')
    assert "unknown figure 'gpu.memmory'; did you mean 'gpu.memory'?" in message


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(tmp_path):
    message = refusal(tmp_path, SMALLEST + "#\n" * 128 * 1024)
    assert "larger than 262144 bytes" in message


def test_a_table_with_too_many_rows_is_refused(tmp_path):
    assert "at most 4096 tables" in refusal(tmp_path, "in_node_bandwidths = [" + "{},\n" * 4097 + "]\n" + SMALLEST)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("name = ", "is not valid TOML"),
        ("topology: [ Ring ]", "is --topology of `stretto simulate`"),
        ("name = 'a'\nname = 'b'", "is not valid TOML"),
        ("nodes = " + "9" * 4300 + "\n", "line 1 has 4308 characters; 4096 is the most"),
        ("a." * 60_000 + "b = 1", "line 1 has"),
        ("name = " + "[\n" * 100_000, "nested too deeply"),
        (b"name = '\xff'", "is not UTF-8 text (byte 8)"),
        (b"\x00\x01\x02", "is not valid TOML"),
        ("", "name is missing"),
    ],
)
def test_a_file_that_is_no_toml_is_refused(tmp_path, text, complaint):
    assert complaint in refusal(tmp_path, text)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent.toml", Path("/dev/zero")):
        with pytest.raises(ValueError, match="there is no such file"):
            Cluster.load(path)


def test_loading_a_presets_name_points_to_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r'Cluster\.preset\("alps"\)'):
        Cluster.load("alps")


# From python.


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: NetworkLink(bandwidth=-1.0), "NetworkLink.bandwidth = -1.0: must be a finite number"),
        (lambda: FlopRates(bf16=float("nan")), "FlopRates.bf16 = nan"),
        (lambda: GPU(name=""), "GPU.name = ''"),
        (lambda: Cluster(name="a", gpus_per_node=0, gpu=GPU(name="b")), "Cluster.gpus_per_node = 0"),
        (lambda: InNodeBandwidth(1, 2, 0.0), "InNodeBandwidth.bandwidth = 0.0"),
    ],
)
def test_values_given_from_python_keep_the_same_rules(make, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        make()


def test_require_gives_a_known_figure_and_names_an_unknown_one():
    cluster = Cluster.preset("perlmutter")
    assert cluster.require("between_nodes.bandwidth") == 25e9
    assert cluster.require("gpu.peak_flops.bf16") == 312e12
    with pytest.raises(ValueError, match=r"cluster 'perlmutter' does not say between_nodes\.latency"):
        cluster.require("between_nodes.latency")
    with pytest.raises(ValueError, match=r"did you mean 'between_nodes\.bandwidth'"):
        cluster.require("between_nodes.bandwith")
    with pytest.raises(ValueError, match="gpu of a cluster is not one number"):
        cluster.require("gpu")


def test_describe_gives_figures_with_units_and_names_unknown_ones():
    lines = Cluster.preset("perlmutter").describe().splitlines()
    table = {" ".join(line.split()) for line in lines}
    assert "nodes 1536 (6144 GPUs in all)" in table
    assert "memory a GPU 40 GB" in table
    assert "peak, measured bf16 280 TFLOP/s" in table
    assert "in a node, one GPU to all 300 GB/s a direction" in table
    assert "between nodes, a node 100 GB/s a direction" in table
    assert "between nodes, latency unknown" in table
    assert any("Slingshot 11" in line for line in lines)


def test_describe_writes_small_latencies_in_their_unit():
    assert "700 ns" in Cluster.preset("mi210-ib").describe()
