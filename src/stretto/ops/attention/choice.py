# SPDX-License-Identifier: Apache-2.0
"""Selects the way of a call of context attention: the fastest measured, else one predicted from the machine's speeds.

Measured times are those of `tune_attention`, and of first calls (`stretto.ops.confirmation`); all ranks take rank 0's.
"""

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from stretto.ops import confirmation
from stretto.ops.choices import find_agreed, find_way
from stretto.ops.operator import exchange_text, find_group, find_known, require_agreement
from stretto.ops.prediction import FITTED, Speeds
from stretto.tuning import Autotuner, TimeKeys, TuningStore, machine_key

logger = logging.getLogger("stretto.ops")

# A layer's keys and values are gathered where they take at most so many bytes: a ring holds two ranks' of them.
_GATHERED_BYTES = 4 << 30
_NEAR = 1.5  # a measurement counts for sequences of up to so many times the length, or as short
_CLEARLY_FASTER = 0.9  # the predicted part of the default's time with which another way is taken
_BACKWARD = 2.5  # products of a backward pass for each one forward

Times = dict[tuple[str, int], dict[str, float]]
"""Seconds by (the call's kind, positions of a rank) and way."""

Run = Callable[[str], object]
"""Computes a call a way."""


class AttentionProblem(NamedTuple):
    """A call of one rank: shapes of q, k and v, of `length` positions. trains: whether it is differentiated."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    size: int
    value_size: int
    dtype: torch.dtype
    causal: bool
    window: int | None
    trains: bool
    ranks: int

    @property
    def kind(self) -> str:
        """All but the length, as a store names it."""
        mask = f"window {self.window}" if self.window is not None else "causal" if self.causal else "full"
        return (
            f"context_attention {self.batch}x{self.heads}/{self.kv_heads}x{self.size}/{self.value_size} "
            f"{str(self.dtype).removeprefix('torch.')} {mask}{' training' * self.trains} {self.ranks} ranks"
        )

    @property
    def degree(self) -> int:
        """The number of ranks that exchange heads."""
        return math.gcd(self.heads, self.kv_heads, self.ranks)

    @property
    def name(self) -> str:
        """The kind and the length."""
        return f"{self.kind} length={self.length}"

    def count_bytes(self) -> int:
        """The bytes that its ways allocate at most: all keys and values, its own rows, gradients, and sums in fp32."""
        rows = self.batch * self.length * (self.size + self.value_size)
        return 4 * rows * (self.heads + self.kv_heads * self.ranks) * max(self.dtype.itemsize, 2)

    def list_ways(self) -> list[str]:
        """The ways that a call may take, the default first."""
        whole = self.batch * self.kv_heads * self.length * self.ranks * (self.size + self.value_size)
        gathers = whole * self.dtype.itemsize <= _GATHERED_BYTES
        return ["all_gather"] * gathers + ["ring"] + ["ulysses"] * (self.degree > 1)


def choose_way(
    call: AttentionProblem,
    group: str,
    device: torch.device,
    prepare: Callable[[], Run] | None = None,
    *,
    can_time: bool = True,
) -> str:
    """The way of a call: that of an equal earlier one, a checkpoint's, the fastest measured, or the predicted one.

    prepare: makes what computes the call a way, to time it, if can_time on all ranks; all give one, or none does.
    Collective at a group's first call, and with `prepare` at the first of a kind.
    """
    ways = call.list_ways()
    if call.ranks == 1 or (device.type == "cpu" and not find_times(group, device)):
        return ways[0]

    def can_measure() -> bool:
        return can_time and confirmation.can_time_calls(device, call.count_bytes())

    def choose() -> str:
        times = find_times(group, device)
        measured = _find_nearest(call, ways, times)
        if measured is None and prepare is not None:
            if require_agreement(call.name, False, group, device, can_measure=can_measure).is_measured:
                run = prepare()
                seconds = confirmation.measure_choices([partial(run, way) for way in ways], group, device)
                if seconds is None:
                    logger.warning("%s is not confirmed: some rank could not time it, and runs as predicted", call.kind)
                else:
                    keep_times(call, dict(zip(ways, seconds, strict=True)), times, group, device)
            measured = _find_nearest(call, ways, times)
        speeds = find_agreed(group, device).speeds
        if measured is None and speeds is not None:
            predicted = {way: predict(call, way, speeds) for way in ways}
            best = min(ways, key=predicted.__getitem__)
            chosen = best if predicted[best] < _CLEARLY_FASTER * predicted[ways[0]] else ways[0]
        else:
            chosen = ways[0] if measured is None else min(measured, key=measured.__getitem__)
        logger.debug("group %s: %s runs as %s: %s", group, call.kind, chosen, measured or "predicted")
        return chosen

    return find_way(call.name, ways, choose, group, device)


def keep_times(
    call: AttentionProblem,
    seconds: dict[str, float],
    times: Times,
    group: str,
    device: torch.device,
    store: TuningStore | None = None,
) -> None:
    """Keep seconds by way, the same on all ranks, for the group's later calls, and in rank 0's store for later runs."""
    times[call.kind, call.length] = seconds
    if dist.get_rank(find_group(group)) == 0:
        _autotuner(device, store).keep((call.kind, call.length), seconds)


def find_times(group: str, device: torch.device) -> Times:
    """The group's measured times, which it may add to. Collective at its first call."""

    def agree() -> Times:
        members = find_group(group)
        read = _autotuner(device).read() if dist.get_rank(members) == 0 else {}
        rows = json.loads(exchange_text(json.dumps([[*key, times] for key, times in read.items()]), group, device)[0])
        return {(kind, length): times for kind, length, times in rows}

    return find_known(group, device, "attention's times", agree)


def _find_nearest(call: AttentionProblem, ways: list[str], times: Times) -> dict[str, float] | None:
    """The times of the ways at the nearest length that was measured, if it is near enough."""
    lengths = [length for kind, length in times if kind == call.kind and set(ways) & set(times[kind, length])]
    nearest = min(lengths, key=lambda length: abs(math.log(length / call.length)), default=0)
    if not 1 / _NEAR <= nearest / call.length <= _NEAR:
        return None
    return {way: seconds for way, seconds in times[call.kind, nearest].items() if way in ways}


def predict(call: AttentionProblem, way: str, speeds: Speeds) -> float:
    """Seconds of a call: products, and what of its exchange they do not hide."""
    whole = call.length * call.ranks
    seen = whole / 2 if call.causal else whole
    others = (whole - call.length) * (0.75 if call.causal else 1.0)  # keys that a rank needs of others, zig-zag
    if call.window is not None:
        seen, others = min(seen, call.window), min(others, 2.0 * call.window)
    row = call.batch * call.kv_heads * (call.size + call.value_size) * call.dtype.itemsize
    flops = 2 * call.batch * call.heads * call.length * seen * (call.size + call.value_size)
    products, exchange = flops / (FITTED.product * speeds.flops), others * row / speeds.link
    backward = _BACKWARD * call.trains
    if way == "ulysses":
        sizes = (call.heads + call.kv_heads) * (call.size + call.value_size)
        sent = call.batch * call.length * sizes * call.dtype.itemsize * (call.degree - 1) / call.degree
        # Of q, k, v and the output: the other half's attention hides it.
        half = sent / (FITTED.library_link * speeds.link) / 2
        heads = sum(
            4 * FITTED.library + half + max(0.0, half - computed)
            for computed in (products, backward * products)[: 1 + call.trains]
        )
        sets = call.ranks // call.degree
        return (1 + backward) * products + heads + _expose(products, exchange, sets, 1, backward)
    steps = call.ranks - 1 if way == "ring" else 1
    merged = steps * 2 * call.batch * call.heads * call.length * call.value_size * 4  # fp32, read and written
    exposed = _expose(products, exchange, call.ranks, steps, backward)
    return (1 + backward) * products + merged / (FITTED.memory * speeds.memory) + exposed


def _expose(products: float, exchange: float, ranks: int, steps: int, backward: float) -> float:
    """Exposed seconds of an exchange: forward under a rank's own keys, or others' of the step before; backward keys and
    their gradients under half as much each."""
    if ranks == 1:
        return 0.0
    forward = steps * max(0.0, exchange / steps - products / ranks)
    return forward + (2 * steps * max(0.0, exchange / steps - backward * products / ranks / 2) if backward else 0.0)


def _autotuner(device: torch.device, store: TuningStore | None = None) -> Autotuner[tuple[str, int], str]:
    return Autotuner(machine_key(device), TimeKeys(_name_time, _parse_time_key), store)


def _name_time(problem: tuple[str, int], way: str) -> str:
    kind, length = problem
    return f"{kind} length={length} by {way}"


def _parse_time_key(key: str) -> tuple[tuple[str, int], str]:
    """The problem and the way. ValueError for any other key, since anyone may have written the file."""
    problem, _, way = key.rpartition(" by ")
    kind, _, length = problem.rpartition(" length=")
    if not kind.startswith("context_attention ") or not length.isdecimal() or not int(length):
        raise ValueError(f"{key!r} names no times of attention")
    return (kind, int(length)), way
