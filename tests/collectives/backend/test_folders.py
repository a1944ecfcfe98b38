# SPDX-License-Identifier: Apache-2.0
"""Folders of schedules are installed before a group's first collective, as files for MSCCL are."""

import os

import pytest
import torch
import torch.distributed as dist

from stretto.collectives import AllReduce, call_counts, chunk, compile_program, install_folder, trace
from stretto.collectives.algorithms import find
from stretto.collectives.xml import write_schedule


def run_a_folder(folder):
    """A folder of files is installed before a group's first collective: those for its ranks, each for its sizes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["STRETTO_SCHEDULES"] = str(folder)
    try:
        group, part = dist.new_group(backend="stretto"), dist.new_group([0], backend="stretto")
        dist.barrier(group)
        for elements in (100, 101):
            tensor = torch.full((elements,), float(rank))
            dist.all_reduce(tensor, group=group)
            assert (tensor == size * (size - 1) / 2).all()
        dist.broadcast(torch.ones(3), 0, group)
        ran = {key: number for key, number in call_counts(group).items() if key[0] == "allreduce"}
        assert ran == {
            ("allreduce", "schedule one-shot-all-reduce"): 1,
            ("allreduce", "schedule two-shot-all-reduce"): 1,
        }
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=part)
            assert call_counts(part) == {("allreduce", "gloo"): 1}
        os.environ["STRETTO_SCHEDULES"] = str(folder / "none")
        group = dist.new_group(backend="stretto")
        for _ in range(2):
            with pytest.raises(ValueError, match=r"none is no folder with schedules: it has no file \*.xml"):
                dist.all_reduce(torch.ones(3), group=group)
    finally:
        del os.environ["STRETTO_SCHEDULES"]


def test_a_folder_of_schedules_is_installed_by_a_variable_and_chosen_by_size(ranks, tmp_path):
    for name, size, limits in (
        ("one-shot-all-reduce", 2, {"max_bytes": 400}),
        ("two-shot-all-reduce", 2, {"min_bytes": 401}),
        ("ring-all-reduce", 3, {}),
    ):
        write_schedule(find(name).compile(ranks=size, **limits), tmp_path / f"{name}.xml")
    (tmp_path / "damaged.xml").write_text('<algo name="for others" ngpus="16" proto="of tomorrow"><gpu')
    ranks(2).run(run_a_folder, tmp_path)


def install_folder_that_differs_by_rank(folder):
    """Each rank begins with its own chunk, as in files that RCCL ships: their sums may differ in the last bits."""
    group = dist.new_group(backend="stretto")
    with pytest.raises(ValueError, match="replica consistency"):
        install_folder(folder, group)
    install_folder(folder, group, waive=["replica_consistency"])
    tensor = torch.arange(5.0) + dist.get_rank()
    dist.all_reduce(tensor, group=group)
    assert call_counts(group) == {("allreduce", "schedule own first"): 1}
    assert tensor.tolist() == [3.0, 6.0, 9.0, 12.0, 15.0]


def test_a_folder_is_installed_with_checks_waived(ranks, tmp_path):
    with trace(AllReduce(3, 1)) as program:
        for rank in range(3):
            for place, peer in enumerate(peer for peer in range(3) if peer != rank):
                chunk(peer, "in", 0).copy(rank, "scratch", place)
        for rank in range(3):
            for place in range(2):
                chunk(rank, "in", 0).reduce(chunk(rank, "scratch", place))
    write_schedule(compile_program(program.program, name="own first"), tmp_path / "own-first.xml")
    ranks(3).run(install_folder_that_differs_by_rank, tmp_path)
