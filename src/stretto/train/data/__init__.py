# SPDX-License-Identifier: Apache-2.0
"""Training data: token streams in files, cut into sequences, and the order in which they are read."""

from stretto.train.data.dataset import SequenceDataset, TokenDataset
from stretto.train.data.demo import demo_corpus, write_demo_corpus
from stretto.train.data.mixture import MixedDataset, MixedSampler
from stretto.train.data.opening import open_dataset
from stretto.train.data.sampler import Sampler, rank_rows

__all__ = [
    "MixedDataset",
    "MixedSampler",
    "Sampler",
    "SequenceDataset",
    "TokenDataset",
    "demo_corpus",
    "open_dataset",
    "rank_rows",
    "write_demo_corpus",
]
