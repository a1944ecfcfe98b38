# SPDX-License-Identifier: Apache-2.0
"""`python -m lab few-tokens`: its runs and predictions, and the kernel of its messages."""

import pytest
import torch
import triton.language as tl
from tests.tiles.machine_code import compile_to_ptx, make_channel

from lab.cases import measure_rows
from lab.experts.few_tokens import BENCH, FewTokensSetting, measure, send_messages


def test_all_runs_but_the_kernels_run_on_cpus(ranks):
    cases = FewTokensSetting(tokens=(3,)).cases()
    (row,) = ranks(2).run(measure_rows, 2, None, cases, [None], measure, len)[0]
    assert row.get("failed") is None
    assert all(row[name] > 0 for name in ("kilobytes", "nccl", "dispatch", "combine", "stretto", "fp8"))


def test_predictions_are_two_messages_and_looks_at_what_arrives(tmp_path):
    one, many = BENCH(FewTokensSetting(tokens=(1, 128), ranks=4, cluster="dgx-h200"), tmp_path)["rows"]
    assert 6 < one["messages"] < one["predicted"] < many["messages"]
    assert one["to_messages"] < 1.3


@pytest.mark.long
def test_messages_are_packets_stored_four_at_a_time():
    words = torch.zeros(64, dtype=torch.int32)
    channel = make_channel("p2p")._replace(begun_in_kernel=tl.constexpr(True))
    lines = compile_to_ptx(send_messages, (channel, words, words, words, 1024, 512), num_warps=4)
    assert sum("ld.volatile.global.v4.b32" in line for line in lines) == 2
    assert any("st.global.v2.b64" in line for line in lines)


def test_more_tokens_than_the_operators_take_are_refused():
    with pytest.raises(ValueError, match="129 tokens of a rank: 1 to 128 will do"):
        FewTokensSetting(tokens=(129,))
