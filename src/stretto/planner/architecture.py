# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder-only transformer, from which the planner computes everything else."""

from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from stretto.axes import GridSizes
from stretto.planner.layers import AttentionLayer, BlockLayer, ExpertsLayer, Linear, MlpLayer, NormLayer

LARGEST = 10**9  # of any count: products of a few stay exact and cheap


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder-only transformer. Whole-model counts, whatever grid it will run on.

    `labels`: outputs of a head that is not one of the vocabulary, which alone may be tied (None); 0 where there is no
    head. `logits`: how the loss takes them: in slices, no rank having whole ones, as whole ones, or as whole ones of
    which it has use for one row a sequence ("pooled").

    `fuses_qkv`: one linear makes queries, keys and values, otherwise three do. `positions` counts the rows of a learned
    position embedding (0: none). `is_rotary`: queries and keys are turned, which copies them. `block_norms` counts a
    block's norms of hidden features that have weights (where there are none, the last norm has none either), and
    `head_norm_weights` the weights of those of its queries and keys. `has_sinks`: attention has a number for each head.
    `has_plain_attention`: plain operations make its scores. `experts`: how many of width `ffn` the MLP has (0: it is
    none), of which `active_experts` compute a token. `notes`: what a reader of a plan must know.

    `is_sharded_by_blocks`: `parallelize` finds no roles, and shards the model block by block over z, so that all ranks
    of x and y compute the same. What is of such models alone: `refuses_copies`, that it refuses x and y above 1, and
    `has_plain_norms`, that norms are made of plain operations in fp32 (with roles, they are replaced).

    `is_first`, `is_last`: of a pipeline stage (`stage`), whether it has the embeddings, and the last norm and the head.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    is_gated: bool = False
    fuses_qkv: bool = True
    has_qkv_bias: bool = True
    has_out_bias: bool = True
    has_mlp_bias: bool = True
    has_norm_bias: bool = True
    is_tied: bool = True
    is_rotary: bool = False
    positions: int = 0
    block_norms: int = 2
    head_norm_weights: int = 0
    has_sinks: bool = False
    has_plain_attention: bool = False
    experts: int = 0
    active_experts: int = 0
    labels: int | None = None
    has_head_bias: bool = False
    logits: Literal["sliced", "whole", "pooled"] = "sliced"
    stores_inputs_first: bool = False
    takes_sharded_sequence: bool = False
    is_sharded_by_blocks: bool = False
    refuses_copies: bool = False
    has_plain_norms: bool = False
    is_first: bool = True
    is_last: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 0 if each.default is not MISSING else 1
            if each.type is int and not least <= value <= LARGEST:
                raise ValueError(f"{self.name}: {each.name} is {value}, but must be from {least} to {LARGEST}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.kv_heads} KV heads do not divide {self.heads} heads")
        if self.experts and not 1 <= self.active_experts <= self.experts:
            raise ValueError(f"{self.name}: a token goes to {self.active_experts} of {self.experts} experts")

    @cached_property
    def block(self) -> tuple[BlockLayer, ...]:
        """The layers of one block."""
        return (
            NormLayer(self.hidden, self.has_plain_norms and self.is_sharded_by_blocks),
            AttentionLayer(
                self.hidden,
                self.heads,
                self.kv_heads,
                self.head_dim,
                self.fuses_qkv,
                self.has_qkv_bias,
                self.has_out_bias,
                self.is_rotary,
                self.stores_inputs_first,
                self.has_plain_attention,
            ),
            MlpLayer(self.hidden, self.ffn, self.is_gated, self.has_mlp_bias, self.stores_inputs_first)
            if not self.experts
            else ExpertsLayer(self.hidden, self.ffn, self.experts, self.active_experts),
        )

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linears of one block, in order. The head is not among them."""
        return tuple(linear for layer in self.block for linear in layer.linears())

    @property
    def head_outputs(self) -> int:
        """Logits that the head makes of a token; 0 of a stage without it."""
        return 0 if not self.is_last else self.vocab if self.labels is None else self.labels

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding of tokens; 0 of a stage without it."""
        return self.vocab if self.is_first else 0

    @property
    def position_rows(self) -> int:
        """Rows of the embedding of positions; 0 of a stage without it."""
        return self.positions if self.is_first else 0

    @property
    def has_own_head(self) -> bool:
        """Whether the head's weight is one besides the embedding's."""
        return self.head_outputs > 0 and not (self.labels is None and self.is_tied and self.is_first)

    @property
    def linear_weights(self) -> int:
        """Weights of all blocks' linears, without head and biases."""
        return self.layers * sum(linear.weights for linear in self.linears)

    @property
    def active_weights(self) -> int:
        """Weights of all blocks that one token is multiplied with: of experts, those of its own alone."""
        experts = sum(layer.active_weights for layer in self.block if isinstance(layer, ExpertsLayer))
        return self.linear_weights + self.layers * experts

    @cached_property
    def gathered_tensors(self) -> tuple[int, ...]:
        """Numbers in each of one block's parameters that z alone shards."""
        return tuple(count for layer in self.block for count in layer.gathered_tensors())

    @property
    def gathered_parameters(self) -> int:
        """Their sum."""
        return sum(self.gathered_tensors)

    @property
    def sinks(self) -> int:
        """Attention sinks of one block, which x splits with the heads."""
        return self.heads if self.has_sinks else 0

    @property
    def parameters(self) -> int:
        """All of the model's parameters; tied weights count once."""
        return self.layers * self.block_parameters + self.outside_parameters

    @cached_property
    def block_parameters(self) -> int:
        """All parameters of one block: weights and biases of its linears, its norms, sinks and experts."""
        linears = sum(linear.weights + linear.outputs * linear.has_bias for linear in self.linears)
        norms = self.block_norms * self._norm_width + self.head_norm_weights
        return linears + norms + self.sinks + self.gathered_parameters

    @cached_property
    def outside_parameters(self) -> int:
        """Parameters that are in no block: embeddings, head and last norm."""
        embeddings = (self.embedding_rows + self.position_rows) * self.hidden
        head = self.head_outputs * (self.hidden * self.has_own_head + self.has_head_bias)
        return embeddings + head + self.norm_parameters - self.layers * self.block_norms * self._norm_width

    @property
    def norm_parameters(self) -> int:
        """Weights and biases of all norms of hidden features."""
        norms = self.layers * self.block_norms + (1 if self.block_norms and self.is_last else 0)
        return norms * self._norm_width

    @property
    def _norm_width(self) -> int:
        return self.hidden * (2 if self.has_norm_bias else 1)

    def stage(self, blocks: int, *, is_first: bool, is_last: bool) -> "Architecture":
        """A pipeline stage of so many blocks. Tied embeddings are on the first stage and on the last."""
        return replace(self, layers=blocks, is_first=is_first, is_last=is_last)

    def copies(self, grid: GridSizes) -> int:
        """How many ranks compute and hold the same: those of x and y, if the model is sharded by blocks."""
        return grid.x * grid.y if self.is_sharded_by_blocks else 1

    def splitting_sizes(self, grid: GridSizes) -> GridSizes:
        """The sizes by which a grid splits weights and work: x and y are 1 if the model is sharded by blocks."""
        return grid if self.copies(grid) == 1 else GridSizes(**grid.sizes() | {"x": 1, "y": 1})


def check_count(where: str, value: Any) -> None:
    """Raise ValueError unless a value is a whole number that a model may have of something."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        raise ValueError(f"{where} is {value!r}, but must be a whole number from 1 to {LARGEST}")
