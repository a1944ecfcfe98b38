# SPDX-License-Identifier: Apache-2.0
"""Closed forms of the bubbles of schedules, as their papers have them."""

from stretto.schedules.generators import check_numbers


def bubble_time(
    name: str,
    pipe: int,
    micro_batches: int,
    *,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    virtual_stages: int | None = None,
    overlapped: float | None = None,
) -> float:
    """Return how long the rank that waits the most waits in a step, exactly, where messages take no time.

    F, I, W and B = I + W are the times of a stage, p is the number of ranks, M that of micro-batches and v that of
    stages on a rank. Papers on zero-bubble schedules write B for I.

    name, pipe, micro_batches, virtual_stages: as of `build_schedule`.
    forward, backward_input, backward_weight: F, I and W of each stage, in any unit, which is that of the result.
    overlapped: of "dualpipe-v", how long an overlapped pair takes (F&B); None computes one after the other.

    - gpipe, 1f1b: (p - 1) (F + B), whatever the warm-up (Narayanan et al., 2021, section 2.2; Singh, equation 4.6).
    - interleaved: (p - 1) (F + B), where F and B are 1 / v of what they are with one stage on a rank; with M < p,
      (v - 1) (p - M) (F + B) more.
    - zb-h1: (p - 1) (F + I - W) where W <= F and W <= I (Qi et al., 2024, section 3), otherwise (p - 1) max(F, I);
      with M < p, (p - M) min(F, I, W) more.
    - zb-v: where F = I = W, (p - 1) F, and at least 2 (2p - 1 - M) F. It is all before a rank's first unit and after
      its last where M >= 2p - 1.
    - dualpipe-v: where F = I, one after the other as zb-h1, and at once (p - 1) (F&B + B - 3W) where W <= F and
      B <= F&B <= F + B (DeepSeek-AI, 2024, table 2).
    """
    f, i, w = forward, backward_input, backward_weight
    stages = check_numbers(name, pipe, micro_batches, virtual_stages)
    missing = max(0, pipe - micro_batches)
    split = (pipe - 1) * max(f + i - w, f, i)
    if name in ("gpipe", "1f1b"):
        return (pipe - 1) * (f + i + w)
    if name == "interleaved":
        return (pipe - 1 + (stages - 1) * missing) * (f + i + w)
    if name == "zb-h1":
        return split + missing * min(f, i, w)
    if name == "zb-v" and f == i == w:
        return f * max(pipe - 1, 2 * (2 * pipe - 1 - micro_batches))
    if name == "dualpipe-v" and f == i and overlapped is None:
        return split
    if name == "dualpipe-v" and overlapped is not None and f == i >= w and i + w <= overlapped <= f + i + w:
        return (pipe - 1) * (overlapped + i - 2 * w)
    raise AssertionError(f"no formula is known for {name} with these times")
