# SPDX-License-Identifier: Apache-2.0
"""Every way to multiply gives the same product, and all ranks take the one whose slowest rank is fastest."""

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from stretto.models import GPT, GPTConfig
from stretto.parallel import Grid, parallelize
from stretto.parallel.layers import gemm_layout
from stretto.parallel.layers.gemm_layout import GEMM_LAYOUTS, PLAIN, GemmLayout, Product
from stretto.tuning import TuningStore
from tests.parallel.training import my_rows

SEED = 3
CONFIG = GPTConfig(layers=2, hidden=32, heads=4, vocab=61, max_seq_len=8, bias=False, norm="rmsnorm")


@pytest.mark.parametrize("way", GEMM_LAYOUTS, ids=str)
@pytest.mark.parametrize(("a_by_columns", "b_by_columns"), [*itertools.product([False, True], repeat=2)])
def test_every_way_gives_the_product_by_rows(way, a_by_columns, b_by_columns):
    torch.manual_seed(SEED)
    a = torch.randn(7, 5, dtype=torch.float64).t() if a_by_columns else torch.randn(5, 7, dtype=torch.float64)
    b = torch.randn(3, 7, dtype=torch.float64).t() if b_by_columns else torch.randn(7, 3, dtype=torch.float64)
    product = way.multiply(a, b)
    assert product.is_contiguous()
    expected = torch.einsum("mk,kn->mn", a, b)
    torch.testing.assert_close(product, expected)


def trained(rank_times: dict[int, list[float]] | None, cache: Path, *, tunes: bool) -> dict[str, Any]:
    """Two steps on data=2; `rank_times` are what each rank is made to measure for each way."""
    grid = Grid(data=2)
    torch.manual_seed(SEED)
    model = GPT(CONFIG)
    timed: list[Product] = []

    def measured(way: GemmLayout, product: Product, device: torch.device) -> float:
        timed.append(product)
        assert rank_times is not None
        return rank_times[dist.get_rank()][GEMM_LAYOUTS.index(way)]

    with (
        mock.patch.object(gemm_layout, "TuningStore", return_value=TuningStore(cache)),
        mock.patch.object(gemm_layout, "_time", measured),
    ):
        parallelize(model, grid, tune_matmuls=tunes)
        text = torch.randint(CONFIG.vocab, (4, 9))[my_rows(grid, 4)]
        for _ in range(2):
            model.zero_grad()
            model(text[:, :-1], text[:, 1:]).backward()
    gradients = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    return {"chosen": model.blocks[0].mlp.up.plan.matmuls.chosen(), "gradients": gradients, "timed": len(timed)}


def test_ranks_that_measure_differently_take_the_same_way(ranks, tmp_path):
    print(f"seed {SEED}")
    times = {0: [5.0, 1.0, 5.0, 2.0, 5.0, 5.0], 1: [5.0, 9.0, 5.0, 3.0, 5.0, 5.0]}
    plain = ranks(2).run(trained, None, tmp_path / "times.json", tunes=False)
    tuned = ranks(2).run(trained, times, tmp_path / "times.json", tunes=True)
    places = {(place, role) for place in range(4 * CONFIG.layers) for role in ("output", "input", "weight")}
    for with_it, without in zip(tuned, plain, strict=True):
        assert with_it["chosen"] == dict.fromkeys(places, GEMM_LAYOUTS[3])  # 3 s at worst
        assert without["chosen"] == {}
        for ours, theirs in zip(with_it["gradients"], without["gradients"], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_way_that_is_hardly_faster_is_not_taken(ranks, tmp_path):
    times = {key: [1.0, 0.99, 1.0, 1.0, 1.0, 1.0] for key in (0, 1)}
    for seen in ranks(2).run(trained, times, tmp_path / "times.json", tunes=True):
        assert set(seen["chosen"].values()) == {PLAIN}


def test_a_product_is_timed_once_and_found_on_disk_by_the_next_run(ranks, tmp_path):
    times = {key: [5.0, 1.0, 5.0, 5.0, 5.0, 5.0] for key in (0, 1)}
    first = ranks(2).run(trained, times, tmp_path / "times.json", tunes=True)
    # qkv, out, up and down, forward and for both gradients: all of different shapes, and the blocks alike.
    assert [seen["timed"] for seen in first] == [12 * len(GEMM_LAYOUTS)] * 2
    second = ranks(2).run(trained, None, tmp_path / "times.json", tunes=True)
    assert [seen["timed"] for seen in second] == [0, 0]
    assert [seen["chosen"] for seen in second] == [seen["chosen"] for seen in first]


def other_shapes(cache: Path) -> bool:
    """A batch of another size than the one that was timed."""
    grid = Grid(data=2)
    torch.manual_seed(SEED)
    model, plain = GPT(CONFIG), GPT(CONFIG)
    plain.load_state_dict(model.state_dict())
    times = [9.0, 1.0, 9.0, 9.0, 9.0, 9.0]
    with (
        mock.patch.object(gemm_layout, "TuningStore", return_value=TuningStore(cache)),
        mock.patch.object(gemm_layout, "_time", lambda way, *_: times[GEMM_LAYOUTS.index(way)]),
    ):
        parallelize(model, grid, tune_matmuls=True)
        tokens = torch.randint(CONFIG.vocab, (2, 9))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    with torch.no_grad():
        return torch.allclose(model(tokens[:1, :5]), plain(tokens[:1, :5]), atol=1e-6)


def test_other_shapes_than_the_first_steps_are_multiplied_plainly(ranks, tmp_path):
    assert ranks(2).run(other_shapes, tmp_path / "times.json") == [True, True]


def test_real_times_are_positive_and_kept(tmp_path):
    product = Product.of(torch.ones(8, 4), torch.ones(16, 4).t())
    seconds = gemm_layout._time(PLAIN, product, torch.device("cpu"))
    assert 0 < seconds < 1
    TuningStore(tmp_path / "times.json").add("cpu", {product.key: [seconds]})
    assert TuningStore(tmp_path / "times.json").read("cpu") == {product.key: (seconds,)}
