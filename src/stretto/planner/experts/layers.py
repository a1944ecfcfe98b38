# SPDX-License-Identifier: Apache-2.0
"""Layers of mixture-of-experts models: routed and shared experts, and DeepSeek's latent attention.

`grid.expert` ranks divide the experts among them, taken from data, then z (`stretto.axes.fold_experts`); what they
leave of data sums gradients of experts, what they leave of z shards them. x cuts each expert's inner features ("cut"),
or is among the ranks that divide the experts ("fold"). Rows are what experts compute: a token's features, once for each
of its experts. Places are what a rank receives: a token's features once, however many of its experts the rank has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from stretto.axes import GridSizes
from stretto.planner.layers import STATISTIC, BlockLayer, Linear, MlpLayer

IMBALANCE = 1.1
"""Default ratio of the busiest rank's rows to the mean. It is an assumption: routers that are balanced by a loss or a
bias stay near it over the experts of a rank, and others may reach several times it."""


@dataclass(frozen=True)
class MoeShape:
    """The mixture of experts of a block. Whole-model counts.

    experts: of inner width `ffn`, of which `active` compute a token. shared_ffn: inner width of the MLP that computes
    every token beside them (0: none); has_shared_gate: one value per token scales its output. is_gated: experts and
    shared MLP have a gate. has_fused_gates: the shared MLP's is one kernel. imbalance: rows of the busiest rank over
    the mean, where several ranks divide the experts. has_biases: the router and both products of experts have biases,
    and plain operations make their gates (GPT-OSS).
    """

    experts: int
    active: int
    ffn: int
    is_gated: bool = True
    shared_ffn: int = 0
    has_shared_gate: bool = False
    imbalance: float = IMBALANCE
    has_fused_gates: bool = False
    has_biases: bool = False

    @property
    def ups(self) -> int:
        """Products with the input that an expert makes: gate and up, or up alone."""
        return 2 if self.is_gated else 1


def expert_parts(grid: GridSizes) -> int:
    """Into how many parts x and y cut each expert's weights; expert_z cuts them further."""
    return grid.expert_x * grid.y


def rows_of_rank(shape: MoeShape, grid: GridSizes, tokens: float) -> float:
    """Rows that the experts of the busiest rank compute, of `tokens` of each part of the batch.

    Ranks of x that cut experts compute the same rows; those that fold into expert have other ones.
    """
    folded = grid.x // grid.expert_x
    return tokens * shape.active / folded * (shape.imbalance if grid.expert > 1 else 1.0)


def distinct_ranks(shape: MoeShape, grid: GridSizes) -> float:
    """Mean number of the ranks of `expert` that have experts of a token, if all choices are equally likely."""
    others = shape.experts - shape.experts // grid.expert
    return grid.expert * (1 - comb(others, shape.active) / comb(shape.experts, shape.active))


def places_of_rank(shape: MoeShape, grid: GridSizes, tokens: float) -> float:
    """Tokens that the busiest rank's experts receive, those gathered over x included, of `tokens` of each part of the
    batch: never more than there are."""
    folded = grid.x // grid.expert_x
    most = distinct_ranks(shape, grid) * (shape.imbalance if grid.expert > 1 else 1.0)
    return tokens / folded * min(most, grid.expert)


@dataclass(frozen=True)
class MoeLayer(BlockLayer):
    """A router, the experts that it chooses, and a shared MLP that every token passes."""

    hidden: int
    shape: MoeShape

    @property
    def shared(self) -> MlpLayer | None:
        """The MLP that every token passes."""
        shape = self.shape
        if not shape.shared_ffn:
            return None
        return MlpLayer(self.hidden, shape.shared_ffn, shape.is_gated, False, False, shape.has_fused_gates)

    def linears(self) -> tuple[Linear, ...]:
        return self.shared.linears() if self.shared else ()

    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        shape, hidden = self.shape, self.hidden
        of_experts = (shape.experts * shape.ups, shape.ffn, hidden), (shape.experts, hidden, shape.ffn)
        return (*super().matrices(), (1, shape.experts, hidden), *of_experts)

    def expert_tensors(self) -> tuple[int, ...]:
        """Numbers in each of the parameters that `expert`, x, y and expert_z divide: gate and up in one, and down."""
        shape = self.shape
        of_expert = self.hidden * shape.ffn
        return shape.experts * shape.ups * of_expert, shape.experts * of_expert

    def expert_biases(self) -> tuple[int, int]:
        """Numbers in the biases of both products, which `expert` divides; x cuts the first one, and y the second."""
        shape = self.shape
        experts = shape.experts * shape.has_biases
        return experts * shape.ups * shape.ffn, experts * self.hidden

    @property
    def whole_weights(self) -> int:
        """Numbers of what every rank has whole: the router's weight, and the shared MLP's gate."""
        return self.hidden * (self.shape.experts + self.shape.has_shared_gate)

    @property
    def whole_parameters(self) -> int:
        """The same with the router's bias."""
        return self.whole_weights + self.shape.experts * self.shape.has_biases

    @property
    def active_weights(self) -> int:
        """The weights that one token is multiplied with, without the shared MLP's, which are linears."""
        shape = self.shape
        return self.whole_weights + shape.active * (shape.ups + 1) * shape.ffn * self.hidden

    def expert_products(self, grid: GridSizes, tokens: float) -> Sequence[tuple[float, float, float, float]]:
        """The grouped products of one forward pass on the busiest rank: experts, rows of each, outputs and inputs."""
        shape = self.shape
        experts = shape.experts / grid.expert
        rows = rows_of_rank(shape, grid, tokens) / experts
        hidden, ffn = self.hidden / grid.y, shape.ffn / grid.expert_x
        return (experts, rows, shape.ups * ffn, hidden), (experts, rows, hidden, ffn)

    def router_product(self, grid: GridSizes, tokens: float, token_parts: int) -> tuple[float, float, float]:
        """m, n and k of the router's product, which all ranks of y compute, and ranks of x, too, except for sharded
        tokens."""
        return tokens / token_parts, self.shape.experts, self.hidden

    def _rows(self, grid: GridSizes) -> float:
        return rows_of_rank(self.shape, grid, 1.0)

    def kept(self, grid: GridSizes, token_parts: int) -> float:
        # Of each row the input, gate and up, their product (as the kernel for SiLU does it), and the output, not
        # weighted; of each token the router's input and scores, in fp32 before and after the softmax.
        shape, hidden = self.shape, self.hidden / grid.y
        ffn = shape.ffn / grid.expert_x
        # Plain operations also keep gate and up as clamped, the gate's sigmoid, and both factors.
        inner = 7 if shape.has_biases else 3 if shape.is_gated else 2
        of_rows = self._rows(grid) * (2 * hidden + inner * ffn)
        # GPT-OSS's takes what the experts take, and keeps its choices alone: numbers of experts, and of rows in int64.
        of_router = (
            10 * shape.active if shape.has_biases else STATISTIC * (self.hidden + 2 * shape.experts)
        ) / token_parts
        whole_input = self.hidden / token_parts * (grid.y > 1)
        shared = self.shared.kept(grid, token_parts) if self.shared else 0.0
        return of_rows + of_router + whole_input + shared

    def exchanged(self, grid: GridSizes, token_parts: int) -> tuple[float, float]:
        """Numbers a token that collectives bring, and recomputation that keeps them does not send again; and how many
        of them are among `kept`."""
        hidden, x, parts = self.hidden / grid.y, grid.x, grid.expert_x
        if grid.expert == 1:  # sums of outputs over x alone
            return (hidden if x > 1 else 0.0), 0.0
        # Places as received, gathered over x, scattered, returned, and tokens gathered over x. Rows are copied again.
        places = places_of_rank(self.shape, grid, 1.0) * hidden
        scattered = 2 * places / parts if parts > 1 else 0.0
        returned = distinct_ranks(self.shape, grid) * hidden / x
        tokens = hidden if x > 1 and token_parts == 1 else 0.0
        return places + scattered + returned + tokens, 0.0

    def element_wise(self, grid: GridSizes, token_parts: int) -> tuple[float, float]:
        # Rows are copied out of the places, and places out of the tokens; both are added up on the way back.
        shape, hidden = self.shape, self.hidden / grid.y
        ffn, rows = shape.ffn / grid.expert_x, self._rows(grid)
        places = places_of_rank(shape, grid, 1.0) if grid.expert > 1 else 0.0
        moved = 2 * 2 * (rows + places) * hidden
        of_router = 6 * STATISTIC * shape.experts
        forward = moved + 3 * shape.ups * rows * ffn + of_router
        backward = moved + (3 * shape.ups + 1) * rows * ffn + 2 * rows * hidden + of_router
        if shape.has_biases:  # added, and summed for their gradients; and the further operations of the gate
            of_products = rows * (shape.ups * ffn + hidden)
            forward, backward = forward + 2 * of_products + 8 * rows * ffn, backward + of_products + 16 * rows * ffn
        if self.shared:
            more, more_back = self.shared.element_wise(grid, token_parts)
            forward, backward = forward + more, backward + more_back
        return forward, backward

    def deferred(self, grid: GridSizes) -> float:
        """Numbers a token that its experts' weights' gradients are made of: inputs and gradients of both products."""
        ffn = self.shape.ffn / grid.expert_x
        return self._rows(grid) * (2 * self.hidden / grid.y + (1 + self.shape.ups) * ffn)

    def widest(self, grid: GridSizes) -> float:
        rows = self._rows(grid) * self.shape.ups * self.shape.ffn / grid.expert_x
        return max(rows, self.shared.widest(grid) if self.shared else 0.0)

    def growth(self, grid: GridSizes) -> float:
        # The gradient by the experts' outputs, which are freed then; the gradients of what is inside take the place of
        # what is freed.
        hidden, ffn = self.hidden / grid.y, self.shape.ffn / grid.expert_x
        return self._rows(grid) * (hidden + 4 * ffn if self.shape.has_biases else max(hidden, ffn))


@dataclass(frozen=True)
class LatentShape:
    """Sizes of DeepSeek's latent attention. q_rank: of the queries' latent features (0: queries are made directly).

    kv_rank: of keys' and values'. Of each head a query and key have `nope` features and `rope` rotary ones, of which
    keys have one copy for all heads, and a value has `value`.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class LatentAttentionLayer(BlockLayer):
    """Multi-head latent attention: linears to latent features, which every rank of x has whole, and from them to heads,
    which x cuts."""

    hidden: int
    heads: int
    shape: LatentShape
    has_bias: bool = False

    def linears(self) -> tuple[Linear, ...]:
        shape, hidden, heads, bias = self.shape, self.hidden, self.heads, self.has_bias
        queries, keys_values = heads * (shape.nope + shape.rope), heads * (shape.nope + shape.value)
        latent = shape.kv_rank + shape.rope
        if shape.q_rank:
            of_queries = [
                Linear("q_a", hidden, shape.q_rank, False, bias, shape.q_rank, keeps_outputs_whole=True),
                Linear("q_b", shape.q_rank, queries, False, False, heads, takes_whole_inputs=True),
            ]
        else:
            of_queries = [Linear("q", hidden, queries, False, False, heads)]
        return (
            *of_queries,
            Linear("kv_a", hidden, latent, False, bias, latent, keeps_outputs_whole=True),
            Linear("kv_b", shape.kv_rank, keys_values, False, False, heads, takes_whole_inputs=True),
            Linear("out", heads * shape.value, hidden, True, bias, hidden),
        )

    def _heads(self, grid: GridSizes) -> tuple[float, float]:
        """Features of all queries, and of all values, on a rank."""
        return self.heads * (self.shape.nope + self.shape.rope) / grid.x, self.heads * self.shape.value / grid.x

    def kept(self, grid: GridSizes, token_parts: int) -> float:
        # Latent features before and after their norms; queries as made and as rotated; keys and values as made, and
        # keys with the rotary features; the result; and of each head a sum of exponentials in fp32.
        shape, (queries, values) = self.shape, self._heads(grid)
        latent = 2 * (shape.q_rank + shape.kv_rank) + shape.rope
        made = self.heads * shape.nope / grid.x + values
        return latent + 2 * queries + made + queries + values + STATISTIC * self.heads / grid.x

    def element_wise(self, grid: GridSizes, token_parts: int) -> tuple[float, float]:
        queries, values = self._heads(grid)
        latent = 2 * (self.shape.q_rank + self.shape.kv_rank)
        passes = 2 * 2 * queries + values + 2 * latent
        return passes, 2 * passes

    def widest(self, grid: GridSizes) -> float:
        return 0.0  # never more than the MLP's

    def exchanged_keys(self, grid: GridSizes) -> float:
        return sum(self._heads(grid))

    def latents(self, grid: GridSizes) -> tuple[float, float]:
        return self.shape.kv_rank + self.shape.rope, self.heads * (self.shape.nope + self.shape.value) / grid.x

    def attention_flops(self, grid: GridSizes, tokens: int, seq_len: int) -> float:
        # Queries with keys, and weights with values; a causal mask leaves half. Repeated on every rank of y.
        return tokens * seq_len * sum(self._heads(grid))
