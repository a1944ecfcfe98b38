"""Bags of rows from single categories, as MLPerf's DLRM-v2 makes them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.train.data.clicks.batch import offsets_of
from stretto.train.data.hashing import key_of, mix


def make_bags(
    first: NDArray[np.int64], rows: Sequence[int], pooling: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices and offsets of bags whose first row is `first` [tables, samples]; the others follow from it.

    As in MLPerf's DLRM-v2, a category always brings the same other rows along, drawn evenly from its table.
    """
    samples = first.shape[1]
    parts = []
    for table, (count, size) in enumerate(zip(rows, pooling, strict=True)):
        bags = np.empty((samples, size), dtype=np.int64)
        bags[:, 0] = first[table]
        if size > 1:
            places = mix(np.arange(1, size, dtype=np.uint64) ^ key_of(table))
            bags[:, 1:] = mix(mix(first[table].astype(np.uint64))[:, None] ^ places) % np.uint64(count)
        parts.append(bags.reshape(-1))
    lengths = np.repeat(np.asarray(pooling, dtype=np.int64), samples)
    return np.concatenate(parts), offsets_of(lengths)
