# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: each rank of the axis context has a part of every sequence, and attention exchanges keys and
values between them.

Every rank of context is given the same whole sequences: the model's forward cuts them (`SequenceParts.cut_arguments`).
Between embedding and loss all but attention sees this rank's tokens alone.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stretto.execution import IGNORED_TARGET, MAX_EXPANDED
from stretto.huggingface import context as of_transformers
from stretto.huggingface.attention.linear_attention import (
    linear_attentions_of,
    packages_for_documents,
    positions_before,
    replace_scans,
)
from stretto.huggingface.loss import compares_with_next
from stretto.huggingface.pretrained_model import is_pretrained_model, unwrap
from stretto.ops.attention import context_attention, find_starts
from stretto.ops.attention.exchange import can_copy
from stretto.ops.attention.gathered import attend_to_gathered
from stretto.ops.attention.gathered import gather_rows as gather_seen_rows
from stretto.ops.attention.plan import Layout, Mask
from stretto.ops.moe.routes import call
from stretto.parallel.comm.collectives import collective, gather_rows
from stretto.parallel.context.cutting import (
    check_length,
    cut_part,
    documents_of_row,
    find_places,
    list_documents,
    take_places,
)
from stretto.parallel.context.linear_attention import LinearAttentionParts
from stretto.parallel.grid import Grid
from stretto.parallel.layers.dropout import ParallelDropout
from stretto.parallel.precision import Precision

T = TypeVar("T")
_logger = logging.getLogger(__name__)
_IDS = ("input_ids", "tokens", "inputs_embeds")
_POSITIONS = ("position_ids", "positions")


def _make_mask(documents: Tensor | None) -> Mask:
    """The mask of causal attention to one row."""
    return Mask(True, None, None if documents is None else tuple(documents.tolist()))


def bind_by_name(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model's forward by their names, also those that it collects by name. ValueError for others."""
    given = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL and given.pop(name, None):
            raise ValueError(f"give the arguments of the model's forward by name: it collects others in *{name}")
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


class _SequenceBatch(NamedTuple):
    """A batch's layout and documents. name: of the argument that has the tokens."""

    name: str
    layout: Layout
    documents: Tensor | None
    begins: Tensor | None


class SequenceParts:
    """Cuts a model's sequences among the ranks of context, and computes its attention over all of them.

    The layout is zig-zag for a causal model, and contiguous for any other, and for one with layers of linear attention,
    which pass states in the order of the sequence; `_choose_layout` balances packed rows.
    """

    def __init__(self, model: nn.Module, grid: Grid) -> None:
        self.group: dist.ProcessGroup = grid.group("context")
        self.grid = grid
        self.is_pretrained = is_pretrained_model(model)
        self.is_causal = not self.is_pretrained or of_transformers.is_causal(model)
        has_states = self.is_pretrained and bool(linear_attentions_of(model))
        self.layout: Layout = "zigzag" if self.is_causal and not has_states else "contiguous"
        self._has_states = has_states
        if has_states and of_transformers.attentions_of(model) and dist.get_rank() == 0:
            _logger.warning(
                "%s has layers of linear attention, so its sequences are cut into contiguous parts: in its other "
                "attention the last rank of context has up to twice the mean work",
                type(model).__name__,
            )
        self._balances = self.is_pretrained or getattr(model, "takes_balanced_documents", False)
        self._least_length = self.group.size() * positions_before(model) if has_states else 1
        self._missing_packages = packages_for_documents(model) if has_states else []
        # Arguments have the names of the wrapper's forward, if it has any, and reach the model within by these.
        self._signature, self._names = (
            inspect.signature(model.forward),
            inspect.signature(unwrap(model).forward).parameters,
        )
        if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in self._signature.parameters.values()):
            self._signature = inspect.signature(unwrap(model).forward)
        self.has_dropout = False
        self.expanded = 0  # numbers of a token's keys and values that a rank makes of latents, if these travel
        # Of rows that are balanced, in the last pass: their documents, and the places of this rank's tokens.
        self._packed: list[tuple[int, ...]] | None = None
        self._places: Tensor | None = None
        self._gives_documents = False  # to the forward pass that runs
        self._reads_documents = False  # attention was given some by the model's code

    def _choose_layout(self, given: Mapping[str, Any], documents: Tensor | None) -> Layout:
        """The layout of one batch: balanced for packed rows, if the model itself compares its logits with the labels
        that are cut with them. A caller who compares logits cuts zig-zag (`cut_sequences`), and so do dropout's masks.
        """
        names = ("labels", "shift_labels") if self.is_pretrained else ("targets",)
        has_labels = self._balances and any(given.get(name) is not None for name in names)
        balances = self.layout == "zigzag" and documents is not None and has_labels and not self.has_dropout
        return "balanced" if balances else self.layout

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of the sequences in a tensor [batch, seq, ...]."""
        if self._places is None:
            return cut_part(whole, self.group.size(), self.group.rank(), self.layout, 1)
        return take_places(whole, self._places)

    def join(self, part: Tensor, length: int) -> Tensor:
        """The whole [batch, length, ...] of all ranks' parts of it, of the last forward pass; other tensors as they
        are. Without a gradient."""
        ranks = self.group.size()
        if part.dim() < 2 or part.shape[1] * ranks != length:
            return part
        rows = gather_rows(part.detach().movedim(1, 0).contiguous(), length, self.group)
        places = [
            self.places_of(part.shape[1], rank)[None]
            if self._packed is None
            else find_places(self._packed, rank, ranks)
            for rank in range(ranks)
        ]
        return take_places(rows.movedim(0, 1), torch.cat(places, 1).argsort(1))

    def places_of(self, part: int, rank: int | None = None) -> Tensor:
        """The places in a whole sequence, if it is not balanced, of a rank's part of so many tokens, int64 [part], on
        the CPU."""
        rank = self.group.rank() if rank is None else rank
        return cut_part(torch.arange(part * self.group.size(), device="cpu"), self.group.size(), rank, self.layout, 0)

    def cut_targets_of(self, model: nn.Module, given: Mapping[str, Any], labels: Tensor) -> Tensor:
        """`cut_targets`, for the forward pass to come, of these arguments."""
        self._arrange(model, given)
        return self.cut_targets(model, labels)

    def cut_targets(self, model: nn.Module, whole: Tensor) -> Tensor:
        """The targets [batch, seq / context] of this rank's tokens, of labels that the model itself would shift."""
        if self.is_pretrained and compares_with_next(model):
            whole = nn.functional.pad(whole, (0, 1), value=IGNORED_TARGET)[..., 1:]
        return self.cut(whole)

    def cut_arguments(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the model's forward, by name, for this rank's part of each sequence.

        Every tensor [batch, seq, ...] is cut. Labels that the model would shift are shifted before; positions are those
        in whole sequences. Documents of packed sequences, which transformers' models recognize by `position_ids` that
        begin anew or by `cu_seq_lens_q`, go to attention as the latter, and so does padding, of `attention_mask`: it is
        a document of its own, and gets zeros, as attention that sees nothing.

        Raises ValueError for arguments that cannot be cut.
        """
        given = bind_by_name(self._signature, args, kwargs)
        name, layout, documents, begins = self._arrange(model, given)
        rows, length = given[name].shape[:2]
        labels = given.get("labels")
        shapes = ((rows, length), (1, length))
        found = {
            key: self.cut(value) if isinstance(value, Tensor) and tuple(value.shape[:2]) in shapes else value
            for key, value in given.items()
        }
        is_shifted = self.is_pretrained and given.get("shift_labels") is None and compares_with_next(model)
        if is_shifted and isinstance(labels, Tensor):
            found["labels"] = found["shift_labels"] = self.cut_targets(model, labels)
        at = next((name for name in _POSITIONS if name in self._names), None)
        if at is not None and found.get(at) is None:
            if self.is_pretrained and (refusal := of_transformers.refusal_of_default_positions(model, given)):
                raise ValueError(refusal)
            here = self.cut(torch.arange(length, device=given[name].device)[None])
            found[at] = here[0] if at == "positions" and len(here) == 1 else here
        self._gives_documents = documents is not None
        if documents is not None and not self.is_pretrained:
            found["seen"] = {"documents": documents, "layout": layout}
        elif documents is not None:
            found |= {"cu_seq_lens_q": documents, "cu_seq_lens_k": documents}
            if isinstance(mask := found.get("attention_mask"), Tensor):
                found["context_padding"] = mask == 0
        if layout != self.layout and self.is_pretrained:
            found["context_layout"] = layout  # for attention, which may be recomputed after another batch
        is_small = 0 < rows * length * self.expanded <= MAX_EXPANDED
        if is_small and (documents is None or rows == 1):
            gather = partial(self._gather_latents, _make_mask(documents), layout)
            found["context_latents"] = of_transformers.LatentCache(gather)
        if self._has_states:
            found["use_cache"] = False  # also where it is one of **kwargs: a cache would keep states of parts
            found.pop("seq_idx", None)
            if begins is not None:
                found["seq_idx"] = self._cut_documents(model, begins).to(given[name].device)
        if "use_cache" in self._names:  # of keys and values that nothing would read
            found.setdefault("use_cache", False)
        return found

    def _arrange(self, model: nn.Module, given: Mapping[str, Any]) -> _SequenceBatch:
        """Read a batch, which then is what `cut` cuts."""
        name = next((name for name in _IDS if isinstance(given.get(name), Tensor)), None)
        if name is None or given[name].dim() < 2:
            raise ValueError(f"with context, the model's forward takes one of {', '.join(_IDS)}, [batch, seq, ...]")
        rows, length = given[name].shape[:2]
        check_length(length, self.group.size(), self.layout)
        if length < self._least_length:
            raise ValueError(
                f"sequences of {length} tokens are too short for context={self.group.size()}: the convolutions of "
                f"linear attention read of the rank before alone; {self._least_length} would do"
            )
        limit = getattr(getattr(model, "config", None), "max_seq_len", length)  # a GPT's, which sees a part alone
        if length > limit:
            raise ValueError(f"{length} tokens are more than max_seq_len, {limit}")
        documents = begins = None
        if self.is_pretrained:
            of_transformers.refuse_arguments(model, given, length)
            documents, begins = of_transformers.find_documents(model, given, rows, length)
        elif isinstance(places := given.get("documents"), Tensor):
            documents = find_starts(places)
        layout = self._choose_layout(given, documents)
        self._packed = self._places = None
        if layout == "balanced" and documents is not None:
            self._packed = list_documents(documents, rows, length)
            self._places = find_places(self._packed, self.group.rank(), self.group.size()).to(given[name].device)
        return _SequenceBatch(name, layout, documents, begins)

    def _cut_documents(self, model: nn.Module, begins: Tensor) -> Tensor:
        """Find, for linear attention, where the documents of this rank's tokens begin."""
        if self._missing_packages:
            raise ValueError(
                f"{type(model).__name__} is given rows of several documents, which its linear attention keeps apart by "
                f"kernels of packages that are not installed: {', '.join(self._missing_packages)}. Give each row one "
                "document, or install them"
            )
        return self.cut(begins)

    def check_documents(self, model: nn.Module) -> None:
        """Raise ValueError after a forward pass if attention has never got the documents that the model was given."""
        if self._gives_documents and not self._reads_documents:
            raise ValueError(
                f"the code of {type(model).__name__} does not hand cu_seq_lens_q to its attention, which so would not "
                "know documents or padding: give each sequence one document, without padding, or choose context=1"
            )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        documents: Tensor | None = None,
        sinks: Tensor | None = None,
        layout: Layout | None = None,
        is_gathered: bool = False,
    ) -> Tensor:
        """Attention [batch, heads, seq / context, size] of this rank's queries to all ranks' keys and values.

        documents: the first tokens of the documents of all rows, one after another, and the end of the last, int32
        [documents + 1]. layout: None for the model's. is_gathered: whether keys and values are
        of latents that `_gather_latents` has brought.
        """
        query, key, value = map(Precision().cast_operand, (query, key, value))  # as torch's attention under autocast
        if is_gathered:
            self._reads_documents |= documents is not None
            mask = _make_mask(documents)
            return attend_to_gathered(query, key, value, self.group, mask, layout=layout or self.layout, scale=scale)
        attend = partial(
            context_attention,
            group=self.group,
            causal=self.is_causal,
            scale=scale,
            layout=layout or self.layout,
            window=window,
            sinks=sinks,
            # A compiler takes no function as an operator's argument, and counts no collectives.
            wrap_collective=call if torch.compiler.is_compiling() else self._run_collective,
        )
        if documents is None:
            return attend(query, key, value)
        self._reads_documents = True
        if len(query) == 1:
            return attend(query, key, value, documents=documents)
        length, parts = query.shape[2] * self.group.size(), []
        for row in range(len(query)):
            own = (each[row : row + 1] for each in (query, key, value))
            parts.append(attend(*own, documents=documents_of_row(documents, row, length)))
        return torch.cat(parts)

    def _gather_latents(self, mask: Mask, layout: Layout, latents: Tensor) -> Tensor:
        return gather_seen_rows(latents, self.group, mask, layout=layout, wrap_collective=self._run_collective)

    def _run_collective(self, kind: str, make: Callable[[], T]) -> T:
        """Mark a collective of attention as one over context. Recomputation cannot keep what it brings: that is in
        memory that the next call reuses."""
        with collective(kind, self.group):
            return make()


def require_context(model: nn.Module, grid_sizes: Mapping[str, int]) -> None:
    """Raise ValueError for a model whose sequences the ranks of context cannot divide."""
    context, kind = grid_sizes.get("context", 1), type(model).__name__
    if context == 1:
        return
    parameters = inspect.signature(unwrap(model).forward).parameters
    if not is_pretrained_model(model):
        attends = [module for module in model.modules() if hasattr(module, "attend")]
        if not attends or "positions" not in parameters:
            raise ValueError(
                f"context is {context}, but {kind} is neither a model of transformers nor one whose forward takes "
                "`positions` and whose attention calls self.attend(query, key, value), as stretto.models.GPT's does: "
                "its sequences cannot be cut; choose context=1"
            )
        if any(getattr(getattr(module, "options", None), "capacity_factor", None) for module in model.modules()):
            raise ValueError(
                f"context is {context}, but which tokens an expert's capacity leaves out depends on their order, which "
                "context changes: choose capacity_factor=None, or context=1"
            )
        if any(getattr(module, "needs_whole_sequences", False) for module in model.modules()):
            raise ValueError(
                f"context is {context}, but this model has a loss over each sequence's choices of experts, and a rank "
                "has a part of each sequence: choose balance='switch', or context=1"
            )
        return
    if refusal := of_transformers.refusal_of_context(model, parameters):
        raise ValueError(f"context is {context}, but {refusal}; choose context=1")


def install_linear_attention(model: nn.Module, parts: SequenceParts) -> None:
    """Have linear attention run over the ranks of context. Before anything wraps the forward of these layers."""
    parts.grid.context_layouts.add(parts.layout)
    if parts.is_pretrained:
        replace_scans(model, LinearAttentionParts(parts.group))


def install_context(model: nn.Module, parts: SequenceParts, *, expands_again: bool) -> None:
    """Have a model's forward cut the sequences that it is given, and its attention run over the ranks of context.

    expands_again: blocks are recomputed, so keys that a rank makes of others' latents are kept for one layer at a time.
    Then latents travel in place of keys, unless copy engines bring keys under attention.
    """
    if parts.is_pretrained:
        of_transformers.replace_attention(model, parts.attend)
        expanded = of_transformers.count_expanded(model) if expands_again and parts.is_causal else 0
        if expanded and not can_copy(parts.group.group_name, parts.grid.device):
            parts.expanded = expanded // parts.grid.size("x")
    for module in model.modules():
        if isinstance(module, ParallelDropout):
            module.place_tokens = parts.places_of
            parts.has_dropout |= module.p > 0
        elif not parts.is_pretrained and hasattr(module, "attend"):
            module.attend = parts.attend  # type: ignore[assignment]

    @torch.compiler.disable
    def cut(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (), parts.cut_arguments(model, args, kwargs)

    model.register_forward_pre_hook(cut, with_kwargs=True)
    if parts.is_pretrained and of_transformers.attentions_of(model):  # a stage may have linear attention alone
        model.register_forward_hook(torch.compiler.disable(lambda model, *_: parts.check_documents(model)))
