# SPDX-License-Identifier: Apache-2.0
"""`plan --inference`: limits that can be added up by hand, what the cache holds, and the order of grids."""

import json
from typing import Any

import pytest

from stretto.cluster import Cluster
from stretto.planner.inference import ONE_SHOT_SECONDS, plan_inference

H200 = Cluster.preset("dgx-h200")
WEIGHTS = 8_030_261_248 - 128_256 * 4096  # of llama-3-8b, without the embedding, of which a row is read
CACHED = 2 * 32 * 8 * 128 * 2  # bytes of a token's keys and values


def plan(model: str = "llama-3-8b", cluster: Cluster = H200, **options: Any) -> Any:
    given: dict[str, Any] = {"prompts": [2048], "contexts": [1024], "batch": 1, "gpus": 1}
    return plan_inference(model, cluster, **(given | options))


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_decoding_steps_limit_is_its_bytes_over_the_memorys_rate(batch: int) -> None:
    (found,) = plan(batch=batch)
    norms = 65 * 4096
    expected = (2 * (WEIGHTS - norms) + batch * 1024 * CACHED) / 4.8e12
    assert found.token.limit == pytest.approx(expected, rel=1e-6)
    assert found.token.limit < found.token.compute < 1.5 * found.token.limit
    assert found.token.communication == 0
    assert found.tokens_per_gpu == pytest.approx(batch / found.token.total)


def test_a_prefills_limit_is_its_flops_over_the_peak_rate() -> None:
    (found,) = plan()
    products = 2 * 2048 * (WEIGHTS - 65 * 4096 - 128_256 * 4096) + 2 * 128_256 * 4096
    attention = 2 * 2048 * 2048 * 4096 * 32  # half of it is masked
    assert found.first_token.limit == pytest.approx((products + attention) / 989e12, rel=1e-6)


def test_lengths_that_are_equally_likely_are_averaged() -> None:
    short, long = (plan(prompts=[length], contexts=[length], batch=32)[0] for length in (512, 4096))
    (both,) = plan(prompts=[512, 4096], contexts=[512, 4096], batch=32)
    assert both.first_token.total == pytest.approx((short.first_token.total + long.first_token.total) / 2)
    assert both.token.total == pytest.approx((short.token.total + long.token.total) / 2)
    assert both.fits
    assert both.cache_tokens == short.cache_tokens


def test_the_cache_takes_what_weights_leave_and_x_shares_it() -> None:
    one, two, sixteen = (plan(gpus=gpus, contexts=[1])[0] for gpus in (1, 2, 8))
    assert 0.85 * (141e9 - 2 * 8.03e9) / CACHED < one.cache_tokens < (141e9 - 2 * 8.03e9) / CACHED
    assert 2.1 < two.cache_tokens / one.cache_tokens < 2.3
    assert sixteen.grid["x"] == 8
    assert sixteen.cache_tokens > 8 * one.cache_tokens
    assert not plan("llama-2-70b")[0].fits  # 138 GB of weights


def test_the_rank_with_most_requests_must_hold_them() -> None:
    room = plan()[0].cache_tokens
    length = int(room / 1.6)  # 3.2 requests' tokens on two ranks, but one of the ranks has two of three requests
    by_data = {each.grid["data"]: each for each in plan(batch=3, gpus=2, prompts=[2048], contexts=[length])}
    assert by_data[2].cache_tokens > 3 * length
    assert not by_data[2].fits
    assert by_data[1].fits


def test_the_fewest_gpus_that_answer_in_time_come_first() -> None:
    found = plan(batch=64, gpus=None, token_seconds=3e-3)
    assert {each.gpus for each in found} == {1, 2, 4, 8}
    good = [each for each in found if each.fits and each.meets]
    assert found[: len(good)] == good
    assert all(each.token.total <= 3e-3 for each in good)
    rates = [each.tokens_per_gpu for each in good]
    assert rates == sorted(rates, reverse=True)
    assert max(rates) == max(each.tokens_per_gpu for each in found if each.token.total <= 3e-3)


@pytest.mark.parametrize("x", [2, 8])
def test_each_block_sums_two_outputs_over_x_and_a_token_is_chosen_by_four_sums(x: int) -> None:
    (found,) = (each for each in plan(gpus=x) if each.grid["x"] == x)
    moved = (x - 1) * (64 * 2 * 4096 + 4 * 16) / 450e9
    assert found.token.communication == pytest.approx(68 * ONE_SHOT_SECONDS + moved, rel=0.02)


def test_sums_cost_more_over_pci_express_than_over_nvlink_and_experts_read_those_that_are_chosen() -> None:
    shares = {}
    for name in ("a100-pcie", "dgx-a100", "h800"):
        (found,) = [each for each in plan("llama-2-70b", Cluster.preset(name), gpus=8) if each.grid["x"] == 8]
        shares[name] = found.first_token.communication / found.first_token.total
    assert shares["a100-pcie"] > shares["h800"] > shares["dgx-a100"] > 0.05
    (one,), (many,) = (plan("qwen3-30b-a3b", batch=batch) for batch in (1, 512))
    assert one.token.limit < 0.2 * many.token.limit  # 8 of 128 experts
    expert = [each for each in plan("qwen3-30b-a3b", gpus=4, batch=64) if each.grid.get("expert") == 4]
    assert expert
    assert all(each.token.communication > 0 for each in expert)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-3-8b", {"batch": 0}, "batch is 0, but must be at least 1"),
        ("llama-3-8b", {"prompts": [0]}, "prompt is 0"),
        ("llama-3-8b", {"token_seconds": 0.0}, "tpot is 0.0 s, but must be more than 0"),
        ("llama-3-8b", {"token_seconds": float("nan")}, "tpot is nan s, but must be more than 0"),
        ("gpt2-xl", {}, "has 1024 positions, fewer than 2048 tokens; 1024 would do"),
        ("deepseek-v3", {}, "has latent attention"),
        ("llama-3-8b", {"gpus": 3}, "leaves some of data=3|does not divide"),
        ("lama-3-8b", {}, "did you mean 'llama-3-8b'"),
    ],
)
def test_what_cannot_be_planned_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(model, **options)


def test_json_has_seconds_and_numbers() -> None:
    (found,) = plan()
    read = json.loads(json.dumps(found.as_dict()))
    assert read["token_total"] == found.token.total
    assert read["grid"]["x"] == 1
    assert read["fits"] is True
