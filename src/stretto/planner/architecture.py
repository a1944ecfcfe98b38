# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder-only transformer, from which the planner computes all others."""

from collections.abc import Hashable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from stretto.axes import GridSizes
from stretto.planner.experts.layers import LatentAttentionLayer, LatentShape, MoeLayer, MoeShape
from stretto.planner.layers import AttentionLayer, BlockLayer, Linear, MlpLayer, NormLayer
from stretto.quantities import MAX_COUNT


class BlockKind(NamedTuple):
    """Blocks of a model that are alike: how many there are, and a model of one of them, without embeddings and head."""

    blocks: int
    model: "Architecture"


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
    `has_plain_attention`: plain operations make its scores. `has_fused_kernels`: rotary positions and gates are one
    kernel each, as in Stretto's GPT. `notes`: what a reader of a plan must know.

    `moe`: the mixture of experts that blocks have in place of the MLP: all of them, or those that `moe_pattern` has
    True for. `latent`: its attention is DeepSeek's, of these sizes.

    `adds_output`: the MLP's output is added to the residual stream directly, without a norm or dropout in between.

    `is_sharded_by_blocks`: `parallelize` finds no roles, and shards the model block by block over z, so that all ranks
    of x and y compute the same. What is of such models alone: `refuses_copies`, that it refuses x and y above 1, and
    `has_plain_norms`, that norms are made of plain operations in fp32 (with roles, they are replaced).

    `gathers_blocks`: it has roles, but each block is gathered whole by one message (`StepWorkload.as_sharded`).

    `shards_tokens_of_blocks`: where tokens are sharded over x, all ranks have those of the embeddings, of the last norm
    and of the head, and queries, keys and values are one product (transformers' models).

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
    has_fused_kernels: bool = False
    moe: MoeShape | None = None
    moe_pattern: tuple[bool, ...] = ()
    latent: LatentShape | None = None
    labels: int | None = None
    has_head_bias: bool = False
    logits: Literal["sliced", "whole", "pooled"] = "sliced"
    adds_output: bool = True
    stores_inputs_first: bool = False
    takes_sharded_sequence: bool = False
    shards_tokens_of_blocks: bool = False
    is_sharded_by_blocks: bool = False
    gathers_blocks: bool = False
    refuses_copies: bool = False
    has_plain_norms: bool = False
    is_first: bool = True
    is_last: bool = True
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 0 if each.default is not MISSING else 1
            if each.type is int and not least <= value <= MAX_COUNT:
                raise ValueError(f"{self.name}: {each.name} is {value}, but must be from {least} to {MAX_COUNT}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: {self.kv_heads} KV heads do not divide {self.heads} heads")
        if self.moe is not None:
            if not 1 <= self.moe.active <= self.moe.experts:
                raise ValueError(f"{self.name}: a token goes to {self.moe.active} of {self.moe.experts} experts")
            if len(self.moe_pattern) not in (0, self.layers):
                raise ValueError(f"{self.name}: moe_pattern names {len(self.moe_pattern)} of {self.layers} blocks")

    @cached_property
    def has_moe(self) -> tuple[bool, ...]:
        """For each block, True if it has the mixture of experts."""
        return self.moe_pattern or (self.moe is not None,) * self.layers

    @property
    def moe_blocks(self) -> int:
        """Number of blocks that have it."""
        return sum(self.has_moe)

    @cached_property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The blocks, by kind: dense ones, then those with a mixture of experts."""
        counts = {False: self.layers - self.moe_blocks, True: self.moe_blocks}
        if not all(counts.values()):
            is_dense = self.moe is not None and not self.moe_blocks
            return (BlockKind(self.layers, replace(self, moe=None, moe_pattern=()) if is_dense else self),)
        return tuple(
            BlockKind(count, replace(self, layers=1, moe_pattern=(has_moe,), is_first=False, is_last=False))
            for has_moe, count in counts.items()
        )

    @cached_property
    def block(self) -> tuple[BlockLayer, ...]:
        """The layers of one block, of a model whose blocks are all alike (`kinds` has such models)."""
        if len(set(self.has_moe)) > 1:
            raise AssertionError(f"{self.name} has blocks of several kinds")
        return (
            NormLayer(self.hidden, self.has_plain_norms and self.is_sharded_by_blocks),
            LatentAttentionLayer(self.hidden, self.heads, self.latent, self.has_qkv_bias)
            if self.latent is not None
            else AttentionLayer(
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
                self.has_fused_kernels,
            ),
            self._mlp,
        )

    @property
    def _mlp(self) -> BlockLayer:
        if self.moe is not None and self.has_moe[0]:
            return MoeLayer(self.hidden, self.moe)
        return MlpLayer(
            self.hidden, self.ffn, self.is_gated, self.has_mlp_bias, self.stores_inputs_first, self.has_fused_kernels
        )

    @cached_property
    def moe_layer(self) -> MoeLayer | None:
        """The mixture of experts of one block, of a model whose blocks are all alike; None of dense ones."""
        return next((layer for layer in self.block if isinstance(layer, MoeLayer)), None)

    @cached_property
    def ends_with_linear(self) -> bool:
        """True if nothing but an addition follows the last linear of a block, of a model whose blocks are all alike.

        When such a block is recomputed, that linear's output is skipped, since it would not be read.
        """
        return self.adds_output and isinstance(self.block[-1], MlpLayer)

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
        """True if the head's weight is separate from the embedding's."""
        return self.head_outputs > 0 and not (self.labels is None and self.is_tied and self.is_first)

    @property
    def sends_blocks(self) -> bool:
        """True if a message gathers all of a block, and another one sends its gradients."""
        return self.is_sharded_by_blocks or self.gathers_blocks

    @property
    def linear_weights(self) -> int:
        """Weights of all blocks' linears, without head and biases."""
        return sum(kind.blocks * sum(linear.weights for linear in kind.model.linears) for kind in self.kinds)

    @property
    def active_weights(self) -> int:
        """Weights of all blocks with which one token is multiplied: of experts, only those of its own."""
        experts = sum(
            kind.blocks * layer.active_weights
            for kind in self.kinds
            for layer in kind.model.block
            if isinstance(layer, MoeLayer)
        )
        return self.linear_weights + experts

    @property
    def sinks(self) -> int:
        """Attention sinks of one block, which x splits with the heads."""
        return self.heads if self.has_sinks else 0

    @property
    def parameters(self) -> int:
        """All of the model's parameters; tied weights count once."""
        return sum(kind.blocks * kind.model.block_parameters for kind in self.kinds) + self.outside_parameters

    @cached_property
    def prunable_parameters(self) -> int:
        """Weights of linears, experts and an output layer of its own: what `stretto.train.pruning` prunes."""
        blocks = sum(
            kind.blocks * (sum(linear.weights for linear in kind.model.linears) + sum(kind.model.expert_tensors))
            for kind in self.kinds
        )
        return blocks + self.head_outputs * self.hidden * self.has_own_head

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts of all blocks."""
        return sum(kind.blocks * sum(kind.model.expert_tensors + kind.model.expert_biases) for kind in self.kinds)

    @property
    def expert_tensors(self) -> tuple[int, ...]:
        """Numbers in each parameter of a block that ranks of `expert` divide; for a model whose blocks are alike."""
        return () if self.moe_layer is None else self.moe_layer.expert_tensors()

    @property
    def expert_biases(self) -> tuple[int, ...]:
        """Numbers in the biases of one block's experts, of a model of like blocks."""
        return () if self.moe_layer is None else self.moe_layer.expert_biases()

    @property
    def whole_parameters(self) -> int:
        """Parameters of one block that every rank has whole, except for norms: its router."""
        return 0 if self.moe_layer is None else self.moe_layer.whole_parameters

    @property
    def latent_norm_weights(self) -> int:
        """Weights of one block's norms of latent features."""
        return 0 if self.latent is None else self.latent.q_rank + self.latent.kv_rank

    @cached_property
    def block_parameters(self) -> int:
        """All parameters of one block: weights and biases of its linears, its norms, sinks and experts. Of a model
        whose blocks are all alike."""
        linears = sum(linear.weights + linear.outputs * linear.has_bias for linear in self.linears)
        norms = self.block_norms * self._norm_width + self.head_norm_weights + self.latent_norm_weights
        return linears + norms + self.sinks + self.whole_parameters + sum(self.expert_tensors + self.expert_biases)

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

    def stage(self, blocks: int, *, is_first: bool, is_last: bool, moe_blocks: int | None = None) -> "Architecture":
        """A pipeline stage of so many blocks, `moe_blocks` of them with a mixture of experts (None: all, if the model
        has any). Tied embeddings are on the first stage and on the last."""
        dense = 0 if moe_blocks is None else blocks - moe_blocks
        pattern = (False,) * dense + (True,) * (blocks - dense) if self.moe is not None else ()
        stage = replace(self, layers=blocks, is_first=is_first, is_last=is_last, moe_pattern=pattern)
        if self.moe is not None:  # stages share the models of their blocks, and what is known of these
            counts = (blocks,) if len(self.kinds) == 1 else (dense, blocks - dense)
            shared = (kind._replace(blocks=count) for kind, count in zip(self.kinds, counts, strict=True) if count)
            stage.__dict__["kinds"] = tuple(shared)
        return stage

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """Cache of what is computed once of a block on each grid, by its name and the sizes that it depends on."""
        return {}

    def copies(self, grid: GridSizes) -> int:
        """Number of ranks that compute and hold the same: those of x and y, if the model is sharded by blocks."""
        return grid.x * grid.y if self.is_sharded_by_blocks else 1

    def splitting_sizes(self, grid: GridSizes) -> GridSizes:
        """The sizes by which a grid splits weights and work: x and y are 1 if the model is sharded by blocks."""
        return grid if self.copies(grid) == 1 else GridSizes(**grid.sizes() | {"x": 1, "y": 1})
