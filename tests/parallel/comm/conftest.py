# SPDX-License-Identifier: Apache-2.0
"""Tests of what needs Triton, which is for Linux alone: elsewhere there is nothing here to test."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_copy_engines.py"]
