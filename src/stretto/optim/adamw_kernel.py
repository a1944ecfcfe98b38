# SPDX-License-Identifier: Apache-2.0
"""The kernel of `AdamW` (Loshchilov and Hutter 2019, algorithm 2)."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from stretto.tiles.launches import find_launches, kind_of, launch_cached

BLOCK = 2048
MANY = 32
"""Small parameters that one launch updates: a launch takes the host longer than the GPU takes for a bias."""
SMALL = 16 * BLOCK
"""The most numbers of a small one."""
_FIELDS = 6  # addresses of a small parameter
_ABSENT = 1 << 62


class AdamWTensors(NamedTuple):
    """A parameter with its gradient and its first and second moments: fp32 and contiguous, of one size.

    copy: contiguous, gets the parameter, updated or not, in its own dtype; or None.
    """

    parameter: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    copy: Tensor | None = None

    @property
    def kind(self) -> tuple[bool, str]:
        """Say if it is small, and of which dtype its copy is: small ones of one kind share launches."""
        return self.parameter.numel() <= SMALL, "" if self.copy is None else str(self.copy.dtype)

    def addresses(self) -> tuple[int, ...]:
        """Return where a kernel finds it: parameter and its end, gradient, moments and copy.

        Triton compiles a kernel for each kind of every number in a tuple: of other bits, a multiple of 16, 1. All of
        these, twice an address and one, are of one kind.
        """
        parameter, gradient, first, second, copy = self
        start = parameter.data_ptr()
        others = gradient.data_ptr(), first.data_ptr(), second.data_ptr(), 0 if copy is None else copy.data_ptr()
        return tuple([2 * each + 1 if each else _ABSENT + 1 for each in (start, start + parameter.nbytes, *others)])


class Decays(NamedTuple):
    """Kernel argument: beta1, 1 - beta1, beta2, 1 - beta2 and eps."""

    beta1: Any
    rest1: Any
    beta2: Any
    rest2: Any
    eps: Any


@triton.jit
def _update_block(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, copies, at, mask, corrections, scale, failed, decays, HAS_SCALE: tl.constexpr
):
    """Update the numbers `at`, each read and written once. The other arguments are those of `launch`."""
    # After a failed wait for another rank, or in a step that is skipped, gradients are wrong: update nothing.
    there = mask if failed is None else mask & (tl.load(failed) == 0)
    now = tl.load(gradient + at, mask=there)
    if HAS_SCALE:
        now *= tl.load(scale)
    first_now = decays.beta1 * tl.load(first + at, mask=there) + decays.rest1 * now
    second_now = decays.beta2 * tl.load(second + at, mask=there) + decays.rest2 * now * now
    step_size, root_scale, keep = tl.load(corrections), tl.load(corrections + 1), tl.load(corrections + 2)
    before = tl.load(parameter + at, mask=mask)
    after = before * keep - step_size * first_now / (tl.sqrt(second_now) * root_scale + decays.eps)
    tl.store(parameter + at, after, mask=there)
    if copies is not None:  # written in any case: the host counts the copy as current
        tl.store(copies + at, tl.where(there, after, before).to(copies.dtype.element_ty), mask=mask)
    tl.store(first + at, first_now, mask=there)
    tl.store(second + at, second_now, mask=there)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, copies, corrections, scale, failed, numbers, decays,
    HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of a parameter."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _update_block(
        parameter, gradient, first, second, copies, at, at < numbers, corrections, scale, failed, decays, HAS_SCALE
    )


@triton.jit(do_not_specialize=["row", "programs"])
def _adamw_of_many(  # type: ignore[no-untyped-def]
    places, copies, row, programs, corrections, scale, failed, decays,
    HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Update up to BLOCK elements of one of MANY small parameters. The addresses are arguments: graphs replay them.

    places: `AdamWTensors.addresses` of each. copies: a tensor of the copies' dtype, or None. row: of `corrections`
    [n, 3], the first parameter's. programs: for each.
    """
    number, start = tl.program_id(0) // programs, tl.program_id(0) % programs * BLOCK
    parameter, end, gradient, first, second, copy = places[0], places[1], places[2], places[3], places[4], places[5]
    for other in tl.static_range(1, MANY):
        is_it = number == other
        parameter = tl.where(is_it, places[other * 6], parameter)
        end = tl.where(is_it, places[other * 6 + 1], end)
        gradient = tl.where(is_it, places[other * 6 + 2], gradient)
        first = tl.where(is_it, places[other * 6 + 3], first)
        second = tl.where(is_it, places[other * 6 + 4], second)
        copy = tl.where(is_it, places[other * 6 + 5], copy)
    numbers = (end - parameter) // 8  # of 4 bytes
    if start < numbers:
        at = start + tl.arange(0, BLOCK)
        target = None if copies is None else (copy >> 1).to(copies.dtype)
        _update_block(
            (parameter >> 1).to(corrections.dtype), (gradient >> 1).to(corrections.dtype),
            (first >> 1).to(corrections.dtype), (second >> 1).to(corrections.dtype), target, at, at < numbers,
            corrections + (row + number) * 3, scale, failed, decays, HAS_SCALE,
        )  # fmt: skip


def launch(
    updates: Sequence[AdamWTensors], corrections: Tensor, scale: Tensor | None, failed: Tensor | None,
    options: Mapping[str, Any],
) -> None:  # fmt: skip
    """Update parameters and their moments in place: neighbouring small ones with copies of one dtype in one launch.

    corrections: fp32 [n, 3], of each lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t) and 1 - lr x decay. scale: fp32, 0-dim,
    or None. failed: int32 [1] or None; while it is not 0, nothing is updated (`stretto.memory.failures`, and steps that
    are skipped). options: a parameter group's betas and eps. A parameter's bits are the same in either kind of launch.
    """
    (beta1, beta2), row, rows = options["betas"], 0, corrections.unbind()
    decays = Decays(beta1, 1 - beta1, beta2, 1 - beta2, options["eps"])
    constants = {"HAS_SCALE": scale is not None, "BLOCK": BLOCK}
    state = corrections if scale is None else scale, failed, decays
    for (is_small, _), found in itertools.groupby(updates, key=lambda update: update.kind):
        some = list(found)
        if is_small:
            _launch_small(some, row, corrections, state, constants)
        else:
            for number, update in enumerate(some, start=row):
                size = update.parameter.numel()
                arguments = *update, rows[number], *state[:2], size, decays
                # As `state.kernels`, products and sums are rounded each.
                launch_cached(_adamw, triton.cdiv(size, BLOCK), *arguments, **constants, enable_fp_fusion=False)
        row += len(some)


def _launch_small(
    updates: Sequence[AdamWTensors], row: int, corrections: Tensor, state: tuple[Any, ...], constants: Mapping[str, int]
) -> None:
    launches, copies = find_launches(corrections.device), updates[0].copy
    key = tuple(map(kind_of, (copies, corrections, *state))), constants["HAS_SCALE"]
    for start in range(0, len(updates), MANY):
        some = updates[start : start + MANY]
        places = [address for update in some for address in update.addresses()]
        places += [_ABSENT + 1] * (_FIELDS * MANY - len(places))
        programs = max(1, *[triton.cdiv(update.parameter.numel(), BLOCK) for update in some])
        arguments = tuple(places), copies, row + start, programs, corrections, *state, *constants.values(), MANY
        kinds = key, min(places) >> 31 > 0
        launches(_adamw_of_many, kinds, len(some) * programs, arguments, enable_fp_fusion=False)
