# SPDX-License-Identifier: Apache-2.0
"""The positions of a rank's parameters in the flat tensors of weights, gradients and optimizer state.

    segment:  parameters that are summed over the same ranks, with one weight decay; contiguous
    chunk:    `k` buckets of a segment, the unit of an all-reduce (Singh, section 3.3.3: k x bsize)
    bucket:   at most `bucket_size` numbers of a segment, the unit of a transfer and of an optimizer step (3.3.1)
    run:      neighbouring parameters of a bucket that have taken equally many steps

    | segment 0                                     | segment 1    |
    | chunk 0               | chunk 1               | chunk 2      |
    | bucket 0  | bucket 1  | bucket 2  | bucket 3  | bucket 4     |
    | weight a    | weight b        | weight c      | bias a | norm|

A bucket ends where it is full, within a parameter if need be, so that all transfers of a segment but the last have one
size.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stretto.execution import BUCKET_ALIGNMENT as ALIGNMENT


@dataclass(frozen=True)
class ParameterRange:
    """The position of a parameter's elements: `size` of them from `start` on, in this segment."""

    start: int
    size: int
    segment: int

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Bucket:
    """Numbers from `start` to `stop`, of this segment and this chunk. index: among all buckets."""

    index: int
    start: int
    stop: int
    segment: int
    chunk: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Neighbouring buckets of one segment, which one all-reduce sums. index: among all chunks."""

    index: int
    start: int
    stop: int
    segment: int
    buckets: tuple[Bucket, ...]
    parameters: tuple[int, ...]


@dataclass(frozen=True)
class StateLayout:
    """The places of all parameters, in the order in which they were given; and the buckets and chunks.

    size: all elements, including gaps between parameters.
    """

    places: tuple[ParameterRange, ...]
    buckets: tuple[Bucket, ...]
    chunks: tuple[Chunk, ...]
    size: int

    @classmethod
    def of(cls, sizes: Sequence[int], keys: Sequence[Hashable], *, bucket_size: int, coarsening: int) -> "StateLayout":
        """Lay out parameters of `sizes` numbers; those with equal keys become a segment.

        bucket_size: numbers, a multiple of ALIGNMENT. coarsening: buckets of a chunk.
        """
        numbers = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        places: dict[int, ParameterRange] = {}
        buckets: list[Bucket] = []
        chunks: list[Chunk] = []
        end = 0
        for key, segment in numbers.items():
            begin = end
            members = [index for index, own in enumerate(keys) if own == key]
            for index in members:
                places[index] = ParameterRange(end, sizes[index], segment)
                end = -(-(end + sizes[index]) // ALIGNMENT) * ALIGNMENT
            for first in range(begin, end, bucket_size * coarsening):
                last = min(first + bucket_size * coarsening, end)
                own = tuple(
                    Bucket(len(buckets) + number, start, min(start + bucket_size, last), segment, len(chunks))
                    for number, start in enumerate(range(first, last, bucket_size))
                )
                held = tuple(i for i in members if places[i].start < last and places[i].stop > first)
                chunks.append(Chunk(len(chunks), first, last, segment, own, held))
                buckets += own
        return cls(tuple(places[index] for index in range(len(sizes))), tuple(buckets), tuple(chunks), end)

    def runs(self, bucket: Bucket, parameters: Iterable[int], histories: Sequence[int]) -> Iterator[tuple[int, slice]]:
        """The parts of a bucket to update, as (history, slice of the flat tensors).

        parameters: those that have a gradient, in order of their places. histories: of each parameter.
        """
        begin = end = bucket.start
        current = None
        for index in parameters:
            place = self.places[index]
            start, stop = max(place.start, bucket.start), min(place.stop, bucket.stop)
            if start >= stop:
                continue
            is_next = current == histories[index] and start - end < ALIGNMENT
            if not is_next:
                if current is not None:
                    yield current, slice(begin, end)
                begin, current = start, histories[index]
            end = stop
        if current is not None:
            yield current, slice(begin, end)
