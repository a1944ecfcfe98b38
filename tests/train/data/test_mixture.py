# SPDX-License-Identifier: Apache-2.0
"""Mixtures of data sets: one order of tokens on every grid and from every step on, in the shares of the weights."""

import functools
import hashlib
from pathlib import Path

import numpy as np
import pytest
from tests.train import runs
from tests.train.data.test_documents import write_jsonl
from tests.train.data.test_token_files import write_nanogpt

from stretto.train.data import MixedDataset, MixedSampler, Sampler, TokenDataset, open_dataset, rank_rows
from stretto.train.data.stream import Segment, TokenStream

SHARDS = (1, 2, 3, 4, 12)  # data * z of five grids
STEPS, BATCH, SEQ_LEN = 20, 12, 64


def make_mixture(folder: Path, rng: np.random.Generator) -> MixedDataset:
    """A few sources of random sizes and kinds, the smallest of which are used up many times."""
    paths, weights = [], rng.dirichlet(np.ones(rng.integers(1, 6))) + 0.01
    for number in range(len(weights)):
        size = int(rng.integers(100, 20_000))
        ids = rng.integers(97, 122, size)
        if rng.random() < 0.5:
            ends = np.sort(rng.integers(1, size, size // int(rng.integers(10, 400)) + 1))
            texts = [bytes(part.astype(np.uint8)).decode() for part in np.split(ids, ends)]
            paths.append(str(write_jsonl(folder / f"{number}.jsonl", texts)))
        else:
            paths.append(str(write_nanogpt(folder / f"{number}.bin", ids.tolist(), "H")))
    mixture = open_dataset(paths, weights=weights.tolist(), seq_len=SEQ_LEN, vocab=256)
    assert isinstance(mixture, MixedDataset)
    mixture.paths = paths  # for who opens it again
    return mixture


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mixture", range(10))
def test_every_grid_and_every_resumption_reads_one_stream_of_tokens(tmp_path: Path, mixture: int) -> None:
    """10 random mixtures, 5 grids, 3 steps from which another grid goes on."""
    data = make_mixture(tmp_path, np.random.default_rng(mixture))
    again = open_dataset(data.paths, weights=data.weights, seq_len=SEQ_LEN, vocab=256)
    assert again.fingerprint == data.fingerprint

    @functools.cache
    def read(index: int) -> bytes:
        return b"".join(each.tobytes() for each in (*data.read(index), data.read_places(index)))

    rng, found = np.random.default_rng(mixture), set()
    for parts in SHARDS:
        for resumed_at in rng.integers(0, STEPS, 3):
            digest = hashlib.sha256()
            for step in range(STEPS):
                if step in (0, resumed_at):  # a new process, on another grid
                    order, shards = again.order(BATCH, 7), parts if step == resumed_at else rng.choice(SHARDS)
                indices = order.indices(step)
                for part in range(shards):
                    for index in indices[rank_rows(BATCH, part, int(shards))]:
                        digest.update(read(int(index)))
            found.add(digest.hexdigest())
    assert len(found) == 1, f"seed {mixture}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_shares_are_those_of_the_weights_at_any_place_of_the_order(seed: int) -> None:
    """Of any n sequences from the start on, as many as the weights say, but for one or two; each source in epochs."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    lengths, weights = rng.integers(1, 500, count), rng.dirichlet(np.full(count, 0.3)) + 1e-4
    sampler = MixedSampler(tuple(map(int, lengths)), tuple(map(float, weights)), 8, seed)
    ends, shares = np.cumsum(lengths), weights / weights.sum()
    taken = sampler.take(0, 10_000)
    source = np.searchsorted(ends, taken, side="right")
    found = np.cumsum(source[:, None] == np.arange(count), axis=0)
    due = np.arange(1, 10_001)[:, None] * shares
    assert np.abs(found - due).max() <= count, f"seed {seed}"
    assert np.abs(found[-1] / 10_000 - shares).max() < 0.005 / 2
    pieces, first = [], 0
    while first < 10_000:
        size = min(int(rng.integers(1, 700)), 10_000 - first)
        pieces.append(sampler.take(first, size))
        first += size
    assert np.array_equal(np.concatenate(pieces), taken)
    for number in range(count):
        own = taken[source == number] - (ends[number] - lengths[number])
        for start in range(0, len(own) - lengths[number] + 1, lengths[number]):
            assert sorted(own[start : start + lengths[number]]) == list(range(lengths[number]))
    far = sampler.take(10**13, 5000)
    share = np.bincount(np.searchsorted(ends, far, side="right"), minlength=count) / 5000
    assert np.abs(share - shares).max() <= (count + 1) / 5000


@pytest.mark.exhaustive
def test_shares_of_ten_million_tokens_are_within_half_a_percent(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    mixture = make_mixture(tmp_path, rng)
    weights = np.array(mixture.weights) / sum(mixture.weights)
    taken = mixture.order(8, 1).take(0, 10_000_000 // SEQ_LEN)
    tokens = np.bincount(np.searchsorted(mixture._ends, taken, side="right"), minlength=len(weights)) * SEQ_LEN
    assert np.abs(tokens / tokens.sum() / weights - 1).max() < 0.005


def test_one_source_keeps_the_order_that_it_has_alone(tmp_path: Path) -> None:
    file = write_nanogpt(tmp_path / "a.bin", list(range(200)), "H")
    alone = TokenDataset(TokenStream([Segment(file, "<u2", 200)]), seq_len=4, vocab_size=256)
    assert alone.order(10, 5).indices(3).tolist() == Sampler(len(alone), 10, 5).indices(3).tolist()
    with pytest.raises(ValueError, match="as a whole"):
        MixedDataset([alone, alone], [1, 2]).order(8, 5, count=7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["data.weights=[1, 2]"],
            r"data.weights is \[1.0, 2.0\], but must be a number .* for each path.*\[1.0\] would do",
        ),
        (["data.weights=[0]"], r"data.weights is \[0.0\], but must be a number above 0.*\[1.0\] would do"),
        (["data.weights=[1]", "data.evaluation_sequences=2"], r"give data.evaluation_path"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runs.configure(tmp_path / "run", *options)
    with pytest.raises(ValueError, match="must be 1 numbers above 0"):
        open_dataset(str(tmp_path), weights=[-1.0], seq_len=4)
