# SPDX-License-Identifier: Apache-2.0
"""Packed documents in plans: what is counted of them is what the operator computes, sends and holds."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stretto import ops
from stretto.axes import GridSizes
from stretto.models import GPTConfig
from stretto.ops.attention import exchange, list_chunks
from stretto.ops.attention.plan import Mask, measure_work
from stretto.parallel import Grid, count_collectives
from stretto.planner import plan, predict, read_architecture
from stretto.planner.communication import keys_numbers
from stretto.planner.documents import PILE, PackedDocuments, pack, read_lengths, read_packed
from stretto.planner.memory import exchanged_keys
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.train.config import load_config
from stretto.train.gpt.preflight import open_data, sample_documents

ROW = (0, 3, 40, 44, 45, 100, 128)
GPT = GPTConfig(layers=2, hidden=32, heads=4, kv_heads=2, vocab=64, max_seq_len=128)


def count_exchange():
    """(bytes that this rank sends forward, and in all; bytes of rows that come forward) of fp64 attention to ROW."""
    grid, rank, ranks, received = Grid(context=4), dist.get_rank(), 4, []
    q, k, v = (torch.randn(1, heads, 32, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.tensor(ROW)
    with count_collectives(grid) as counts, pytest.MonkeyPatch.context() as patch:
        wait = exchange.Arriving.wait
        patch.setattr(exchange.Arriving, "wait", lambda self: received.append(wait(self)) or received[-1])
        out = ops.all_gather_attention(q, k, v, causal=True, layout="balanced", documents=documents)
        forward, came = sum(call.bytes_sent for call in counts.calls), sum(each.numel() * 8 for each in received)
        out.sum().backward()
    assert sum(stop - start for start, stop in list_chunks("balanced", rank, ranks, 32, ROW)) == 32
    return forward, sum(call.bytes_sent for call in counts.calls), came


@pytest.mark.long
def test_a_plans_bytes_of_keys_are_those_that_the_operator_sends_and_holds(ranks):
    sent, both, came = map(max, zip(*ranks(4).run(count_exchange), strict=True))
    workload = StepWorkload(read_architecture(GPT, 128), 1, 128, PackedDocuments((ROW,)), dtype="fp64")
    kind = workload.model.kinds[0].model
    numbers = keys_numbers(kind, GridSizes(context=4), 32, workload.documents)
    assert numbers * 8 == max(sent, came)
    assert 2 * numbers * 8 < both <= 3 * numbers * 8  # keys again, and gradients, of which another rank sends most
    held, _ = exchanged_keys(workload, StepConfig(GridSizes(context=4), 1))
    assert held == came
    whole = StepWorkload(workload.model, 1, 128, PackedDocuments(((0, 128),)), dtype="fp64")
    assert keys_numbers(kind, GridSizes(context=4), 32, whole.documents) == keys_numbers(kind, GridSizes(context=4), 32)


def test_the_share_of_products_is_that_of_the_blocks_that_are_computed():
    (scores,) = measure_work("balanced", 1, 128, Mask(True, None, ROW)).scores
    assert PackedDocuments((ROW,)).share == pytest.approx(scores / (128 * 129 / 2))


def test_plans_know_documents(tmp_path):
    about = {"gpus": 4, "batch": 4, "seq_len": 65536, "context": "auto"}
    whole, packed = (plan("llama-3-8b", "dgx-h100", **about, documents=each) for each in (None, "pile"))
    assert packed[0].step_time < 0.7 * whole[0].step_time
    assert packed[0].documents["share"] < 0.3
    assert any("documents" in note for note in packed[0].notes)
    on_context = next(each for each in packed if each.grid.get("context") == 4 and each.is_possible)
    assert 1 <= on_context.documents["balance"] <= 1.05
    assert on_context.documents["busiest"] < 3
    assert "of whole rows' keys travel" in on_context.why
    json.dumps(on_context.as_dict())
    (tmp_path / "lengths").write_text("".join(f"{length} {count:.0f}\n" for length, count in ((100, 5), (4000, 1))))
    (tmp_path / "one").write_text("65536\n")
    grid = {"context": 4}
    times = [
        predict("llama-3-8b", "dgx-h100", grid=grid, batch=8, seq_len=65536, documents=each).step_time
        for each in (tmp_path / "lengths", [65536], tmp_path / "one", None)
    ]
    assert times[0] < times[1] == times[2] == pytest.approx(times[3], rel=1e-3)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no lengths"), ("12\n-3\n", "line 2"), ("0", "line 1"), ("1 2 3", "line 1"), ("1e9", "line 1")],
)
def test_what_is_no_file_of_lengths_is_refused(tmp_path, text, words):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_lengths(tmp_path / "lengths")
    with pytest.raises(ValueError, match="cannot be read"):
        read_lengths(tmp_path / "none")
    with pytest.raises(ValueError, match="is not a regular file"):  # it has no end
        read_lengths(Path("/dev/zero"))
    for wrong in ([], [0], 3, PackedDocuments((ROW,))):
        with pytest.raises(ValueError, match=r"documents|length"):
            read_packed(wrong, 64)


def test_a_configurations_own_packing_is_planned(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    lengths = [5, 1, 90, 33, 200, 7] * 20
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": "a" * each}) + "\n" for each in lengths))
    (tmp_path / "run.toml").write_text(
        f"out = 'run'\n[data]\npath = {str(tmp_path / 'data.jsonl')!r}\nseparator = 'end'\n[train]\nsteps = 1\n"
        "batch = 4\nseq_len = 64\n[model]\nlayers = 1\nhidden = 16\nheads = 2\n"
    )
    config = load_config(tmp_path / "run.toml")
    sample, dataset = sample_documents(config), open_data(config)
    counts = [int((dataset.read_places(row) == 0).sum()) for row in range(len(dataset))]
    assert sum(len(row) - 1 for row in sample.rows) / len(sample.rows) == pytest.approx(
        sum(counts) / len(counts), rel=0.2
    )
    alone = config.model_copy(update={"data": config.data.model_copy(update={"document_mask": False})})
    assert sample_documents(alone) is None
    assert pack(PILE, 4096).rows == pack(PILE, 4096).rows
