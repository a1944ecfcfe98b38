# SPDX-License-Identifier: Apache-2.0
"""The paged cache: keys and values of all layers, in pages of a few tokens that requests own while they run."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from stretto.ops import paged_attention
from stretto.ops.attention.kernels import attend_to_itself
from stretto.ops.decoding.paged_attention import find_obstacle
from stretto.ops.decoding.paged_kernels import PagedCall, attend_new_tokens
from stretto.ops.decoding.rotary_cache import rotate_and_store, suits_kernel
from stretto.ops.rotary import rotate_halves


class StepTokens(NamedTuple):
    """The places of a step's tokens, and what they attend to; int32 but for `places`.

    places: int64 [tokens], rows of the cache. starts: [rows + 1], the first token of each row of the batch; None if
    each row has one. lengths: [rows], how many tokens of its request the cache holds with this step's. block_table:
    [rows, pages], its pages. is_start: these are the first tokens of one request, with no others before them.
    """

    places: Tensor
    starts: Tensor | None
    lengths: Tensor
    block_table: Tensor
    is_start: bool


class CacheShape(NamedTuple):
    """Shape of a layer's keys and values on a rank: heads, and features of a key's and of a value's."""

    heads: int
    key: int
    value: int


@dataclass
class CurrentStep:
    """The step that is being computed, which all layers read. arrivals: see `attend_new_tokens`; None: no kernels."""

    tokens: StepTokens | None = None
    arrivals: Tensor | None = None


class LayerCache:
    """One layer's part of the cache: keys [pages, page, heads, key's head] and values, and attention to them."""

    def __init__(
        self, shape: CacheShape, pages: int, page: int, like: Tensor, step: CurrentStep, *, is_invariant: bool
    ) -> None:
        self.keys, self.values = (
            like.new_zeros(pages, page, shape.heads, features) for features in (shape.key, shape.value)
        )
        self._step, self._is_invariant = step, is_invariant
        self._angles: tuple[Tensor, Tensor] | None = None

    def rotate_later(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the angles [1, tokens, d] for the call that follows, which rotates as it stores."""
        self._angles = cos[0].contiguous(), sin[0].contiguous()
        return query, key

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """Store this step's keys and values, and attend to those of each token's request up to its own."""
        tokens = self._step.tokens
        if tokens is None:
            raise ValueError("the engine's model was called outside of a step: call generate, or submit and step")
        angles, self._angles = self._angles, None
        if angles is not None and tokens.starts is None and self._step.arrivals is not None:
            scale = query.shape[2] ** -0.5 if scale is None else scale
            given = self.keys, self.values, tokens.block_table, tokens.lengths, None, scale, window or 0
            call = PagedCall(query, *given, is_invariant=self._is_invariant)
            if not find_obstacle(call):
                return attend_new_tokens(call, key, value, *angles, self._step.arrivals)
        if angles is None:
            self.keys.flatten(0, 1).index_copy_(0, tokens.places, key)
            self.values.flatten(0, 1).index_copy_(0, tokens.places, value)
            query = query.contiguous()
        else:
            query = rotate_and_store(query, key, value, *angles, self.keys, self.values, tokens.places)
        if tokens.is_start and not self._is_invariant and (window is None or window >= len(query)):
            if angles is not None:
                key = self.keys.flatten(0, 1)[tokens.places]  # rotated
            if (attended := attend_to_itself(query, key, value, scale)) is not None:
                return attended
        return paged_attention(
            query,
            self.keys,
            self.values,
            tokens.block_table,
            tokens.lengths,
            query_offsets=tokens.starts,
            scale=scale,
            window=window,
            invariant=self._is_invariant,
        )


class ShapeProbe:
    """Stands for the attention of a model's layers in one pass, to see what they will store.

    kind: the attention's class, for errors. is_over: after that pass. can_rotate: attention was handed what it had
    rotated, in a form that `rotate_and_store` takes.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.is_over = False
        self.shape: CacheShape | None = None
        self.like: Tensor | None = None
        self.can_rotate = False
        self._rotated: tuple[Tensor, ...] = ()

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate, and note what was returned."""
        turned = rotate_halves(query, key, cos, sin)
        self._rotated = (*turned, query, key, cos)
        return turned

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """Note the shapes. Returns zeros of the output's. ValueError for a second call."""
        if self.is_over:  # else a model whose engine could not be made would go on without attention
            raise ValueError(
                "this model's attention has been replaced for an engine that could not be made: build the model again"
            )
        if self.shape is not None:
            raise ValueError(
                f"an engine cannot run this model: {self._kind} attends twice in a pass, as differential attention "
                "does, and a layer of the paged cache has the keys and values of one: transformers' generate would do"
            )
        if self._rotated:
            turned_query, turned_key, query_before, key_before, cos = self._rotated
            is_same = (turned_query.data_ptr(), turned_key.data_ptr()) == (query.data_ptr(), key.data_ptr())
            heads = query_before[0].transpose(0, 1), key_before[0].transpose(0, 1)
            self.can_rotate = is_same and suits_kernel(*heads, value, cos)
            self._rotated = ()
        self.shape, self.like = CacheShape(key.shape[1], key.shape[2], value.shape[2]), key
        return value.new_zeros(*query.shape[:2], value.shape[2])
