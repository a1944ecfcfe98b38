"""Samples of recommendation models: Criteo's click logs, and computed ones."""

from stretto.train.data.clicks.batch import ClickBatch, ClickDataset
from stretto.train.data.clicks.criteo import CriteoClicks
from stretto.train.data.clicks.synthetic import SyntheticClicks

__all__ = ["ClickBatch", "ClickDataset", "CriteoClicks", "SyntheticClicks"]
