# SPDX-License-Identifier: Apache-2.0
"""Samples for recommendation models: Criteo's click logs, and synthetic samples."""

from stretto.recommendation.data.batch import BatchPrefetcher, ClickBatch, ClickDataset
from stretto.recommendation.data.criteo import CriteoClicks
from stretto.recommendation.data.synthetic import SyntheticClicks

__all__ = ["BatchPrefetcher", "ClickBatch", "ClickDataset", "CriteoClicks", "SyntheticClicks"]
