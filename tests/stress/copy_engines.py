# SPDX-License-Identifier: Apache-2.0
"""Stress configurations of copy engines' weight all-gather and gradient reduce-scatter."""

from collections.abc import Sequence
from functools import partial

import torch
from tests.stress.harness.catalogue import Check, Configuration, StressCase
from tests.stress.harness.team import Team
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from stretto.ops.embedding.move_rows import look_up_rows
from stretto.parallel.comm.collectives import Pending
from stretto.parallel.comm.copy_engine_gather import CopyEngineAllGather
from stretto.parallel.comm.copy_engine_scatter import MAX_STARTED, CopyEngineReduceScatter
from stretto.parallel.comm.weight_gathering import WeightToGather
from stretto.parallel.layout import ParameterLayout, Split, TensorOnGrid, version_of

FAMILY = "pushed weights"
ENTRIES = 6
_TABLE = 2  # of the weights
_BEGIN = "tiles.calls.begin_call"
_WAIT = "tiles.signals.wait_for_all"
_LOOK_UP = "ops.embedding.move_rows.copy_rows_of_ranks"
_SCATTER = ("parallel.comm.copy_engine_scatter.begin_scatter", "parallel.comm.copy_engine_scatter.sum_parts")


class CopyEngineGatherCase(StressCase):
    """Forward passes of a few weights, each gathered while the ones before it are used."""

    entries = ENTRIES

    def __init__(self, team: Team, *, dtype: torch.dtype | None) -> None:
        self._team = team
        rows, columns = (96, 64) if team.is_cuda else (8, 4)
        # The last rank has fewer rows of the last weight.
        self._rows = [rows, rows // 2, team.world * (rows // team.world) - 1]
        self._columns = columns
        self._gather = CopyEngineAllGather(team.group, "cuda" if team.is_cuda else "host")
        self._shards: list[Tensor] = []
        self._parameters: list[Tensor] = []
        mesh = DeviceMesh.from_group(team.group, team.device.type)
        for number, count in enumerate(self._rows):
            shard = self._own_rows(self._draw(0, number), count).clone()
            size = torch.Size((count, columns))
            parameter = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False, shape=size, stride=(columns, 1))
            parameter.__class__ = TensorOnGrid  # as `parallelize` leaves it
            parameter.parameter_layout = ParameterLayout((count, columns), (Split(0, "z"),))
            self._shards.append(shard)
            self._parameters.append(parameter)
            # The last one is a table, whose rows are looked up where they are.
            self._gather.register(number, WeightToGather(parameter, count, dtype, is_table=number == _TABLE))
        self._ids = torch.arange(self._rows[_TABLE], device=team.device).flip(0)
        self._wholes = [[self._draw(entry, number) for number in range(len(self._rows))] for entry in range(ENTRIES)]
        self._dtype = dtype or torch.float32

    def _draw(self, entry: int, number: int) -> Tensor:
        shape = (self._rows[number], self._columns)
        return self._team.integers(shape, entry, number, low=-100, high=100).float()

    def _own_rows(self, whole: Tensor, rows: int) -> Tensor:
        chunk = -(-rows // self._team.world)
        return whole[self._team.rank * chunk : (self._team.rank + 1) * chunk]

    def call(self, entry: int) -> Sequence[Check]:
        wholes = self._wholes[entry]
        for shard, whole, rows in zip(self._shards, wholes, self._rows, strict=True):
            shard.copy_(self._own_rows(whole, rows))
        with torch.enable_grad():
            self._gather.begin()
        checks = []
        for number, parameter in enumerate(self._parameters):
            version, whole = version_of(parameter), wholes[number].to(self._dtype)
            if number == _TABLE:
                parts = self._gather.find_parts(number, version)
                assert parts is not None, "a table of this pass is not there"
                found = look_up_rows(self._ids, parts.addresses, 0, len(whole), parts.own)
                checks.append(Check(found, whole[self._ids]))
                continue
            taken = self._gather.take(number, version, in_backward=False)
            assert taken is not None, "a weight of this pass was not pushed"
            checks.append(Check(taken.rows.clone(), whole))
        self._gather.end()
        return checks

    def poison(self) -> None:
        """Fill the workspaces with poison, but for the table's rows, which others may still read."""
        for place in self._gather._places.values():
            if place.addresses is None:
                place.whole.fill_(float("nan"))

    def check(self) -> None:
        if self._gather._channel is not None:
            self._gather._channel.check()


class CopyEngineScatterCase(StressCase):
    """Reduce-scatters of a few gradients, as many in flight as a ring of `parts` of the largest has room for."""

    entries = ENTRIES

    def __init__(self, team: Team, *, dtype: torch.dtype, result: torch.dtype, starts: int, parts: int) -> None:
        self._team, self._result = team, result
        rows, columns = (96, 64) if team.is_cuda else (8, 4)
        self._rows = [max(rows - 7 * number, 1) for number in range(starts)]
        part = -(-rows // team.world) * columns * dtype.itemsize
        ring = parts * (-(-part // 128) * 128)
        self._scatter = CopyEngineReduceScatter(team.group, part, ring, "cuda" if team.is_cuda else "host")
        self._gradients: list[list[Tensor]] = []
        self._expected: list[list[Tensor]] = []
        for entry in range(ENTRIES):
            every = [
                [team.integers((count, columns), entry, number, peer, low=-8, high=8) for peer in range(team.world)]
                for number, count in enumerate(self._rows)
            ]
            self._gradients.append([one[team.rank].to(dtype) for one in every])
            sums = [torch.stack(one).sum(0) for one in every]
            self._expected.append([self._own_rows(one).to(result) for one in sums])

    def _own_rows(self, whole: Tensor) -> Tensor:
        chunk = -(-whole.shape[0] // self._team.world)
        return whole[self._team.rank * chunk : (self._team.rank + 1) * chunk]

    def call(self, entry: int) -> Sequence[Check]:
        expected = self._expected[entry]
        pending: list[Pending] = []
        oldest = 0
        for gradient, right in zip(self._gradients[entry], expected, strict=True):
            while not self._scatter.takes(gradient):  # the ring is full
                pending[oldest].wait()
                oldest += 1
            pending.append(self._scatter.start(gradient, right.shape[0], self._result))
        return [Check(one.wait(), right) for one, right in zip(pending, expected, strict=True)]

    def poison(self) -> None:
        size = (self._team.world - 1) * self._scatter._ring
        self._scatter._channel.tensor((size,), torch.uint8).fill_(0xFF)

    def check(self) -> None:
        self._scatter._channel.check()


def list_configurations() -> list[Configuration]:
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        Configuration(
            "pushed/gather", FAMILY, (_BEGIN, _WAIT, _LOOK_UP), "weights of one pass, in their own dtype",
            partial(CopyEngineGatherCase, dtype=None),
        ),
        Configuration(
            "pushed/gather-bf16", FAMILY, (_BEGIN, _WAIT, _LOOK_UP), "weights that are cast to bf16",
            partial(CopyEngineGatherCase, dtype=bf16),
        ),
        Configuration(
            "pushed/scatter", FAMILY, _SCATTER, "one gradient at a time, fp32",
            partial(CopyEngineScatterCase, dtype=fp32, result=fp32, starts=1, parts=1),
        ),
        Configuration(
            "pushed/scatter-ring", FAMILY, _SCATTER, "more gradients than the ring has room for, bf16",
            partial(CopyEngineScatterCase, dtype=bf16, result=fp32, starts=MAX_STARTED, parts=3),
        ),
    ]  # fmt: skip
