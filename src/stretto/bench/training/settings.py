# SPDX-License-Identifier: Apache-2.0
"""Settings of the benches of training steps, and the workloads that are made from them."""

from dataclasses import dataclass
from typing import Annotated, Any

from stretto.axes import name_grid
from stretto.bench.settings import Layers, Option, Ranks, Repeats, Rounds, SeqLen, Tuning, Vocab, WarmUp, require_known
from stretto.models import GPTConfig
from stretto.quantities import require_least

PADDED_VOCAB = 50304  # GPT-2's 50,257 to a multiple of 64: an odd matrix product slows everything down


@dataclass(frozen=True)
class TrainingWorkload:
    """A training workload: model, global batch in sequences, and how it is timed. ValueError for impossible sizes."""

    model: GPTConfig
    batch: int
    seq_len: int
    warm_up: int
    repeats: int
    rounds: int
    checkpointing: bool = False
    reduce_fp32: bool = False
    dtype: str = "bf16"  # of the computation
    learning_rate: float = 1e-5  # larger ones diverge on random tokens, and the last loss would show nothing

    def __post_init__(self) -> None:
        require_least(1, batch=self.batch, seq_len=self.seq_len, repeats=self.repeats, rounds=self.rounds)
        require_least(0, warm_up=self.warm_up)

    def check_room(self, ranks: int) -> None:
        """Raise ValueError if the processes of a CPU certainly need more memory than this machine has.

        Counts the parameters with gradients and two moments in fp32, each once, and the inputs of all blocks.
        """
        from stretto.cluster.host_memory import check_room
        from stretto.planner import read_architecture

        numbers = read_architecture(self.model, self.seq_len).parameters
        kept = 2 * self.batch * self.seq_len * self.model.hidden * self.model.layers
        kind = "model" if 16 * numbers > kept else "batch"
        what = f"{self.model.layers} layers of hidden {self.model.hidden} with a batch of {self.batch} x {self.seq_len}"
        check_room((16 * numbers + kept) / ranks, ranks, f"a model of {what} tokens", kind)

    def flops(self) -> float:
        """Model FLOPs of a step, by Narayanan et al.'s formula: 72 B s l h^2 (1 + s / 6h + V / 12lh).

        Matrix products of forward and backward pass, attention counted whole (not halved for causality), nothing for
        recomputation. The formula has ffn = 4h and as many KV heads as heads, as Table 5.1's models have.
        """
        b, s, layers, h, v = self.batch, self.seq_len, self.model.layers, self.model.hidden, self.model.vocab
        return 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))


def grids_of(ranks: int) -> list[dict[str, Any]]:
    """Every factorization of `ranks` into data, x, y and z."""
    from stretto.planner.grids import every_grid  # not for `stretto bench --help`

    return [grid.sizes() for grid in every_grid(ranks)]


@dataclass(frozen=True)
class ProductsTuning(Tuning):
    """Settings of `stretto tune products`: the products of a model's blocks, on every grid of the ranks."""

    model: Annotated[str, Option("gpt-5b to gpt-640b, or gpt2-small.")] = "gpt-5b"
    vocab: Vocab = PADDED_VOCAB
    batch: Annotated[int | None, Option("Global batch in sequences (default: 2 a rank).", least=1)] = None
    seq_len: SeqLen = 2048
    dtype: Annotated[str, Option("Dtype of the computation: bf16 or fp32.")] = "bf16"

    def __post_init__(self) -> None:
        require_known("dtype", (self.dtype,), ("bf16", "fp32"))

    def workload(self, ranks: int) -> TrainingWorkload:
        """One block trains: all have the same products."""
        config = GPTConfig.preset(self.model, max_seq_len=self.seq_len, vocab=self.vocab, layers=1)
        batch = 2 * ranks if self.batch is None else self.batch
        return TrainingWorkload(config, batch, self.seq_len, 0, 1, 1, dtype=self.dtype)

    def problems(self, ranks: int) -> list[str]:
        batch = self.workload(ranks).batch
        return [f"{self.model} {batch} x {self.seq_len} {self.dtype} on {name_grid(grid)}" for grid in grids_of(ranks)]


@dataclass(frozen=True)
class ThroughputSetting:
    """Settings of `stretto bench train`."""

    model: Annotated[str, Option("gpt-5b to gpt-640b, or gpt2-small.")] = "gpt-5b"
    layers: Layers = None
    ranks: Ranks = None
    vocab: Vocab = PADDED_VOCAB
    batch: Annotated[int | None, Option("Global batch in sequences (default: 2 a rank).", least=1)] = None
    seq_len: SeqLen = 2048
    warm_up: WarmUp = 3
    repeats: Repeats = 5
    rounds: Rounds = 2
    checkpointing: Annotated[bool, Option("Activation checkpointing of every block.")] = False
    reduce_fp32: Annotated[bool, Option("Reduce Stretto's weight gradients in fp32, as FSDP2 does.")] = False
    has_peers: Annotated[bool, Option("Measure FSDP2 too.", "--peers/--no-peers")] = True

    def workload(self, ranks: int) -> TrainingWorkload:
        """The workload of `ranks` ranks. Raises ValueError for an unknown model."""
        overrides = {} if self.layers is None else {"layers": self.layers}
        return TrainingWorkload(
            GPTConfig.preset(self.model, max_seq_len=self.seq_len, vocab=self.vocab, **overrides),
            2 * ranks if self.batch is None else self.batch,
            self.seq_len,
            self.warm_up,
            self.repeats,
            self.rounds,
            self.checkpointing,
            self.reduce_fp32,
        )
