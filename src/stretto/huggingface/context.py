# SPDX-License-Identifier: Apache-2.0
"""Context parallelism of transformers' models: their attention is computed over the ranks of the axis context, by
transformers' own interface (`attn_implementation`). Nothing of transformers is changed."""

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.execution import IGNORED_TARGET
from stretto.huggingface.attention.linear_attention import linear_attentions_of
from stretto.huggingface.known_modules import cache_of_nothing
from stretto.huggingface.loss import compares_with_next, computes_masked_loss, has_loss_of_tokens
from stretto.huggingface.pretrained_model import adapters_of, base_of, unwrap
from stretto.ops.attention.plan import Layout

NAME = "stretto_context"
"""The `attn_implementation` of models whose sequences are cut."""

LAYERS = ("full_attention", "sliding_attention", "attention", "moe", "mlp")
"""The kinds of layers, in `config.layer_types`, that attend by transformers' interface, or see each token alone."""

LINEAR_LAYERS = ("linear_attention", "mamba", "hybrid", "conv")
"""The kinds of layers that may carry a state along the sequence."""

_DEPENDS_ON_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose angles depend on the longest position, which differs between ranks."""


Attend = Callable[..., Tensor]
"""`stretto.parallel`'s attention of this rank's queries to keys of all ranks of context: `SequenceParts.attend`."""


def attentions_of(model: nn.Module) -> list[nn.Module]:
    """The modules that attend by transformers' interface."""
    return [module for module in model.modules() if _uses_interface(type(module))]


def _uses_interface(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(code, "co_names", ())


def passes(kind: type[nn.Module], argument: str) -> bool:
    """True if the code of a module's forward passes an argument of this name, by keyword or in a dict."""
    constants = getattr(getattr(inspect.unwrap(kind.forward), "__code__", None), "co_consts", ())
    return any(each == argument or (isinstance(each, tuple) and argument in each) for each in constants)


@functools.cache
def makes_own_mask(forward: Callable[..., Any]) -> bool:
    """True if the code of an attention's forward calls the interface with another mask than the one it is given."""
    calls = [node for node in _parse(forward) or () if isinstance(node, ast.Call)]
    by_name = [each.value for call in calls for each in call.keywords if each.arg == "attention_mask"]
    masks = [call.args[4] for call in calls if len(call.args) > 4 and ast.unparse(call.args[0]) == "self"] + by_name
    return any(isinstance(mask, ast.Name) and mask.id != "attention_mask" for mask in masks)


def is_causal(model: nn.Module) -> bool:
    """True if every token attends to those before it alone: as attention says, or, where it does not, causal masks."""
    said = {getattr(module, "is_causal", None) for module in attentions_of(model)}
    if None in said and not any(_makes_causal_masks(inspect.unwrap(type(each).forward)) for each in model.modules()):
        return False
    return getattr(model.config, "is_causal", True) and False not in said


def refusal_of_context(model: Any, parameters: Mapping[str, Any]) -> str | None:
    """Say why the sequences of a transformers model cannot be cut; None if they can. parameters: of its forward."""
    kind, attentions, linear = type(unwrap(model)).__name__, attentions_of(model), linear_attentions_of(model)
    layers = count_layers(model)
    known = LINEAR_LAYERS if linear and sum(layers[each] for each in LINEAR_LAYERS) <= len(linear) else ()
    others = sorted(layers.keys() - {*LAYERS, *known})
    if adapters := sorted(_adapters_of_whole_sequences(model)):
        return (
            f"{kind} has adapters of PEFT ({', '.join(adapters)}) that add tokens or look at whole sequences, of which "
            "context gives a rank a part; adapters of single tokens, such as LoRA, would do"
        )
    if others:
        return (
            f"{kind} has layers of the kind {', '.join(others)}, and context cuts sequences of attention and linear "
            "attention (a gated or Kimi's delta rule, Mamba-2) in the form that transformers 5.23 gives it"
        )
    if (why := refusal_of_attention(model, parameters)) is not None:
        return why
    if len({getattr(module, "is_causal", True) for module in attentions}) > 1:
        return f"{kind} has both causal and other attention"
    if any(drops_weights(module) for module in attentions):
        return f"{kind} has dropout of attention's weights (attention_dropout, attn_pdrop); 0 would do"
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return f"the forward of {kind} hands attention no further arguments (**kwargs)"
    if "For" in kind and not (has_loss_of_tokens(model) or computes_masked_loss(model)):
        return f"{kind} returns no output for each token, or computes its loss in code that is not known"
    return None


def count_layers(model: Any) -> Counter[str]:
    """The kinds of a model's layers, by its configuration."""
    config = model.config
    return Counter(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def refusal_of_attention(model: Any, parameters: Collection[str]) -> str | None:
    """Say why a transformers model's attention cannot be replaced by its interface, where ranks or steps see parts of
    sequences; None if it can. parameters: the names of its forward's."""
    config, kind, attentions = model.config, type(unwrap(model)).__name__, attentions_of(model)
    linear = linear_attentions_of(model)
    states = {id(part) for layer in linear for part in layer.modules()}
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ropes = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)}
    if (why := refusal_of_interface(model)) is not None:
        return why
    if any(isinstance(module, nn.Conv1d | nn.Conv2d) and id(module) not in states for module in model.modules()):
        return f"{kind} has convolutions over its sequences"
    if found := ropes & set(_DEPENDS_ON_LENGTH):
        return f"{kind}'s rotary embedding, {', '.join(sorted(found))}, depends on the length of what it sees at once"
    if attentions and "position_ids" not in parameters:
        return f"the forward of {kind} takes no position_ids"
    return None


def refusal_of_interface(model: Any) -> str | None:
    """Say why a transformers model's attention cannot be replaced by its interface; None if it can."""
    config, kind, attentions = model.config, type(unwrap(model)).__name__, attentions_of(model)
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        return f"{kind} has several inputs (an encoder's, or pictures), of which only one is taken yet"
    if not attentions + linear_attentions_of(model) or (attentions and not model._can_set_attn_implementation()):
        return f"the attention of {kind} does not go through transformers' attention interface"
    if any(getattr(module, "attn_logit_softcapping", None) is not None for module in attentions):
        return f"{kind} caps its attention's logits; attn_logit_softcapping=None would do"
    if getattr(config, "sliding_window", None) and not all(
        passes(type(module), "sliding_window") for module in attentions
    ):
        return f"the attention of {kind} has a sliding window by its mask alone; sliding_window=None would do"
    return None


def _adapters_of_whole_sequences(model: nn.Module) -> set[str]:
    """The kinds of a model's PEFT adapters that compute more than a function of each token."""
    return {
        kind
        for kind, each in adapters_of(model)
        if each.is_prompt_learning or getattr(each, "alora_invocation_tokens", None) or kind in _ADAPTERS_OF_SEQUENCES
    }


_ADAPTERS_OF_SEQUENCES = ("ADAPTION_PROMPT", "XLORA")


def drops_weights(module: nn.Module) -> bool:
    found = (getattr(module, name, 0.0) for name in ("attention_dropout", "attn_dropout", "dropout"))
    return any((getattr(each, "p", each) or 0.0) > 0 for each in found)


def refuse_arguments(model: Any, given: Mapping[str, Any], length: int) -> None:
    """Raise ValueError for arguments of a model's forward that sequences which are cut do not take."""
    kind = type(unwrap(model)).__name__
    if model.config._attn_implementation != NAME:  # attention would be to this rank's part alone
        raise ValueError(
            f"{kind} on a grid with context has the attn_implementation {NAME!r}, but its configuration now says "
            f"{model.config._attn_implementation!r}, as another model set that shares it: "
            f"model.set_attn_implementation({NAME!r}) would do, and copy.deepcopy(config) for the other model"
        )
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    cache = given.get("past_key_values")
    if cache is not None and cache is not cache_of_nothing():
        raise ValueError(f"{kind} on a grid with context takes no past_key_values: it trains, and does not generate")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != length):
        raise ValueError(
            f"{kind} on a grid with context takes an attention_mask [batch, {length}] that marks padding; it knows "
            "documents by position_ids that begin anew"
        )
    if isinstance(positions, Tensor) and positions.dim() != 2:
        raise ValueError(f"position_ids must be [batch, seq] on a grid with context, not {list(positions.shape)}")
    if not isinstance(given.get("logits_to_keep", 0), int) or given.get("logits_to_keep", 0):
        raise ValueError(
            "on a grid with context each rank has the logits of its own tokens: leave out logits_to_keep, and generate "
            "by stretto.inference.Engine, or on a grid without context"
        )


def refusal_of_default_positions(model: nn.Module, given: Mapping[str, Any]) -> str | None:
    """Say why the places of tokens in whole sequences are not their positions, where the caller gives none; None if
    they are."""
    mask = given.get("attention_mask")
    is_padded_before = isinstance(mask, Tensor) and not bool(mask[:, 0].all())
    for kind in dict.fromkeys(type(module) for module in unwrap(model).modules()):
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        names = getattr(code, "co_names", ()) if "position_ids" in getattr(code, "co_varnames", ()) else ()
        if "create_position_ids_from_input_ids" in names or (is_padded_before and "cumsum" in names):
            return f"{kind.__name__} counts positions from padding in whole sequences: on context, give position_ids"
    return None


class PaddingError(ValueError):
    """Padding between tokens of one row, or padding whose outputs the loss reads."""


class Documents(NamedTuple):
    """Documents of packed rows, on the CPU; None where each row is one.

    ends: the first tokens of all documents of the rows, one after another, and the end of the last, int32
    [documents + 1]; padding is a document of its own. begins: for each token, the place in its row at which its
    document begins, int32 [rows, length]; without padding.
    """

    ends: Tensor | None
    begins: Tensor | None


def find_documents(model: nn.Module, given: Mapping[str, Any], rows: int, length: int) -> Documents:
    """The documents of rows that a model is given. For masks and positions on a GPU the host waits.

    Raises ValueError for padding within a row, or with labels, for documents that are not these rows', and for
    positions that begin anew where plain transformers would not look for documents in them.
    """
    starts, mask, positions = (given.get(name) for name in ("cu_seq_lens_q", "attention_mask", "position_ids"))
    begins = torch.zeros(rows, length, dtype=torch.bool, device="cpu")
    begins[:, 0] = True
    if isinstance(starts, Tensor):
        starts = starts.cpu().long()
        if starts.dim() != 1 or starts[-1] != rows * length:
            raise ValueError(
                f"cu_seq_lens_q is {starts.tolist()}, but must be the first tokens of all documents of {rows} rows, "
                f"one after another, and their end, {rows * length}; in a pipeline, give position_ids"
            )
        begins.view(-1)[starts[starts < rows * length]] = True
    elif isinstance(positions, Tensor) and mask is None and is_causal(model):  # else transformers looks for none
        begins[:, 1:] |= (positions.diff(dim=1) != 1).cpu()
        if int(begins.sum()) > rows and (reason := ignores_positions(model, given)):
            raise ValueError(
                f"position_ids begin anew within a row, as those of packed documents do, but {reason}: plain "
                "transformers would attend across them, and context does not. Give documents as cu_seq_lens_q, or "
                "position_ids without such places"
            )
    if isinstance(numbers := given.get("seq_idx"), Tensor):
        begins[:, 1:] |= (numbers.diff(dim=1) != 0).cpu()
    numbered = None
    if int(begins.sum()) > rows:
        numbered = (begins * torch.arange(length, device="cpu")).cummax(1).values.int()
    if isinstance(mask, Tensor):
        mask = mask.bool().cpu()
        changes = mask[:, 1:] != mask[:, :-1]
        if ((changes & mask[:, 1:]).sum(1) + mask[:, 0] > 1).any():
            raise PaddingError(
                "attention_mask has padding between tokens of one row: context takes it before or after them"
            )
        for name in ("labels", "shift_labels"):
            if isinstance(labels := given.get(name), Tensor) and labels.shape == mask.shape:
                _require_unread_padding(model, name, labels.cpu(), mask)
        begins[:, 1:] |= changes
    if int(begins.sum()) == rows:
        return Documents(None, None)
    found = begins.view(-1).nonzero().flatten()
    return Documents(torch.cat((found, found.new_tensor([rows * length]))).int(), numbered)


def _require_unread_padding(model: nn.Module, name: str, labels: Tensor, mask: Tensor) -> None:
    """Raise PaddingError where outputs of padding, which plain transformers computes of a row's tokens, have labels."""
    is_read = labels != IGNORED_TARGET
    if name == "labels" and compares_with_next(model):
        is_read = nn.functional.pad(is_read, (0, 1))[:, 1:]
    sees = mask.cumsum(1) > 0 if is_causal(model) else True  # padding before a row sees nothing
    if (is_read & ~mask & sees).any():
        raise PaddingError(
            f"{name} has targets for tokens that attention_mask says are padding, whose outputs are not those of plain "
            f"transformers: {IGNORED_TARGET} there would do"
        )


def ignores_documents(model: nn.Module) -> str | None:
    """Say why a model in training would mix documents that its positions alone tell apart; None if it does not."""
    if linear_attentions_of(model):
        return "its linear attention passes states from one to the next"
    return None if not is_causal(model) else ignores_positions(model, {"use_cache": False})


def ignores_positions(model: nn.Module, given: Mapping[str, Any]) -> str | None:
    """Say why plain transformers does not look for documents in the positions of such a call; None if it does."""
    inner = unwrap(model)
    forwards = {inspect.unwrap(type(module).forward) for module in inner.modules()}
    if not any(map(_makes_masks_of_positions, forwards)):
        return f"the code of {type(inner).__name__} makes its masks without position_ids"
    keeps = given.get("use_cache")
    keeps = getattr(inner.config, "use_cache", False) if keeps is None else keeps
    if keeps and not (inner.training and getattr(base_of(inner), "gradient_checkpointing", False)):
        return "with a cache (use_cache, also of the config) transformers ignores that; use_cache=False would do"
    return None


def _makes_causal_masks(forward: Callable[..., Any]) -> bool:
    own = getattr(forward, "__code__", None)
    codes = (own, *filter(inspect.iscode, own.co_consts)) if own is not None else ()  # a lambda may make them
    return any("causal_mask" in name for code in codes for name in code.co_names)


@functools.cache
def _makes_masks_of_positions(forward: Callable[..., Any]) -> bool:
    """True if the code of a model's forward hands position_ids to transformers' functions that make causal masks."""
    if not _makes_causal_masks(forward):
        return False
    if (nodes := _parse(forward)) is None:
        return True
    # In a call by keywords, or in a dict of these.
    calls = ([each.arg for each in node.keywords] for node in nodes if isinstance(node, ast.Call))
    dicts = ([getattr(key, "value", None) for key in node.keys] for node in nodes if isinstance(node, ast.Dict))
    return any({"config", "attention_mask", "position_ids"} <= {*names} for names in (*calls, *dicts))


def _parse(forward: Callable[..., Any]) -> list[ast.AST] | None:
    """The nodes of a function's code; None if it cannot be read."""
    try:
        return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(forward)))))
    except (OSError, TypeError, SyntaxError):  # without a file; a docstring that is not indented
        return None


@functools.cache
def hands_arguments_on(forward: Callable[..., Any], part: str) -> bool:
    """True if the code of a module's forward calls `self.part` with **kwargs."""
    calls = (node for node in _parse(forward) or () if isinstance(node, ast.Call))
    names = {
        getattr(each.func, "attr", None) for each in calls if any(keyword.arg is None for keyword in each.keywords)
    }
    return part in names


def count_expanded(model: nn.Module) -> int:
    """Numbers of a token's keys and values that attention of latents expands, in a layer; 0 for other attention.

    Its code hands latents to the cache, and expands what it returns, as DeepseekV3Attention does.
    """
    if getattr(model.config, "sliding_window", None):
        return 0
    found = [module for module in attentions_of(model) if hasattr(module, "expand_kv")]
    counts = (int(each.num_heads) * (int(each.qk_head_dim) + int(each.v_head_dim)) for each in found)  # type: ignore[arg-type]
    return max(counts, default=0)


class LatentCache:
    """Stands for a cache of transformers where attention hands latents to it: returns other ranks' too, and keeps none.

    gather: of rows [batch, 1, seq / context, numbers], those and others that they see. gathered: the layers that have
    asked.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        self.gather = gather
        self.gathered: set[int] = set()

    def update(self, latents: Tensor, keys: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if latents.shape[1] != 1 or keys.shape[1] != 1:  # they were expanded before
            return latents, keys
        self.gathered.add(layer_idx)
        rows = self.gather(torch.cat((latents, keys), -1))
        return rows[..., : latents.shape[-1]], rows[..., latents.shape[-1] :]


def _give_latents(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hand attention the cache of latents, in place of one that a layer which checkpoints itself would not hand on."""
    latents = kwargs.get("context_latents")
    return None if latents is None else (args, kwargs | {"past_key_values": latents})


def replace_attention(model: Any, attend: Attend) -> None:
    """Have a model's attention be computed by `attend`, under an `attn_implementation` of its own."""
    register_attention(NAME, _attend)
    for module in attentions_of(model):
        module.attend_over_context = attend  # type: ignore[assignment]
        if hasattr(module, "expand_kv"):
            module.register_forward_pre_hook(_give_latents, with_kwargs=True)
    model.set_attn_implementation(NAME)


@functools.cache
def register_attention(name: str, attend: Callable[..., tuple[Tensor, None]]) -> None:
    """Make an `attn_implementation`, which takes no masks, known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _make_no_mask)


def _make_no_mask(*_: Any, mask_function: Any = None, use_vmap: bool = False, **__: Any) -> None:
    """No mask: attention is told of windows and documents. ValueError for a mask that a model computes itself."""
    if use_vmap or getattr(mask_function, "__qualname__", "").startswith("or_masks"):
        raise ValueError(f"{OWN_MASK}, such as one that lets the tokens of a picture, or a prefix, see each other")


OWN_MASK = (
    "attention over context, or with invariant=True, takes causal masks, windows, documents and padding, and this "
    "model has another mask"
)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    context_layout: Layout | None = None,
    context_latents: LatentCache | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    attend: Attend | None = getattr(module, "attend_over_context", None)
    if attend is None:
        raise ValueError(
            f"this {type(module).__name__} has the attn_implementation {NAME!r} of a model that parallelize has put on "
            "a grid with context, or with invariant=True, and shares its configuration: build it from "
            "copy.deepcopy(config), with attn_implementation='sdpa'"
        )
    if attention_mask is not None:
        raise ValueError(OWN_MASK)
    if dropout or others.get("position_bias") is not None or others.get("softcap") is not None:
        raise ValueError(
            "attention over context, or with invariant=True, takes no dropout of its weights, position_bias or softcap"
        )
    is_gathered = context_latents is not None and module.layer_idx in context_latents.gathered
    out = attend(
        query, key, value, scale=scaling, window=sliding_window, documents=cu_seq_lens_q, sinks=s_aux,
        layout=context_layout, is_gathered=is_gathered,
    )  # fmt: skip
    if (padding := others.get("context_padding")) is not None:
        # Padding before a row sees nothing, and the first token's loss is of its logits.
        out = out.masked_fill(padding[:, None, :, None], 0)
    return out.transpose(1, 2).contiguous(), None
