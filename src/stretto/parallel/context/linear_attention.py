# SPDX-License-Identifier: Apache-2.0
"""Linear attention over context: layers that carry a state along the sequence, of which each rank has a part.

Two things cross the border between a rank's part and the one before it:

- *The short causal convolution* reads the last kernel_size - 1 positions of the rank before.
- *The recurrent state.* A scan is affine in the state S that it begins from: its outputs are those from zero plus
  `response` . S, and its last state is the one from zero plus `transition` . S. So no rank waits for another one's
  scan: all scan their parts at once from zero, send last state and transition to every later rank, and compose those of
  the ranks before them; then they add the response to their outputs.

The model's own function scans, a kernel or PyTorch's operators. Of a state-space model (Mamba-2) the transition is one
decay for each head, and the response is made of C and the decays up to each position. Of a delta rule (gated, or with a
decay for each channel) the transition is a matrix: columns of value zero, scanned along with the values but from the
identity, end as the transition, and their outputs are the response. That scans values twice as wide (if keys are as
wide as values), at once, where passing states from rank to rank would take as many scans as there are ranks, one after
another.

Bytes, of a layer and sequence, to each later rank in the forward pass, and back in the backward pass: heads x key size
x (value size + key size) x 4 for a delta rule (4.2 MB for Qwen3-Next-80B: 32 heads of 128), and heads x (head size x
state size + 1) x 4 for Mamba-2 (4.2 MB for 128 heads of 64 with states of 128), whatever the sequence's length.

Documents: `seq_idx`, int32 [batch, length], has for each position the place in the sequence at which its document
begins. The state is zero there, and the convolution reads nothing before.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad, softplus

from stretto.parallel.comm.autograd import once_differentiable
from stretto.parallel.comm.collectives import all_to_all
from stretto.parallel.comm.kept_outputs import keep_output


@torch.compiler.disable
def _pass(x: Tensor, sent: Tensor, reach: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Send a tensor to as many of the next ranks as `reach`. Returns x as it is, and what ranks before this one have
    sent, [ranks, ...], the first rank's first.

    x is what the layer goes on with: all ranks take part in the backward pass so, also one that receives nothing.
    """
    return _PassToLater.apply(x, sent, reach, group)


class _PassToLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Tensor, reach: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        rank, peers, size = group.rank(), range(group.size()), sent.numel()
        after, before = peers[rank + 1 : rank + 1 + reach], peers[max(rank - reach, 0) : rank]
        ctx.group, ctx.shape = group, (len(after), *sent.shape)
        ctx.sends, ctx.receives = [[size * (peer in each) for peer in peers] for each in (after, before)]
        copies = sent.expand(ctx.shape).flatten()
        received = keep_output("passed states", lambda: _exchange(copies, ctx.receives, ctx.sends, group))
        return x.view_as(x), received.view(len(before), *sent.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_x: Tensor, of_received: Tensor) -> tuple[Tensor, Tensor, None, None]:
        returned = _exchange(of_received.flatten(), ctx.sends, ctx.receives, ctx.group)
        return of_x, returned.view(ctx.shape).sum(0), None, None


def _exchange(sent: Tensor, receives: Sequence[int], sends: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    return all_to_all(sent.new_empty(sum(receives)), sent, receives, sends, group)


class _DocumentStarts(NamedTuple):
    """Documents of a rank's part of rows, one row after another.

    starts: int64 [documents + 1], where each begins, and the end of the last. first: int64 [rows], the first document
    of each row. goes_on: bool [rows], whether the rank before has the beginning of that one.
    """

    starts: Tensor
    first: Tensor
    goes_on: Tensor


class LinearAttentionParts:
    """Runs the functions of a model's linear attention on this rank's part of each sequence, in rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._numbered: tuple[weakref.ref[Tensor], _DocumentStarts] | None = None

    def convolve(
        self,
        convolve: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        seq_idx: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Convolve x [batch, channels, length] along the sequence by weight [channels, size], causally."""
        before, length = weight.shape[-1] - 1, x.shape[-1]
        rows = x.transpose(1, 2)  # as kernels want them in memory
        rows, received = _pass(rows, rows[:, length - before :], 1, self.group)
        halo = received[0] if len(received) else rows.new_zeros(len(rows), before, rows.shape[2])
        if seq_idx is not None:
            places = self._begins(length) + torch.arange(-before, 0, device=x.device)
            own = seq_idx[:, :1]
            seq_idx = torch.cat((torch.where(places >= own, own, -1), seq_idx), 1)
            options["seq_idx"] = seq_idx
        return convolve(torch.cat((halo, rows), 1).transpose(1, 2), weight, bias, **options)[..., before:]

    def scan_delta_rule(
        self,
        scan: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,  # of whole sequences, and of padding, which the layer has set to zero
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Scan by a delta rule. Query and key [batch, length, heads, key size], value [..., value heads, value size],
        decay g and rate beta [batch, length, value heads, ...]; returns outputs of value's shape, and no last state.

        Kimi Linear, equation 1 (with g of one number for each head, Gated DeltaNet, equation 10).
        """
        key_size, value_size, (batch, length, heads) = key.shape[-1], value.shape[-1], value.shape[:3]
        identity = torch.eye(key_size, dtype=torch.float32, device=key.device)
        initial = pad(identity, (value_size, 0)).repeat(batch, heads, 1, 1)
        given = [query, key, pad(value, (0, key_size)), g, beta]
        documents = None if seq_idx is None else self._find_documents(seq_idx)
        if documents is not None:
            given = [each.flatten(0, 1).unsqueeze(0) for each in given]
            begun = initial * documents.goes_on[:, None, None, None]
            initial = begun.new_zeros(len(documents.starts) - 1, *begun.shape[1:]).index_copy(0, documents.first, begun)
            options["cu_seqlens"] = documents.starts
        query, key, value, g, beta = given
        options |= {"initial_state": initial, "output_final_state": True}
        outputs, last = scan(query, key, value, g=g, beta=beta, **options)
        if documents is not None:
            ends = torch.cat((documents.first[1:], documents.first.new_tensor([len(last)]))) - 1
            outputs, last = outputs.view(batch, length, *outputs.shape[2:]), last[ends]
        outputs, received = _pass(outputs, last, self.group.size(), self.group)
        outputs, response = outputs.split((value_size, key_size), -1)
        if not len(received):
            return outputs, None
        state = received[0, ..., :value_size]
        for each in received[1:]:
            state = each[..., :value_size] + each[..., value_size:] @ state
        return outputs + torch.einsum("blhk,bhkv->blhv", response, state.to(response.dtype)), None

    def scan_state_space(
        self,
        scan: Callable[..., tuple[Tensor, Tensor]],
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        seq_idx: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Scan a state-space model. x [batch, length, heads, head size], dt [batch, length, heads], A [heads], B and C
        [batch, length, groups, state size]; returns outputs of x's shape.

        Mamba-2 (Dao and Gu, 2024), section 2.1.
        """
        if options.get("z") is not None:
            raise ValueError("linear attention over context takes no gate z within the scan: apply it to its outputs")
        if seq_idx is not None:
            options["seq_idx"] = seq_idx
        options |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit, "return_final_states": True}
        outputs, last = scan(x, dt, A, B, C, **options)
        steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        steps = softplus(steps) if dt_softplus else steps
        decays = (A.float() * steps.clamp(*dt_limit)).cumsum(1).exp()  # from the beginning of this rank's part
        if seq_idx is not None:
            decays = decays * (seq_idx < self._begins(x.shape[1]))[..., None]
        size = last.shape[2] * last.shape[3]
        sent = torch.cat((last.flatten(2), decays[:, -1, :, None]), 2)
        outputs, received = _pass(outputs, sent, self.group.size(), self.group)
        if not len(received):
            return outputs
        state = received[0, ..., :size]
        for each in received[1:]:
            state = each[..., :size] + each[..., size:] * state
        groups = C.shape[2]
        state = state.to(outputs.dtype).view(len(x), groups, -1, *last.shape[2:])
        read = torch.einsum("blgn,bgrpn->blgrp", C.to(outputs.dtype), state).flatten(2, 3)
        return outputs + decays.to(outputs.dtype)[..., None] * read

    def _begins(self, length: int) -> int:
        """The place in the sequence at which this rank's part of it begins."""
        return self.group.rank() * length

    @torch.compiler.disable
    def _find_documents(self, seq_idx: Tensor) -> _DocumentStarts:
        """The documents, found once for all layers: the host waits for their number."""
        if self._numbered is None or self._numbered[0]() is not seq_idx:
            begins = torch.ones_like(seq_idx, dtype=torch.bool)
            begins[:, 1:] = seq_idx.diff(dim=1) != 0
            starts = begins.view(-1).nonzero().flatten()
            first = begins.sum(1).cumsum(0).roll(1)
            first[0] = 0
            goes_on = seq_idx[:, 0] < self._begins(seq_idx.shape[1])
            starts = torch.cat((starts, starts.new_tensor([seq_idx.numel()])))
            self._numbered = weakref.ref(seq_idx), _DocumentStarts(starts, first, goes_on)
        return self._numbered[1]
