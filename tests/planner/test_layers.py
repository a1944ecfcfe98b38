# SPDX-License-Identifier: Apache-2.0
"""A block is a list of kinds of layers: another kind is planned for without a change elsewhere."""

from dataclasses import dataclass, fields
from functools import cached_property

import pytest

from stretto.axes import GridSizes
from stretto.cluster import Cluster
from stretto.planner import predict, read_architecture
from stretto.planner.architecture import Architecture
from stretto.planner.grids import why_impossible
from stretto.planner.layers import AttentionLayer, BlockLayer, Linear, MlpLayer, NormLayer

OPTIONS = {"batch": 8, "seq_len": 256, "micro_batch": 2}


@dataclass(frozen=True)
class Adapter(BlockLayer):
    """A kind that the planner does not know: one linear, and an activation of its own."""

    hidden: int
    width: int

    def linears(self):
        return (Linear("adapter", self.hidden, self.width, False, False, self.width),)

    def kept(self, grid, token_parts):
        return self.width / grid.x

    def element_wise(self, grid, token_parts):
        return 2 * self.width / grid.x, 3 * self.width / grid.x

    def widest(self, grid):
        return self.width / grid.x


class WithAdapter(Architecture):
    @cached_property
    def block(self):
        return (*super().block, Adapter(self.hidden, 4096))


def make() -> tuple[Architecture, Architecture]:
    plain = read_architecture("gpt2-small", 256)
    return plain, WithAdapter(**{each.name: getattr(plain, each.name) for each in fields(plain)})


def test_a_block_lists_norms_attention_and_mlp():
    plain, _ = make()
    assert [type(layer) for layer in plain.block] == [NormLayer, AttentionLayer, MlpLayer]
    assert [linear.name for linear in plain.linears] == ["qkv", "out", "up", "down"]


@pytest.mark.parametrize("grid", [{}, {"x": 2, "z": 2}, {"data": 2, "y": 2}], ids=str)
def test_another_kind_of_layer_costs_memory_computation_and_communication(grid):
    plain, more = make()
    cluster = Cluster.preset("perlmutter")
    before, after = (predict(model, cluster, grid=grid, **OPTIONS) for model in (plain, more))
    assert more.parameters - plain.parameters == plain.layers * plain.hidden * 4096
    for component in ("parameters", "optimizer", "activations"):
        assert after.memory[component] > before.memory[component]
    assert after.compute_time > before.compute_time
    if grid:
        assert after.communication["total"] > before.communication["total"]


def test_a_grid_that_cannot_cut_the_new_layer_is_refused():
    plain, more = make()
    grid = GridSizes(x=4, z=192)
    assert why_impossible(plain, grid, 192) is None
    assert why_impossible(more, grid, 192) == "z=192 does not divide the 1024 rows of adapter that a rank has"
