# SPDX-License-Identifier: Apache-2.0
"""The picture of a schedule: what it shows and what it refuses."""

import pytest

from stretto.collectives.algorithms import one_shot_all_reduce, ring_all_reduce
from stretto.report.schedule import plot_schedule
from stretto.report.schedule_layout import MAX_ROWS


def texts(file):
    return file.read_text()


@pytest.mark.long
def test_every_thread_block_is_a_named_row_and_every_kind_of_step_is_explained(tmp_path):
    file = tmp_path / "ring.svg"
    plot_schedule(ring_all_reduce.compile(ranks=3), file)
    # matplotlib writes each text into a comment beside its glyphs.
    picture = texts(file)
    for rank in range(3):
        assert f"rank {rank}, block 0 ({(rank - 1) % 3}→·→{(rank + 1) % 3}, channel 0)" in picture
    for name in ("s: send", "r: receive", "rcs: receive, copy, send", "rrs: receive, reduce, send"):
        assert f"<!-- {name} -->" in picture
    assert "ring-all-reduce: allreduce, 3 ranks, protocol Simple" in picture


def test_only_the_ranks_that_are_asked_for_are_shown(tmp_path):
    file = tmp_path / "ring.svg"
    plot_schedule(ring_all_reduce.compile(ranks=5), file, range(1, 3))
    picture = texts(file)
    assert "rank 1, block 0" in picture
    assert "rank 2, block 0" in picture
    assert "rank 0, block 0" not in picture
    assert "rank 3, block 0" not in picture


def test_timelines_that_cannot_be_drawn_raise(tmp_path):
    ring = ring_all_reduce.compile(ranks=3)
    with pytest.raises(ValueError, match=r"a picture must be a .png or .svg file, not 'x.pdf'"):
        plot_schedule(ring, tmp_path / "x.pdf")
    with pytest.raises(ValueError, match="the schedule has ranks 0 to 2"):
        plot_schedule(ring, tmp_path / "x.png", range(2, 4))
    with pytest.raises(ValueError, match=f"too many for a picture .at most {MAX_ROWS}"):
        plot_schedule(one_shot_all_reduce.compile(ranks=16), tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []
