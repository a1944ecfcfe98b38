# SPDX-License-Identifier: Apache-2.0
"""`python -m lab messages`, in small on the CPU: what is measured, and what is written."""

import json

import pytest

from lab import messages
from lab.messages import BENCH, LIBRARY, MessagesSetting
from stretto.parallel.pipeline.transports import TRANSPORTS


@pytest.mark.long
def test_every_transport_of_cpu_ranks_is_measured(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "run_ranks", lambda count, entry, *args, trains: ranks(count).run(entry, *args)[0])
    BENCH(MessagesSetting(sizes=(0.1, 1), repeats=1, rounds=1), tmp_path)
    result = json.loads((tmp_path / "messages.json").read_text())
    assert (tmp_path / "messages.png").exists()
    measured = {(row["part"], row["by"], row["megabytes"]) for row in result["rows"]}
    names = [("message", name) for name in (LIBRARY, "gloo", "shared memory")]
    assert measured == {(*name, size) for name in names for size in (0.1, 1)}
    assert all(row["milliseconds"] > 0 for row in result["rows"])
    assert {row["to_library"] for row in result["rows"] if row["by"] in (LIBRARY, "gloo")} > {1.0}
    assert result["chosen"] in TRANSPORTS
    assert any(note.startswith("symmetric memory: not measured") for note in result["notes"])


@pytest.mark.parametrize("given", [{"sizes": (0.0,)}, {"sizes": (1e6,)}])
def test_messages_that_cannot_be_are_refused(given):
    with pytest.raises(ValueError, match="must be more than 0"):
        MessagesSetting(**given)
