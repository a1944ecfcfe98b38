# SPDX-License-Identifier: Apache-2.0
"""The kinds of layers of which a transformer block is a list, each with its computation, communication and memory.

Linears are described by their sizes alone, and everything that is modelled of them (collectives, products, memory)
follows from these. To plan another kind of layer, add a class here, and also change:

- `Architecture.block`, which makes the layers, and `Architecture`'s fields, if the layer needs its own sizes;
- `Architecture.block_parameters` and `memory.local_parameters`, if the layer has parameters other than its linears'
  weights and biases: those of norms (`block_norms`, `head_norm_weights`), attention sinks, experts, embeddings and head
  are counted by name;
- `communication` and `step_recorder`, if the layer sends anything but its linears' collectives (as `MoeLayer`, in
  `experts.layers`, does: `experts.cost`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from stretto.axes import GridSizes

STATISTIC = 2
"""Elements that a statistic in fp32 takes, where activations have 16 bits."""


@dataclass(frozen=True)
class Linear:
    """One linear of a block: `inputs` is k and `outputs` is n of equations 5.1 to 5.5.

    A rowwise one ("transposed" in the paper) sums its output over x and its input's gradient over y. `units`: into how
    many parts at most the outputs may be cut: heads, or the outputs themselves. z cuts what x or y leaves of the
    weight's first dim: of its outputs, or of its inputs if they are stored first.

    keeps_outputs_whole: no axis cuts the outputs, which all ranks of it compute alike. takes_whole_inputs: the inputs
    are such, and no axis cuts them. shared: outputs of a unit, a KV head, that several ranks of x may use: where these
    are more than units, each holds a copy of one, computes the shared outputs and its part of the others.
    """

    name: str
    inputs: int
    outputs: int
    is_rowwise: bool
    has_bias: bool
    units: int
    stores_inputs_first: bool = False
    keeps_outputs_whole: bool = False
    takes_whole_inputs: bool = False
    shared: int = 0

    @property
    def output_axis(self) -> str:
        """The axis that cuts the outputs: x of a colwise linear, y of a rowwise one."""
        return "y" if self.is_rowwise else "x"

    @property
    def input_axis(self) -> str:
        """The axis that cuts the inputs, over which the output's partial sums are added."""
        return "x" if self.is_rowwise else "y"

    def output_shards(self, grid: GridSizes) -> int:
        """Number of ranks of a grid that compute parts of the outputs."""
        return 1 if self.keeps_outputs_whole else grid[self.output_axis]

    def copies(self, grid: GridSizes) -> int:
        """Number of ranks that hold each unit: several where units that are shared are fewer than ranks."""
        shards = self.output_shards(grid)
        return shards // self.units if self.shared and shards > self.units and shards % self.units == 0 else 1

    def local_outputs(self, grid: GridSizes) -> float:
        """The outputs that a rank computes."""
        again = self.shared * self.units * (self.copies(grid) - 1)
        return (self.outputs + again) / self.output_shards(grid)

    def input_shards(self, grid: GridSizes) -> int:
        """Into how many parts a grid cuts the inputs."""
        return 1 if self.takes_whole_inputs else grid[self.input_axis]

    @property
    def weights(self) -> int:
        """Count of the weight's numbers."""
        return self.inputs * self.outputs

    def local_weights(self, grid: GridSizes) -> float:
        """Numbers of the weight that x and y leave to a rank, whole over z."""
        return self.weights * self.copies(grid) / (self.output_shards(grid) * self.input_shards(grid))


class BlockLayer(ABC):
    """One layer of a block, as a rank of a grid runs it. Numbers are of elements, a token, unless they say otherwise.

    token_parts: over how many ranks of x the activations between layers are sharded.
    """

    def linears(self) -> tuple[Linear, ...]:
        return ()

    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """The numbers of matrices [outputs, inputs] of each size that its weights are, for whole ones' optimizers."""
        return tuple((1, linear.outputs, linear.inputs) for linear in self.linears())

    @abstractmethod
    def kept(self, grid: GridSizes, token_parts: int) -> float:
        """Numbers that it keeps for its backward pass."""

    @abstractmethod
    def element_wise(self, grid: GridSizes, token_parts: int) -> tuple[float, float]:
        """Numbers that its element-wise kernels read and write, in the forward and in the backward pass,
        without biases.
        """

    @abstractmethod
    def widest(self, grid: GridSizes) -> float:
        """The widest activation whose gradient its backward pass holds."""

    def growth(self, grid: GridSizes) -> float:
        """The peak memory of its backward pass beyond kept activations: gradients of activations; 0 by default."""
        return 0.0

    def attention_flops(self, grid: GridSizes, tokens: int, seq_len: int) -> float:
        """FLOPs of its attention's own products in one forward pass over `tokens`; 0 by default."""
        return 0.0

    def scores(self, grid: GridSizes) -> float:
        """Attention's scores, for each token and key, that are there as a tensor; 0 by default: within a kernel."""
        return 0.0

    def exchanged_keys(self, grid: GridSizes) -> float:
        """Numbers of its keys and values, which ranks of context exchange; 0 by default."""
        return 0.0

    def exchanged_heads(self, grid: GridSizes) -> float:
        """Numbers of queries, keys, values and results, of which ranks of context may exchange heads; 0 by default, and
        where these ranks do not divide the heads."""
        return 0.0

    def latents(self, grid: GridSizes) -> tuple[float, float]:
        """Numbers of latents that may travel in place of keys and values, and of what a rank makes of other ranks' on
        the way to these; 0 by default."""
        return 0.0, 0.0


STRIDED = 2.3  # how many times as long a pass over parts of rows takes as one over contiguous numbers
# The same of Stretto's kernels for rotary positions and gates, which reach 2.7 and 3.0 TB/s on an H100, where PyTorch's
# element-wise kernels are counted with 2.1.
FUSED = 0.75


@dataclass(frozen=True)
class NormLayer(BlockLayer):
    """A block's two norms and two residual additions, of `hidden` features cut over y.

    is_plain: norms are made of plain operations in fp32, as transformers' own are; over y they always are.
    """

    hidden: int
    is_plain: bool = False

    def kept(self, grid: GridSizes, token_parts: int) -> float:
        # Outputs of both, gathered for the linears, and inputs; and of each token two statistics in fp32. Plain ones
        # keep the input in fp32 instead, and the output before its weight, too.
        plain = 2 * STATISTIC * self.hidden if self.is_plain else 0
        return 2 * (1 + 1 / token_parts) * self.hidden / grid.y + plain + 2 * 2 * STATISTIC / token_parts

    def element_wise(self, grid: GridSizes, token_parts: int) -> tuple[float, float]:
        hidden = self.hidden / grid.y / token_parts
        # One of plain operations in fp32, each of which reads and writes all: as many passes as take the time that was
        # measured over y.
        norm = 30 if grid.y > 1 or self.is_plain else 2
        return 2 * norm * hidden + 2 * 3 * hidden, 2 * 2 * norm * hidden + 2 * 3 * hidden

    def widest(self, grid: GridSizes) -> float:
        return self.hidden / grid.y


@dataclass(frozen=True)
class AttentionLayer(BlockLayer):
    """Causal self-attention, its heads cut over x: q, k and v by one linear or three, and the linear of the output.

    is_rotary: queries and keys are rotated, which copies them. is_plain: plain operations make its scores, of all keys,
    and keep those after the softmax. is_fused: one kernel rotates queries and keys, and copies them and the values out
    of the fused product.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    fuses_qkv: bool
    has_qkv_bias: bool
    has_out_bias: bool
    is_rotary: bool
    stores_inputs_first: bool
    is_plain: bool = False
    is_fused: bool = False

    @property
    def queries(self) -> int:
        """Features of all queries: heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Features of all keys, and of all values: KV heads x head_dim."""
        return self.kv_heads * self.head_dim

    def keys_in(self, grid: GridSizes) -> int:
        """Those that all ranks of x hold together, with copies."""
        return max(self.kv_heads, grid.x) * self.head_dim if self.kv_heads < self.heads else self.keys

    def linears(self) -> tuple[Linear, ...]:
        hidden, kv, bias, is_first = self.hidden, self.kv_heads, self.has_qkv_bias, self.stores_inputs_first
        shared = self.head_dim if kv < self.heads else 0
        if self.fuses_qkv:
            outputs = self.queries + 2 * self.keys
            inputs = [Linear("qkv", hidden, outputs, False, bias, kv, is_first, shared=2 * shared)]
        else:
            inputs = [
                Linear("q", hidden, self.queries, False, bias, self.heads, is_first),
                Linear("k", hidden, self.keys, False, bias, kv, is_first, shared=shared),
                Linear("v", hidden, self.keys, False, bias, kv, is_first, shared=shared),
            ]
        return (*inputs, Linear("out", self.queries, hidden, True, self.has_out_bias, hidden, is_first))

    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        return (1, self.queries, self.hidden), (2, self.keys, self.hidden), (1, self.hidden, self.queries)

    def kept(self, grid: GridSizes, token_parts: int) -> float:
        # Queries, keys, values, and the result; and of each head a sum of exponentials in fp32.
        keys = self.keys_in(grid)
        kept = (2 * self.queries + 2 * keys + STATISTIC * self.heads) / grid.x
        if self.is_rotary and self.fuses_qkv and not self.is_fused:
            # Rotated copies, while the values' views keep the whole product of qkv alive.
            kept += (self.queries + keys) / grid.x
        if self.fuses_qkv and self.kv_heads < self.heads and not self.is_rotary:
            kept += self.queries / grid.x  # grouped queries are copied out of the fused product
        if self.is_plain and self.kv_heads < self.heads:  # keys and values are copied for each query's head
            kept += (2 * self.queries - 2 * keys) / grid.x
        return kept

    def scores(self, grid: GridSizes) -> float:
        return self.heads / grid.x if self._makes_scores(grid) else 0.0

    def _makes_scores(self, grid: GridSizes) -> bool:
        return self.is_plain and grid.context == 1  # over context, kernels attend

    def exchanged_keys(self, grid: GridSizes) -> float:
        return 2 * self.keys_in(grid) / grid.x

    def exchanged_heads(self, grid: GridSizes) -> float:
        kv_heads = self.keys_in(grid) // self.head_dim // grid.x
        is_divided = self.heads // grid.x % grid.context == kv_heads % grid.context == 0
        return (2 * self.queries + 2 * self.keys_in(grid)) / grid.x if is_divided else 0.0

    def element_wise(self, grid: GridSizes, token_parts: int) -> tuple[float, float]:
        keys = self.keys_in(grid)
        qkv, rotated = (self.queries + 2 * keys) / grid.x, (self.queries + keys) / grid.x
        if self.is_rotary and self.is_fused:
            return FUSED * 2 * qkv, FUSED * 2 * qkv
        # Rotating takes four products of halves, their sum and difference, and a copy that joins them, 9 passes; its
        # backward pass the same products, sums of their gradients, and another copy, 10. Halves of heads are strided:
        # kernels that read or write them reach 1.4 TB/s on an H200, where others reach 3.3. In the forward pass the sum
        # and the difference are contiguous, so that it counts as 7 strided passes (measured on an H100). Gradients of a
        # fused product's parts are concatenated; three linears' gradients of their common input are added.
        forward, backward = (STRIDED * 7 * rotated, STRIDED * 10 * rotated) if self.is_rotary else (0.0, 0.0)
        return forward, backward + (2 if self.fuses_qkv else 3) * qkv

    def widest(self, grid: GridSizes) -> float:
        return 0.0  # never more than the MLP's

    def attention_flops(self, grid: GridSizes, tokens: int, seq_len: int) -> float:
        # Queries with keys, and their weights with values; a causal mask leaves half, except to plain operations.
        # Repeated on every rank of y.
        return (4 if self._makes_scores(grid) else 2) * tokens * seq_len * self.queries / grid.x


@dataclass(frozen=True)
class MlpLayer(BlockLayer):
    """Two linears with an activation between them, its features cut over x; three if a gate multiplies it.

    is_fused: the gate is one kernel, and computed again in the backward pass.
    """

    hidden: int
    ffn: int
    is_gated: bool
    has_bias: bool
    stores_inputs_first: bool
    is_fused: bool = False

    def linears(self) -> tuple[Linear, ...]:
        hidden, ffn, bias, is_first = self.hidden, self.ffn, self.has_bias, self.stores_inputs_first
        ups = ("gate", "up") if self.is_gated else ("up",)
        return (
            *(Linear(name, hidden, ffn, False, bias, ffn, is_first) for name in ups),
            Linear("down", ffn, hidden, True, bias, hidden, is_first),
        )

    def kept(self, grid: GridSizes, token_parts: int) -> float:
        return (2 if not self.is_gated else 3 if self.is_fused else 4) * self.ffn / grid.x

    def element_wise(self, grid: GridSizes, token_parts: int) -> tuple[float, float]:
        if not self.is_gated:
            return 3 * self.ffn / grid.x, 4 * self.ffn / grid.x
        if self.is_fused:
            return FUSED * 3 * self.ffn / grid.x, FUSED * 5 * self.ffn / grid.x + 3 * self.hidden / grid.y
        # Two kernels for the gate, three in the backward pass; and the input's gradients of two linears are added.
        return 6 * self.ffn / grid.x, 9 * self.ffn / grid.x + 3 * self.hidden / grid.y

    def widest(self, grid: GridSizes) -> float:
        return (self.ffn * (2 if self.is_gated else 1)) / grid.x

    def growth(self, grid: GridSizes) -> float:
        # And the gradient by the block's output; a quarter more is measured (lab/results/memory).
        return self.widest(grid) + 1.25 * self.hidden / grid.y
