# SPDX-License-Identifier: Apache-2.0
"""Messages of the algorithms of a collective, round by round, among n ranks that are counted from 0.

Sizes are fractions of the collective's bytes: the whole buffer of one rank (of all_gather its output, of reduce_scatter
its input). Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), has
the algorithms and their times.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stretto.suggestions import name_known

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
MAX_MESSAGES = 1 << 24  # of one collective: some 10 GB
Sent = tuple[int, int, float]  # source, target, fraction of the bytes


@dataclass(frozen=True)
class MessageRound:
    """Messages that ranks send at one time, and how many times in a row they do."""

    messages: tuple[Sent, ...]
    repeats: int = 1


@dataclass(frozen=True)
class MessagePattern:
    """Rounds of an algorithm. is_chain: a rank sends only what it received in the round before, as in a ring.

    Otherwise a message waits for everything that its source has received.
    """

    rounds: tuple[MessageRound, ...]
    is_chain: bool = False


def find_pattern(collective: str, algorithm: str, n: int) -> MessagePattern:
    """The pattern of an algorithm of one level: ring, direct or recursive.

    ValueError for an unknown name, and for numbers of ranks for which recursive doubling is not defined.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"there is no collective {collective!r}{name_known(collective, COLLECTIVES)}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"there is no algorithm {algorithm!r} of one level{name_known(algorithm, ALGORITHMS)}")
    if n == 1:
        return MessagePattern(())
    return ALGORITHMS[algorithm](collective, n)


def check_messages(what: str, ranks: int, messages: int) -> None:
    """Raise ValueError for more messages than memory has room for, before they are made."""
    if messages > MAX_MESSAGES:
        raise ValueError(
            f"{what} among {ranks} ranks sends {messages} messages; {MAX_MESSAGES} are the most that are simulated"
        )


def _ring(collective: str, n: int) -> MessagePattern:
    """Every rank sends to the next one. broadcast: a chain from rank 0; pipelined by `splits`."""
    match collective:
        case "broadcast":
            return MessagePattern(tuple(MessageRound(((rank, rank + 1, 1.0),)) for rank in range(n - 1)), is_chain=True)
        case "all_to_all":  # in round k, all data except what has arrived moves one rank further
            check_messages("an all_to_all by a ring", n, n * (n - 1))
            return MessagePattern(tuple(_to_next(n, (n - k) / n) for k in range(1, n)), is_chain=True)
        case _:
            repeats = (2 if collective == "all_reduce" else 1) * (n - 1)
            return MessagePattern((_to_next(n, 1 / n, repeats),), is_chain=True)


def _to_next(n: int, part: float, repeats: int = 1) -> MessageRound:
    return MessageRound(tuple((rank, (rank + 1) % n, part) for rank in range(n)), repeats)


def _direct(collective: str, n: int) -> MessagePattern:
    """Every rank sends to every other directly, each beginning with the rank after it."""
    if collective == "broadcast":
        return MessagePattern((MessageRound(tuple((0, target, 1.0) for target in range(1, n))),))
    check_messages("a direct collective", n, n * (n - 1))
    everything = MessageRound(tuple((rank, (rank + step) % n, 1 / n) for step in range(1, n) for rank in range(n)))
    return MessagePattern((everything,) * (2 if collective == "all_reduce" else 1))


def _recursive(collective: str, n: int) -> MessagePattern:
    """Logarithmic numbers of rounds.

    all_gather: recursive doubling; reduce_scatter: recursive halving; all_reduce: both (Rabenseifner); broadcast: a
    binomial tree; all_to_all: Bruck's algorithm. The last two take any number of ranks.
    """
    match collective:
        case "broadcast":
            distances = [1 << k for k in reversed(range((n - 1).bit_length()))]
            steps = ([(rank, rank + far, 1.0) for rank in range(0, n, 2 * far) if rank + far < n] for far in distances)
            return MessagePattern(tuple(MessageRound(tuple(each)) for each in steps))
        case "all_to_all":
            parts = (sum(block >> k & 1 for block in range(n)) / n for k in range((n - 1).bit_length()))
            steps = ([(rank, (rank + (1 << k)) % n, part) for rank in range(n)] for k, part in enumerate(parts))
            return MessagePattern(tuple(MessageRound(tuple(each)) for each in steps))
    if n & (n - 1):
        fewer = 1 << (n.bit_length() - 1)
        raise ValueError(
            f"{collective} by recursive doubling is for a power of two of ranks, not {n}; {fewer} or {2 * fewer} "
            "would do, or a ring"
        )
    doubling = [
        MessageRound(tuple((rank, rank ^ far, far / n) for rank in range(n)))
        for far in (1 << k for k in range(n.bit_length() - 1))
    ]
    gather, scatter = doubling, doubling[::-1]
    rounds = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": scatter + gather}[collective]
    return MessagePattern(tuple(rounds))


ALGORITHMS: dict[str, Callable[[str, int], MessagePattern]] = {
    "ring": _ring,
    "direct": _direct,
    "recursive": _recursive,
}
