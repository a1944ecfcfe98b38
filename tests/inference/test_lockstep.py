# SPDX-License-Identifier: Apache-2.0
"""A step that fails names the rank that has failed, on every rank; the lab kills and stops real ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conftest import Ranks

from lab import decoding_faults
from lab.decoding_faults import DecodingFaultsSetting
from stretto.inference import lockstep
from stretto.memory import PeerError
from stretto.parallel import Grid

MakeRanks = Callable[[int], Ranks]


def said(ranks: lockstep.Lockstep, error: RuntimeError) -> str:
    try:
        ranks.name_failed(error)
    except PeerError as named:
        return str(named)
    return "nothing"


def fail() -> list[str]:
    """What rank 0 hears when both ranks fail, when rank 1 is stuck, and when its process has ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep, "_ANSWER_SECONDS", 0.5)
        error, memory = RuntimeError("Connection closed by peer"), torch.OutOfMemoryError("no memory")
        found = []
        for case in ("both", "stuck", "ended"):
            ranks = lockstep.Lockstep(Grid(x=2))
            dist.barrier()
            is_first = dist.get_rank() == 0
            if case == "ended" and not is_first:
                ranks.close()
            dist.barrier()
            if is_first:
                found += [said(ranks, memory), said(ranks, error)]
            elif case == "both":
                found.append(said(ranks, error))
            dist.barrier()
            ranks.close()
        return found


def test_the_rank_that_has_failed_is_named_and_one_that_raised_is_not(ranks: MakeRanks) -> None:
    first, second = ranks(2).run(fail)
    begin, end = "a step of the engine has failed, as ", ": Connection closed by peer"
    assert second == ["nothing"]
    assert first == [
        *("nothing", "nothing"),
        *("nothing", f"{begin}rank 1 did not answer within 0.5 s more{end}"),
        *("nothing", f"{begin}rank 1 ended{end}"),
    ]


@pytest.mark.long
def test_a_killed_rank_is_named_and_no_wrong_token_is_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = DecodingFaultsSetting(ranks=2, timeout=20, tokens=24)
    outputs, _ = decoding_faults.run_job(tmp_path / "undisturbed", setting, None)
    expected = decoding_faults.read_tokens(outputs[0])
    assert [len(tokens) for tokens in expected.values()] == [24] * 3
    fault = decoding_faults.inject(tmp_path / "killed", setting, "kill", 1, 30, 0.5, expected)
    assert fault.passed, fault
    other = {request: [tokens[0] + 1, *tokens[1:]] for request, tokens in expected.items()}
    assert "other tokens" in decoding_faults.judge(tmp_path / "killed", setting, "kill", 1, 1.0, other)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_a_hundred_kills_and_stops_are_named_in_time() -> None:
    *_, last = decoding_faults.run_campaign(DecodingFaultsSetting())
    rows: Any = last.rows
    assert len(rows) == 100
    assert [row for row in rows if not row.passed] == []
