# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench inference`: the model, batches and lengths."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Layers, Option, Rounds, require_known, require_least
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.quantities import MAX_LENGTH
from stretto.suggestions import name_known

PEERS = ("generate",)


@dataclass(frozen=True)
class InferenceSetting:
    """Settings of `stretto bench inference`."""

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
