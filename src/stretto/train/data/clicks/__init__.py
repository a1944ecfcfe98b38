# SPDX-License-Identifier: Apache-2.0
"""Samples for recommendation models: Criteo's click logs, and synthetic samples."""

from stretto.train.data.clicks.batch import BatchPrefetcher, ClickBatch, ClickDataset
from stretto.train.data.clicks.criteo import CriteoClicks
from stretto.train.data.clicks.synthetic import SyntheticClicks

__all__ = ["BatchPrefetcher", "ClickBatch", "ClickDataset", "CriteoClicks", "SyntheticClicks"]
