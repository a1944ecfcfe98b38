# SPDX-License-Identifier: Apache-2.0
"""A weight's shard: gathered over z before use, and its gradient reduce-scattered back to it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING
from typing import cast as cast_to

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.parallel.comm.collectives import Pending, start_scatter_narrow_rows, start_scatter_rows
from stretto.parallel.comm.gradient_reducer import GradientReducer
from stretto.parallel.comm.recorded_code import MODIFIED
from stretto.parallel.comm.weight_gathering import (
    GatheredWeight,
    StepGatherer,
    TableParts,
    WeightGatherer,
    WeightToGather,
)
from stretto.parallel.layout import TensorOnGrid, Version, local, version_of, writes_of
from stretto.parallel.low_precision_weights import cast, keep_copy
from stretto.parallel.precision import Precision

if TYPE_CHECKING:
    from stretto.parallel.comm.copy_engine_scatter import ScatterRing
    from stretto.parallel.fp8.weights import WeightScaling


@dataclass(frozen=True, eq=False)
class WeightShard:
    """Gathers a weight's shards to the block that one rank multiplies with, and scatters its gradient back to them.

    The shard is gathered over `group` (z; of experts, what expert leaves of z) along `dim`, in the compute dtype
    (Algorithm 3, line 2); gradients are scattered over it in the reduction dtype (line 14), through `ring` if copy
    engines do it.
    rows, local_rows: of dim 0, of the block and of the shard. dim: of which dim they are if not of that (of experts,
    which may be fewer than the ranks, 1). scaling: of a weight that is gathered, and multiplied, in fp8.
    """

    rows: int
    local_rows: int
    group: dist.ProcessGroup
    precision: Precision
    gatherer: WeightGatherer
    gradients: GradientReducer
    ring: "ScatterRing | None" = None
    dim: int = 0
    scaling: "WeightScaling | None" = None

    @cached_property
    def is_sharded(self) -> bool:
        """True if ranks of z have parts of the block."""
        return self.group.size() > 1

    def gather(self, parameter: Tensor, *, is_recorded: bool = True) -> GatheredWeight:
        """The whole rows of a DTensor parameter. is_recorded: this pass is a backward pass, or will have one.

        Other passes cast the parameter itself: averaged weights are often put in for an evaluation, and taken out
        again, through `.data`, and no version would say that the optimizer's low-precision copy is stale then.
        """
        if self.is_sharded:
            found = self.gatherer.gather(self, parameter)
            return found if not self.dim else found._replace(rows=found.rows.transpose(0, self.dim).contiguous())

        # One low-precision copy for all micro-batches in flight.
        if isinstance(self.gatherer, StepGatherer) and self.gatherer.is_keeping:
            return self.gatherer.keep(self, version_of(parameter), partial(self._cast, parameter, is_recorded))
        return self._cast(parameter, is_recorded)

    def _cast(self, parameter: Tensor, is_recorded: bool) -> GatheredWeight:
        if self.scaling is not None:
            rows, scale = self.scaling.cast(parameter, is_recorded=is_recorded)
            return GatheredWeight(rows, scale=scale)
        if is_recorded:
            return GatheredWeight(cast(parameter, self.precision.compute))
        return GatheredWeight(self.precision.cast(local(parameter)))

    def check_unwritten(self, parameter: Tensor, writes: int) -> None:
        """Raise RuntimeError if a weight that a backward pass gathers again was written since its forward pass, where
        its `writes_of` was `writes`."""
        if writes_of(parameter) != writes:
            raise RuntimeError(MODIFIED)

    def was_overwritten(self, version: Version | None) -> bool:
        """True if rows of `GatheredWeight.version` have been overwritten with other numbers since."""
        return self.gatherer.was_overwritten(self, version)

    def find_parts(self, parameter: Tensor) -> TableParts | None:
        """The parts of a table, to look up rows where they are; None: gather it."""
        return self.gatherer.find_parts(self, parameter) if self.group.size() > 1 else None

    def watch(self, parameter: nn.Parameter, *, may_keep: bool, is_table: bool = False) -> None:
        """Gather this parameter from now on. may_keep: its whole rows may be kept for as long as the model lives.
        is_table: rows are looked up (`find_parts`)."""
        if may_keep and self.group.size() == 1:
            keep_copy(parameter, self.precision.compute)
        if self.ring is not None:
            self.ring.register(self.rows, local(parameter).shape[1:].numel())
        how = self.dim, self.scaling, is_table
        weight = WeightToGather(parameter, self.rows, self.precision.compute, self.group, *how)
        self.gradients.sharded[parameter] = weight
        self.gatherer.register(self, weight, may_keep=may_keep and self.group.size() > 1)

    def start_reduction(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Start to reduce the gradient of the whole rows; it is in `parameter.grad` when `backward()` returns."""
        start = partial(self._start_scatter, parameter)
        self.gradients.reduce_scatter_gradient(parameter, gradient, start, is_sharded=self.is_sharded)

    def _start_scatter(self, parameter: nn.Parameter, gradient: Tensor, factor: float) -> Pending:
        if isinstance(parameter, TensorOnGrid) and parameter.pruned is not None:
            options = self.precision.reduce, factor, self.gradients.levels
            return cast_to(Pending, parameter.pruned.start_scatter(gradient, *options))
        dtype = self.precision.reduce
        if dtype is not None and self.is_sent(parameter) and gradient.dtype is not dtype:
            if gradient.itemsize < dtype.itemsize and self._sends_narrow():
                return start_scatter_narrow_rows(gradient, self.local_rows, self.group, dtype, factor)
            gradient = gradient.to(dtype)
        if self.ring is None:
            levels = self.gradients.levels
            if not self.dim or self.group.size() == 1:
                return start_scatter_rows(gradient, self.local_rows, self.group, factor, levels)
            sent = start_scatter_rows(gradient.transpose(0, self.dim), self.local_rows, self.group, factor, levels)
            return replace(sent, result=sent.result.transpose(0, self.dim))
        return self.ring.start(gradient, self.local_rows, parameter.dtype, factor)

    def _sends_narrow(self) -> bool:
        """True if a gradient is sent in its own dtype, as an embedding's is, and summed in that of reductions.

        All ranks must choose alike: not where a kept gradient, which some ranks may lack, has been added to it.
        """
        is_plain = not self.dim and self.ring is None and self.gradients.levels is None
        return is_plain and self.group.size() > 1 and not self.gradients.has_kept_unsharded

    def takes_own_gradient(self, parameter: nn.Parameter) -> bool:
        """True if this rank has all of the weight, computes with it as it is or casts it to fp8, and makes its gradient
        in its dtype."""
        own, in_fp8 = parameter.dtype, self.scaling is not None
        is_own = self.precision.reduce in ((own,) if in_fp8 else (None, own)) or not self.is_sent(parameter)
        return self.group.size() == 1 and is_own and (in_fp8 or self.precision.compute in (None, own))

    def taking(self, parameter: nn.Parameter) -> Callable[[nn.Parameter, Tensor], None]:
        """Return what takes the gradient of a weight that this rank has all of: the reducer, unless it scales it."""
        if self.gradients.forward_scale(parameter) != 1:
            return self.start_reduction
        return self.gradients.take if self.is_sent(parameter) else self.gradients.take_final

    def gradient_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype in which to compute the whole rows' gradient: the parameter's own if it stays here."""
        return self.precision.wire(parameter) if self.is_sent(parameter) else parameter.dtype

    def own_form(self, parameter: nn.Parameter, computed: torch.dtype) -> tuple[torch.dtype, float]:
        """The (dtype, factor) in which a product of operands of dtype `computed` makes the gradient of a weight that is
        whole here: the reducer takes it so, and no pass of its own casts or scales it."""
        wants_fp32 = self.gradient_dtype(parameter) == torch.float32 and computed.itemsize == 2
        return torch.float32 if wants_fp32 else computed, self.gradients.scale_over_z(parameter)

    def is_sent(self, parameter: nn.Parameter) -> bool:
        """True if other ranks have parts of the gradient."""
        return self.is_sharded or self.gradients.is_summed(parameter)
