# SPDX-License-Identifier: Apache-2.0
"""What the kernel of routed schedules is compiled to, without a GPU."""

import re

import pytest
import torch
from tests.ops.joint.test_machine_code import make_puts
from tests.tiles.machine_code import ACQUIRE, RELEASE, WORLD, compile_to_ptx, find, find_spills, make_channel

from stretto.collectives.algorithms import find as find_algorithm
from stretto.collectives.joint.routed import route
from stretto.ops.joint.routed import GivenRows, fix_sizes, make_tables, move_rows

ROWS, BLOCK = 32, 1024


def move_arguments(positions=True, puts=None):
    """Of a two-step all-to-all, as a dispatch launches it. puts: as between nodes."""
    routed = route(find_algorithm("two-step-all-to-all").compile(nodes=2, gpus=WORLD // 2))
    options = {} if puts is None else {"nodes": (0,) * WORLD, "movers": 16}
    tables = make_tables(routed, 0, 32 * WORLD, 32, 32, torch.device("cpu"), **options)
    half, words = torch.zeros(1 << 16, dtype=torch.bfloat16), torch.zeros(1 << 10, dtype=torch.int32)
    given = GivenRows(half, torch.zeros(64, dtype=torch.int64) if positions else None, 4096)
    sizes = 0, False, tables.pieces, tables.parts, tables.channels, tables.longest, ROWS, BLOCK, 128
    signals = tables.sources, tables.destinations, tables.arrivals
    hops, rows = tables.hops._replace(table=words), (8192, 8192, 4096)
    return make_channel("p2p"), puts, *signals, hops, given, half.clone(), fix_sizes(*sizes), *rows


@pytest.mark.long
def test_slices_are_posted_after_their_stores_and_released_after_their_loads(tmp_path):
    """Each descriptor's release follows a barrier that follows all stores, and all loads, of the slice."""
    lines = compile_to_ptx(move_rows, move_arguments(puts=make_puts()), num_warps=16)
    text = "\n".join(lines)
    events = re.findall(r"bar\.sync|(?:ld|st)\.global\S*v4\.b32|atom\S*release\S*exch\.b64", text)
    posts = [at for at, event in enumerate(events) if "release" in event]
    assert len(posts) == 2  # a slice and a credit
    assert all(events[at - 1] == "bar.sync" for at in posts), events
    assert find_spills(lines, tmp_path) == 0


@pytest.mark.parametrize("positions", [True, False])
def test_rows_are_loaded_after_their_wait_and_stored_before_their_signal_in_wide_pieces(positions, tmp_path):
    """Also rows in their order, however short the parts are: they are moved as one piece."""
    lines = compile_to_ptx(move_rows, move_arguments(positions), num_warps=16)
    find(lines, ACQUIRE)
    assert any(re.search(r"ld\.global\.(.*\.)?v4\.b32", line) for line in lines)
    assert any(re.search(r"st\.global\.(.*\.)?v4\.b32", line) for line in lines)
    releases = [number for number, line in enumerate(lines) if re.search(RELEASE + r"\.add", line)]
    assert releases
    for release in releases:
        before = [line for line in lines[:release] if re.search(r"st\.global|bar\.sync", line)]
        assert before[-1].startswith("bar.sync"), before[-3:]
    assert find_spills(lines, tmp_path) == 0
