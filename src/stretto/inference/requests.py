# SPDX-License-Identifier: Apache-2.0
"""A request for tokens: its prompt, its limits, and how its tokens are drawn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Integral
from typing import Any

from stretto.suggestions import require_fields

_LEAST_TEMPERATURE = 1e-30  # logits that are divided by less may be infinite, and then no longer differ


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling: the token with the highest logit (temperature 0), or a random one.

    temperature: divides the logits. top_k: draw among the k highest (None: all), and those equal to the k-th. top_p:
    among the fewest of these whose probabilities reach it. seed: of this request's random numbers, which depend on it
    and on the token's place in the request alone.

    Raises ValueError for others.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_fields(self)
        if not isfinite(self.temperature) or (self.temperature != 0 and self.temperature < _LEAST_TEMPERATURE):
            raise ValueError(
                f"temperature is {self.temperature}, but must be finite, and 0 (the best token) or at least "
                f"{_LEAST_TEMPERATURE}; 0 would do"
            )
        if self.top_k is not None and not 1 <= self.top_k < 2**63:
            raise ValueError(f"top_k is {self.top_k}, but must be from 1 to 2^63 - 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but must be above 0 and at most 1; 1 draws from all tokens")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, but must be of 64 bits; {self.seed % 2**63} would do")

    @property
    def is_random(self) -> bool:
        """True if tokens are drawn at random."""
        return self.temperature > 0


@dataclass(eq=False)
class Request:
    """A prompt that an engine continues. `tokens` grows by the tokens of each step, up to one of `stop`, inclusive;
    its reader may remove them from it.

    log_probabilities: of these tokens, by the model's own logits (temperature 1), if they were asked for. is_done: set
    to True, on all ranks of x before the same step, it cancels the request.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: frozenset[int] = frozenset()
    wants_log_probabilities: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    is_done: bool = False
    _given: int = 0

    @property
    def positions(self) -> int:
        """The tokens whose keys and values the cache will hold: all but the last one."""
        return len(self.prompt) + self.max_new_tokens - 1

    def add(self, token: int, log_probability: float) -> None:
        """Take the next token."""
        self.tokens.append(token)
        self._given += 1
        if self.wants_log_probabilities:
            self.log_probabilities.append(log_probability)
        self.is_done = token in self.stop or self._given == self.max_new_tokens


def parse_prompt(prompt: Any, vocab: int) -> list[int]:
    """The ids of a prompt, a sequence or a tensor of one dim. ValueError for an empty one, and for other ids."""
    ids = _list_ids(prompt, "a prompt", "one list for each prompt", vocab)
    if not ids:
        raise ValueError("a prompt is empty, but must have at least one token (the model's first, say)")
    return ids


def parse_stop(stop: Any, vocab: int) -> frozenset[int]:
    """The ids that end a request, of a sequence or a tensor. ValueError for what is no token id, and would end none."""
    return frozenset(_list_ids(stop, "stop", "() for none", vocab))


def _list_ids(given: Any, name: str, rule: str, vocab: int) -> list[int]:
    if hasattr(given, "tolist"):
        given = given.tolist()
    if not isinstance(given, Iterable):
        raise ValueError(f"{name} is {given!r}, but must be a list of token ids: {rule}")
    ids = []
    for token in given:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise ValueError(f"{name} has {token!r}, but must be token ids, integers: {rule}")
        ids.append(int(token))
        if not 0 <= ids[-1] < vocab:
            raise ValueError(f"token {token} of {name} is outside the vocabulary [0, {vocab}); {vocab - 1} is its last")
    return ids
