# SPDX-License-Identifier: Apache-2.0
"""Files of bounded size."""

import gzip
import os
import sys
from pathlib import Path

import pytest

from stretto.cluster import read_bounded


def test_a_file_is_read_up_to_the_limit_and_refused_beyond_it(tmp_path):
    file = tmp_path / "small.txt"
    file.write_bytes(b"12345")
    assert read_bounded(file, 5, "a note") == b"12345"
    with pytest.raises(ValueError, match=r"small\.txt: is larger than 4 bytes, the most a note may have"):
        read_bounded(file, 4, "a note")


def test_limits_beyond_memory_cost_nothing(tmp_path):
    (tmp_path / "small.txt").write_bytes(b"12345")
    for limit in (2**50, 2**63, 10**20):
        assert read_bounded(tmp_path / "small.txt", limit, "a note") == b"12345"


def test_other_than_regular_files_raise_and_are_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_bounded(path, 5, "a note")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_file_that_claims_to_be_empty_and_is_not_is_bounded():
    with open("/proc/self/status", "rb") as status:
        content = status.read()
    assert os.stat("/proc/self/status").st_size == 0 < len(content)
    with pytest.raises(ValueError, match="is larger than 4 bytes"):
        read_bounded(Path("/proc/self/status"), 4, "a note")


def test_a_compressed_file_is_refused_by_what_it_is(tmp_path):
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=r"trace\.json\.gz: is compressed: unpack it with gunzip"):
        read_bounded(file, 100, "a trace")
