# SPDX-License-Identifier: Apache-2.0
"""Tests of recommendation models, too, keep what Stretto caches in a folder of their own."""

from tests.train.data.conftest import cache

__all__ = ["cache"]
