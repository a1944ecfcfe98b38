# SPDX-License-Identifier: Apache-2.0
"""Chooses the linears and experts that compute in fp8, by name and by the sizes of a rank's part."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from stretto.execution import Fp8
from stretto.parallel.precision import Precision
from stretto.parallel.roles.plan import LINEARS, Role, ShardingPlan

GRAIN = 16  # torch's fp8 products take multiples of it (torchao leaves other linears out, too)
_BLOCK = re.compile(r"(.*?)\.(\d+)\.")


def choose_layers(
    model: nn.Module, plan: object, fp8: Fp8 | None, precision: Precision, sizes: Mapping[str, int]
) -> frozenset[str]:
    """The names of the linears and experts that compute in fp8, of the whole model.

    Rank 0 warns of those whose sizes on a rank are no multiples of 16, which are left out. ValueError for a model
    without roles, for another dtype than bf16, for a pattern that matches nothing, and if nothing would be in fp8.
    """
    if fp8 is None:
        return frozenset()
    if not isinstance(plan, ShardingPlan):
        why = getattr(plan, "reason", "").partition(":")[0]
        raise ValueError(
            f"fp8={fp8.recipe!r} takes linears and experts with roles, and {type(model).__name__} is sharded by "
            f"blocks, whose code computes by itself ({why}): pass roles, or leave fp8 out"
        )
    names = [*plan.named(*(role for role in LINEARS if role != "head")), *plan.experts]
    dtypes = {precision.compute or next(model.get_submodule(name).parameters()).dtype for name in names}
    if dtypes - {torch.bfloat16}:
        others = ", ".join(map(str, dtypes - {torch.bfloat16}))
        raise ValueError(
            f"fp8={fp8.recipe!r} computes what is not in fp8 in bf16, not {others}: dtype=torch.bfloat16 would do"
        )
    left_out = set(_left_out(names, fp8))
    left = [name for name in names if name not in left_out]
    uneven = {name: found for name in left if (found := _uneven_sizes(model, plan, name, sizes))}
    if not (chosen := frozenset(left) - uneven.keys()):
        why = "".join(f"{name} has {_show(found)}" for name, found in [*uneven.items()][:1])
        raise ValueError(
            f"fp8={fp8.recipe!r} leaves no layer of {type(model).__name__} in fp8: leave_out={fp8.leave_out} leaves "
            f"out {len(left_out)} of {len(names)}"
            + (f", and sizes of a rank must be multiples of {GRAIN}: {why}" * bool(why))
        )
    if uneven and dist.is_initialized() and dist.get_rank() == 0:
        shown = "; ".join(f"{name} ({_show(found)})" for name, found in [*uneven.items()][:4])
        warnings.warn(
            f"{len(uneven)} of {len(left)} layers compute in bf16, not in fp8, whose sizes on a rank must be "
            f"multiples of {GRAIN}: {shown}{', ...' * (len(uneven) > 4)}",
            stacklevel=4,
        )
    return chosen


def _left_out(names: list[str], fp8: Fp8) -> Iterator[str]:
    """The names that `leave_out` has. ValueError for a pattern of it that matches nothing."""
    blocks = {name: (found[1], int(found[2])) for name in names if (found := _BLOCK.match(name))}
    most = Counter(of for of, _ in blocks.values()).most_common(1)
    ends = [number for of, number in blocks.values() if most and of == most[0][0]]
    for word in fp8.leave_out:
        if word == "head":
            continue
        if word in ("first", "last"):
            end = (min if word == "first" else max)(ends, default=None)
            yield from (name for name, block in blocks.items() if block == (most[0][0] if most else "", end))
            continue
        matched = [name for name in names if fnmatchcase(name, word)]
        if not matched:
            near = names[0] if names else "head"
            raise ValueError(f"leave_out has {word!r}, which matches no linear of the model; {near!r} would do")
        yield from matched


def _uneven_sizes(model: nn.Module, plan: ShardingPlan, name: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """(out, in) features of a rank, of a layer where they are no multiples of GRAIN; () for others."""
    module = model.get_submodule(name)
    if name in plan.experts:
        kind = plan.experts[name]
        cut = 1 if sizes.get("expert_tensor") == "fold" else sizes["x"]
        for part in kind.weights:
            first, second = module.get_parameter(part).shape[1:]
            inner, outer = (second, first) if (part == "down_proj") != kind.is_transposed else (first, second)
            found = inner // cut, outer // sizes["y"]
            if any(size % GRAIN for size in found):
                return found
        return ()
    role = plan.roles[name]
    shape = module.get_parameter("weight").shape
    out, inputs = reversed(shape) if name in plan.transposed else shape
    output_axis, input_axis = LINEARS[role.role]
    found = (
        _outputs(role, out, prod(sizes[axis] for axis in (output_axis,) if axis)),
        inputs // (sizes[input_axis] if input_axis else 1),
    )
    return found if any(size % GRAIN for size in found) else ()


def _outputs(role: Role, out: int, ranks: int) -> int:
    """Output features that a rank computes."""
    divided = role.unit - role.shared
    return out // ranks if role.copies == 1 else role.shared + divided // role.copies


def _show(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} x {sizes[1]}"
