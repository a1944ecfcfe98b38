# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl, as a resumed run reads it."""

from pathlib import Path

import pytest

from stretto.train.observe.metrics import METRICS_FILE, MetricsLog, read_steps

LINES = [f'{{"step": {step}, "loss": 2.5, "tokens_per_second": 9}}\n'.encode() for step in (1, 2, 3)]


def write(folder: Path, *lines: bytes) -> Path:
    (folder / METRICS_FILE).write_bytes(b"".join(lines))
    return folder / METRICS_FILE


def test_a_resumed_run_keeps_the_lines_up_to_its_start_whatever_a_kill_has_cut_short(tmp_path: Path) -> None:
    file = write(tmp_path, *LINES, b'{"step": 4, "lo\xc3')
    with MetricsLog(tmp_path, 2):
        assert file.read_bytes() == b"".join(LINES[:2])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[]\n", "no number 'step'"),
        (b'{"step": "2"}\n', "no number 'step'"),
        (b'{"step": 2, "tokens_per_second": 1}\n', "no number 'loss'"),
        (b'{"step": 2, "l\xffoss": 1}\n', "damaged: .*utf-8"),
        (b"[" * 300_000 + b"\n", "damaged: .*recursion"),
        (b'{"step": 2, "lo\n', "damaged"),
    ],
)
def test_a_damaged_line_is_named_and_no_later_one_lost(tmp_path: Path, line: bytes, message: str) -> None:
    file = write(tmp_path, LINES[0], line, LINES[2])
    with pytest.raises(ValueError, match=rf"metrics\.jsonl: line 2 is .*{message}"):
        list(read_steps(file))
    with pytest.raises(ValueError, match="line 2"):
        MetricsLog(tmp_path, 3)
    assert file.read_bytes() == LINES[0] + line + LINES[2]
