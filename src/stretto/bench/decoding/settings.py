# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench decoding`, calls of attention and of products as a decoding step has them, and of
`stretto bench inference`, whole steps of an engine."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Layers, Option, Rounds, require_known, require_least
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.quantities import MAX_COUNT, MAX_LENGTH
from stretto.suggestions import name_known

WHAT = ("attention", "products")
PEERS = ("generate",)


@dataclass(frozen=True)
class DecodingSetting:
    """Settings of `stretto bench decoding`."""

    only: Annotated[tuple[str, ...], Option("attention, products, with commas.", "--only")] = WHAT
    batches: Annotated[tuple[int, ...], Option("Tokens of a step, one a sequence, with commas.")] = (1, 8, 64)
    context: Annotated[int, Option("Tokens in each sequence's cache.", least=1, most=MAX_LENGTH)] = 1024
    heads: Annotated[int, Option("Heads of queries, of this rank.", least=1, most=MAX_COUNT)] = 32
    kv_heads: Annotated[int, Option("Heads of keys and values, of this rank.", least=1, most=MAX_COUNT)] = 8
    size: Annotated[int, Option("Numbers of a head.", least=16, most=256)] = 128
    page: Annotated[int, Option("Tokens of a page.", least=1, most=MAX_LENGTH)] = 16
    hidden: Annotated[int, Option("n of products, and columns of the norm.", least=16, most=MAX_COUNT)] = 4096
    depths: Annotated[tuple[int, ...], Option("k of products, of all ranks, with commas.")] = (4096, 14336)
    has_variants: Annotated[bool, Option("Time other tiles of the kernels too.", "--variants/--no-variants")] = False
    rounds: Rounds = 4

    def __post_init__(self) -> None:
        require_known("call", self.only, WHAT)
        require_least(1, batches=min(self.batches, default=0), depths=min(self.depths, default=0))
        if self.heads % self.kv_heads:
            least = self.kv_heads * max(1, round(self.heads / self.kv_heads))
            raise ValueError(f"--heads is a multiple of --kv-heads, {self.kv_heads}, not {self.heads}: {least} will do")


@dataclass(frozen=True)
class InferenceSetting:
    """Settings of `stretto bench inference`.

    The model has random weights. A batch decodes with `context` tokens in each request's cache at first; prompts run by
    themselves. Raises ValueError for an unknown model, and for numbers that are not positive.
    """

    model: Annotated[str, Option("A public model, with random weights.")] = "llama-3-8b"
    layers: Layers = None
    batches: Annotated[tuple[int, ...], Option("Requests that decode at a time, with commas.")] = (1, 8, 64)
    context: Annotated[int, Option("Tokens in the cache of a request that decodes.", least=1, most=MAX_LENGTH)] = 1024
    prompts: Annotated[tuple[int, ...], Option("Tokens of the prompts of prefills, with commas.")] = (2048,)
    new_tokens: Annotated[int, Option("Steps that decode, of which the mean counts.", least=8, most=4096)] = 64
    skip: Annotated[tuple[str, ...], Option("Peers to leave out: generate.")] = ()
    rounds: Rounds = 3

    def __post_init__(self) -> None:
        if self.model not in PUBLIC_MODELS:
            raise ValueError(f"there is no public model {self.model!r}{name_known(self.model, PUBLIC_MODELS)}")
        require_known("peer", self.skip, PEERS)
        require_least(1, batches=min(self.batches, default=0), prompts=min(self.prompts, default=1))
