# SPDX-License-Identifier: Apache-2.0
"""The ablations: compositions compute what collectives do; tables compare what there is, and leave out what is not."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.collectives.executor.cuda.emulated import COMPILER, make_workspaces

from lab.collectives.ablations import (
    BENCH,
    AblationsSetting,
    compile_for,
    composition_row,
    fifo_bytes,
    find_nodes,
    pipelining_row,
    tabulate,
)
from lab.collectives.composed import RingAllReduce, TwoShotAllReduce, TwoStepAllToAll
from stretto.collectives.executor.cuda.interpreter import InterpretedSchedule
from stretto.collectives.executor.cuda.variant import Variant
from stretto.collectives.verifier import verify


def compose():
    rank, world = dist.get_rank(), dist.get_world_size()
    cpu = torch.device("cpu")
    for part in (1, 5):
        count = part * world
        input = torch.arange(count, dtype=torch.float32) + 100 * rank
        total = sum(torch.arange(count, dtype=torch.float32) + 100 * other for other in range(world))
        for make in (RingAllReduce, TwoShotAllReduce):
            composed, output, given = make(count, torch.float32, cpu), torch.full((count,), -1.0), input.clone()
            for _ in range(2):  # its buffers are used again
                composed(given, output)
                assert torch.equal(output, total), (make, output)
            assert torch.equal(given, input)
        exchanged = torch.empty(count)
        dist.all_to_all_single(exchanged, input)
        for nodes in (nodes for nodes in range(1, world + 1) if world % nodes == 0):
            composed, output = TwoStepAllToAll(count, torch.float32, cpu, nodes), torch.full((count,), -1.0)
            for _ in range(2):
                composed(input, output)
                assert torch.equal(output, exchanged), (nodes, output)
    with pytest.raises(ValueError, match="elements do not divide among"):
        RingAllReduce(world + 1, torch.float32, cpu)
    with pytest.raises(ValueError, match="nodes do not divide"):
        TwoStepAllToAll(world, torch.float32, cpu, world + 1)


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_compositions_compute_what_the_collectives_do(ranks, count):
    ranks(count).run(compose)


def measured(ablation, algorithm, mode, size, **microseconds):
    names = {name.replace("_", " "): value for name, value in microseconds.items()}
    return {"ablation": ablation, "algorithm": algorithm, "mode": mode, "bytes": size, "microseconds": names}


def test_pipelining_is_compared_with_the_best_tile():
    row = pipelining_row(measured("pipelining", "ring", "graph", 1 << 20, whole=30.0, tile_16384=20.0, tile_65536=15.0))
    assert (row["best"], row["ratio"], row["size"]) == ("64 KB", 2.0, "1 MB")
    assert (row["whole"], row["tile 16384"]) == (30.0, 20.0)
    row = pipelining_row(measured("pipelining", "ring", "graph", 1024, whole=30.0))  # no chunk is larger than a tile
    assert (row["best"], row["ratio"]) == (None, None)
    assert pipelining_row(measured("pipelining", "ring", "graph", 1024))["ratio"] is None


def test_a_composition_is_compared_with_the_better_kernel():
    row = composition_row(measured("composition", "ring", "eager", 1024, composed=30.0, kernel=20.0, interpreted=10.0))
    assert row["ratio"] == 3.0
    row = composition_row(measured("composition", "ring", "graph", 1024, kernel=20.0, library=5.0))
    assert (row["ratio"], row["kernel"]) == (None, 20.0)  # the composition could not be captured
    assert composition_row(measured("composition", "ring", "graph", 1024, composed=30.0))["ratio"] is None


@pytest.mark.long
def test_results_are_written_with_tables_and_pictures(tmp_path):
    rows = [
        measured("pipelining", "ring-all-reduce", "graph", 1 << 20, whole=30.0, tile_16384=20.0),
        measured("pipelining", "ring-all-reduce", "graph", 1 << 22, whole=90.0, tile_16384=40.0, tile_65536=45.0),
        measured("pipelining", "hierarchical-all-reduce", "eager", 1 << 20, whole=30.0, tile_16384=31.0),
        measured("composition", "ring-all-reduce", "graph", 1 << 20, kernel=10.0),
        measured("composition", "ring-all-reduce", "eager", 1 << 20, composed=20.0, kernel=10.0, library=9.0),
    ]
    bench = replace(BENCH, run=lambda setting: tabulate(rows, setting))
    bench(AblationsSetting(smallest=1 << 20, largest=1 << 22, tiles=(16384, 65536), ranks=4), tmp_path)
    for name, count in {"pipelining": 3, "composition": 2}.items():
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert len(result["rows"]) == count
        assert (result["ranks"], result["protocol"], result["instances"]) == (4, "LL128", 16)
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
    table = (tmp_path / "pipelining.md").read_text().splitlines()
    assert table[2].endswith(
        "| one tile (us) | tiles of 16 KB (us) | tiles of 64 KB (us) | best tile | one tile / best |"
    )
    assert table[5] == "| ring-all-reduce | graph | 4 MB | 90.0 | 40.0 | 45.0 | 16 KB | 2.25 |"
    assert "| ring-all-reduce | graph | 1 MB | - | 10.0 | - | - |" in (tmp_path / "composition.md").read_text()
    bench(AblationsSetting(smallest=1 << 20, largest=1 << 20, ablations=("composition",), ranks=4), tmp_path / "only")
    assert (tmp_path / "only" / "composition.json").exists()
    assert not (tmp_path / "only" / "pipelining.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modes": ("fast",)}, "there is no mode 'fast': there are graph, eager"),
        ({"ablations": ("heart",)}, "there is no ablation 'heart'"),
        ({"protocol": "LL64"}, "there is no protocol 'LL64'"),
        ({"tiles": (100,)}, "tiles of at least 480 bytes"),
        ({"smallest": 1024, "largest": 512}, "sizes go from 1024 .at least 64. to 512"),
        ({"instances": 0}, "at least 1 instance"),
    ],
)
def test_missing_inputs_raise(options, words):
    with pytest.raises(ValueError, match=words):
        AblationsSetting(**options)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_its_schedules_are_verified(ranks):
    assert ranks % find_nodes(ranks) == 0
    for name in ("ring-all-reduce", "hierarchical-all-reduce", "two-shot-all-reduce", "two-step-all-to-all"):
        for instances in (1, 4):
            assert verify(compile_for(name, ranks, instances)).ok


@pytest.mark.exhaustive
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler to run the kernels' source with")
@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
def test_a_whole_chunk_fits_into_the_fifos_that_are_made_for_it(protocol, tmp_path):
    for name in ("ring-all-reduce", "hierarchical-all-reduce"):
        schedule = compile_for(name, 4, 4)
        for size in (1 << 12, 3_000_000, 1 << 24):
            room = fifo_bytes(schedule, size, protocol)
            workspace = make_workspaces(4, tmp_path, bytes_each=room)[0]
            kernel = InterpretedSchedule(
                schedule, workspace, Variant("bfloat16", "sum", protocol), in_place=False, tile_bytes=size
            )
            assert kernel._prepare(size // 2, size // 2).parameters  # ValueError where it does not fit
