# SPDX-License-Identifier: Apache-2.0
"""Times of the kernels of a DLRM step, from its shape and a GPU's rates.

Punniyamurthy et al. simulate with times of an MI210 that they do not give. No time here is theirs: `MI210` has that
GPU's datasheet, and `H200` what `stretto bench embedding` measured (lab/results/embedding).
"""

from dataclasses import dataclass

NUMBER = 4  # bytes of an fp32 number


@dataclass(frozen=True, kw_only=True)
class RecommendationStep:
    """The shape of a DLRM's training step (Punniyamurthy et al., table 2, unless it says otherwise).

    batch: samples of each rank. tables: of each rank. Neither is in the paper, nor how the 43 layers are divided:
    bottom_layers of them are the bottom MLP, which runs while the pooled vectors are sent.
    """

    batch: int = 512
    tables: int = 4
    dim: int = 92
    pooling: int = 70
    layers: int = 43
    width: int = 682
    bottom_layers: int = 21
    bucket_bytes: int = 25 * 2**20  # DistributedDataParallel's default

    @property
    def vector_bytes(self) -> int:
        """Bytes of a pooled vector."""
        return self.dim * NUMBER

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's parameters, and of their gradients."""
        return (self.width + 1) * self.width * NUMBER

    def pooled_vectors(self, ranks: int) -> int:
        """Vectors that a rank pools: of its tables, for the samples of all ranks."""
        return self.batch * ranks * self.tables

    def pair_bytes(self) -> int:
        """Bytes that a rank sends to another in each pass: of its tables, for the samples of the other."""
        return self.batch * self.tables * self.vector_bytes


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """A GPU's rates, and where they come from.

    lookup: bytes/s of the rows that a look-up reads. update_factor: how many times as long as the look-up the
    backward pass takes, the tables' update included. memory: bytes/s. flops: FLOP/s of the MLPs' products. launch:
    seconds that a kernel takes at least.
    """

    name: str
    lookup: float
    update_factor: float
    memory: float
    flops: float
    launch: float
    source: str

    def lookup_seconds(self, step: RecommendationStep, ranks: int) -> float:
        """The look-up of all of a rank's tables for the whole batch, in one kernel: pooling rows for each vector."""
        rows = step.pooled_vectors(ranks) * step.pooling
        return self.launch + rows * step.vector_bytes / self.lookup

    def update_seconds(self, step: RecommendationStep, ranks: int) -> float:
        """The backward pass of the tables with their update."""
        return self.launch + self.update_factor * (self.lookup_seconds(step, ranks) - self.launch)

    def layer_seconds(self, step: RecommendationStep) -> float:
        """The forward pass of a layer: width x width, for the samples of a rank."""
        flops = 2 * step.batch * step.width**2
        moved = (step.width**2 + 2 * step.batch * step.width) * NUMBER
        return self.launch + max(flops / self.flops, moved / self.memory)

    def layer_backward_seconds(self, step: RecommendationStep) -> float:
        """The backward pass of a layer: two products of the forward pass's size."""
        return 2 * self.layer_seconds(step)

    def interaction_seconds(self, step: RecommendationStep, ranks: int) -> float:
        """The interaction, each way: all pooled vectors of a rank's samples are read once, and a layer's input written.

        The dot products of all pairs are left out: table 2 does not fit them (512 tables have 131,328 pairs, and its
        layers are 682 wide).
        """
        numbers = step.batch * (step.tables * ranks * step.dim + step.width)
        return self.launch + numbers * NUMBER / self.memory

    def optimizer_seconds(self, step: RecommendationStep) -> float:
        """SGD of the MLPs: weights are read and written, gradients read."""
        return self.launch + 3 * step.layers * step.layer_bytes / self.memory


MI210 = KernelRates(
    name="MI210",
    lookup=1.638e12,
    update_factor=2.0,
    memory=1.638e12,
    flops=45.3e12 / 2,
    launch=5e-6,
    source="its datasheet's memory bandwidth and half its fp32 matrix peak; the update reads and writes each row once",
)
H200 = KernelRates(
    name="H200",
    lookup=6.02e12,
    update_factor=4.57,
    memory=4.8e12,
    flops=67e12 / 2,
    launch=5e-6,
    source="lab/results/embedding, 8192 x 64 x 128 x 70: the look-up alone (3.12 ms: above its memory's bandwidth, "
    "since caches hold rows), and the batched backward pass less its exchange (15.29 - 1.01 ms); its datasheet's "
    "memory bandwidth and half its fp32 peak",
)
