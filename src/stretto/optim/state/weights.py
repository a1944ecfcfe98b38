# SPDX-License-Identifier: Apache-2.0
"""The weights that are computed with, as a store updates them: bucket by bucket."""

from collections.abc import Collection

import torch
from torch import Tensor

from stretto.optim.state.layout import Bucket, StateLayout


class FlatWeights:
    """Weights in one flat tensor, of which the model's parameters are views; in the order of a `StateLayout`.

    Buckets are opened, updated and closed in a step. Other storages update them in buffers; `number` is that of a set
    of buffers, of which a residence that has several buckets in flight has several.
    """

    def __init__(self, layout: StateLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self._places = dtype, layout.places
        self.flat = torch.zeros(layout.size, dtype=dtype, device=device)

    def prepare(self, rows: int, sets: int, *, reads: bool) -> None:
        """Allocate buffers for `sets` buckets of `rows` numbers. reads: an update needs the weights as they are."""

    def begin(self, present: Collection[int], skip: Tensor) -> None:
        """Begin updates of these parameters. skip: int32 [1]; while it is not 0, an update writes nothing."""

    def buffer(self, bucket: Bucket, number: int = 0) -> Tensor:
        """Where the weights of a bucket are updated: [bucket.size]."""
        return self.flat[bucket.start : bucket.stop]

    def open(self, bucket: Bucket, number: int = 0) -> Tensor:
        """The buffer with the weights as they are, if updates read them; ready on the current stream."""
        return self.buffer(bucket, number)

    def close(self, bucket: Bucket, number: int = 0) -> None:
        """The buffer holds the updated weights, in the order of the current stream."""

    def read(self, index: int) -> Tensor:
        """The weights of a parameter, as the store keeps its state: flat."""
        place = self._places[index]
        return self.flat[place.start : place.stop]

    def write(self, index: int, weight: Tensor) -> None:
        """Set them."""
        self.read(index).copy_(weight)

    def take_gradient(self, index: int, gradient: Tensor, out: Tensor, *, adds: bool) -> None:
        """Write a parameter's gradient to `out`, flat, as the store keeps it; adds: add it."""
        out = out.view(gradient.shape)
        if adds:
            out.add_(gradient)
        else:
            out.copy_(gradient)
