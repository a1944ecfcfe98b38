# SPDX-License-Identifier: Apache-2.0
"""Recognizes transformers' models and linears, and adapts a model's methods to sharded parameters.

transformers is not imported: classes are identified by their names and attributes.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def is_pretrained_model(model: nn.Module) -> bool:
    """True if this is a transformers model, by its class's attributes."""
    return hasattr(model, "base_model_prefix") and hasattr(model, "config")


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model within a wrapper that passes all attributes on, as PEFT's do; any other model itself.

    A wrapper's forward hides what the model's own takes, and its loss.
    """
    return next((module for module in model.modules() if hasattr(type(module), "base_model_prefix")), model)


def adapters_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The kind of each of a model's PEFT adapters, and its configuration."""
    adapters = getattr(model, "peft_config", None)
    found = adapters.values() if isinstance(adapters, dict) else ()
    return [(str(getattr(each.peft_type, "value", each.peft_type)), each) for each in found]


def is_conv1d(module: nn.Module) -> bool:
    """True if this is transformers' Conv1D: a linear that stores [in, out]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def is_linear(module: nn.Module) -> bool:
    """True if a custom transformers class computes nn.Linear (Falcon's), or its transpose."""
    kind = type(module)
    is_falcon = kind.__name__ == "FalconLinear" and kind.__module__ == "transformers.models.falcon.modeling_falcon"
    return is_falcon or is_conv1d(module)


def base_of(model: nn.Module) -> nn.Module:
    """The model without its head; itself, if it has none."""
    return base_and_prefix(model)[0]


def base_and_prefix(model: nn.Module) -> tuple[nn.Module, str]:
    """The model without its head, and its name within the whole (with a dot)."""
    prefix = getattr(model, "base_model_prefix", "")
    inner = getattr(model, str(prefix), None) if prefix else None
    return (inner, f"{prefix}.") if isinstance(inner, nn.Module) else (model, "")


def _replacing(model: nn.Module, name: str) -> Callable[[Callable[..., Any]], object]:
    """A decorator: replaces a model's method, if it has it, by a function of the method and its arguments."""

    def replace(function: Callable[..., Any]) -> object:
        if callable(method := getattr(model, name, None)):

            @functools.wraps(method)
            def replaced(*args: Any, **kwargs: Any) -> Any:
                return function(method, *args, **kwargs)

            setattr(model, name, replaced)
        return function

    return replace


def generate_in_step(model: nn.Module, agree: Callable[[], object] | None, *, until_last: bool) -> None:
    """Have ranks generate the same where they compute parts of the same rows, and go on until the last is done.

    agree: called before each `generate`: gives such ranks one random state, with which they sample the same tokens.
    until_last: where each step gathers weights from all ranks, or sends tokens to their experts. Sets Hugging Face's
    option synced_gpus, which is off by default.
    """
    own: Any = getattr(model, "generate", None)
    if not callable(own) or "synced_gpus" not in inspect.signature(own).parameters:
        return

    @_replacing(model, "generate")
    def generate_on_every_rank(generate: Any, *args: Any, synced_gpus: bool | None = None, **kwargs: Any) -> Any:
        if agree is not None:
            agree()
        return generate(*args, synced_gpus=until_last or None if synced_gpus is None else synced_gpus, **kwargs)


def batch_over_ranks(model: nn.Module, refusal: str | None, ranks: int, make_mesh: Callable[[], Any]) -> None:
    """Have transformers' continuous batching (`generate_batch`) run over ranks that divide heads.

    Its managers keep the ranks of a tensor parallel mesh together: they are given one of the ranks of x, and the KV
    heads that all of them hold, copies counted. refusal: why it cannot run; None if it can. make_mesh: makes the mesh,
    collectively.
    """
    meshes: list[Any] = []

    @_replacing(model, "init_continuous_batching")
    def begin_on_grid(begin: Any, *args: Any, **kwargs: Any) -> Any:
        if refusal is not None:
            raise ValueError(f"generate_batch: {refusal}")
        if ranks == 1:
            return begin(*args, **kwargs)
        if importlib.util.find_spec("transformers.generation.continuous_batching.distributed") is None:
            raise ValueError("generate_batch: this transformers has no continuous batching over ranks; 5.23 would do")
        held: Any = model
        meshes.extend([] if meshes else [make_mesh()])
        held._device_mesh, before = meshes[0], held._device_mesh
        try:
            manager = begin(*args, **kwargs)
        finally:
            held._device_mesh = before
        manager.distributed_helper.tp_plan = dict.fromkeys(_KEYS_AND_VALUES, "colwise")
        make_cache = manager._create_batch_processor

        def make_cache_of_copies() -> Any:
            config = held.config.get_text_config()
            heads = getattr(config, "num_key_value_heads", None)
            config.num_key_value_heads = max(heads or config.num_attention_heads, ranks)
            try:
                return make_cache()
            finally:
                config.num_key_value_heads = heads
                if heads is None:
                    del config.num_key_value_heads

        manager._create_batch_processor = make_cache_of_copies
        return manager


_KEYS_AND_VALUES = ("layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj")


def refuse_saving(model: nn.Module) -> None:
    """Have `save_pretrained` raise ValueError for sharded parameters, before it writes half of a folder."""

    @_replacing(model, "save_pretrained")
    def save_whole(save: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict")
        held = model.parameters() if given is None else given.values()
        if any(isinstance(tensor, DTensor) for tensor in held):
            raise ValueError(
                "save_pretrained does not know that parameters are cut over ranks: call it on rank 0 inside of `with "
                "stretto.full_parameters(model):`, which all ranks enter; where the whole model does not fit, call "
                "stretto.parallel.gather on each parameter, on every rank, and pass them as state_dict=, or `stretto "
                "export` a checkpoint"
            )
        return save(*args, **kwargs)


def refuse_resizing(model: nn.Module) -> None:
    """Have `resize_token_embeddings` raise ValueError: it would replace sharded parameters by unsharded ones."""

    @_replacing(model, "resize_token_embeddings")
    def resize_before(resize: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if new_num_tokens is None:  # asks for the embedding
            return resize(new_num_tokens, *args, **kwargs)
        raise ValueError(
            f"resize_token_embeddings({new_num_tokens}): the embedding of a parallelized model is sharded. Resize it "
            "before parallelize; Stretto pads a vocabulary that x does not divide"
        )


def count_without_embeddings(model: nn.Module) -> None:
    """Have `num_parameters(exclude_embeddings=True)` leave out sharded embeddings, which are no nn.Embedding."""

    @_replacing(model, "num_parameters")
    def count_own(count: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        left_out: dict[int, int] = {}
        for module in model.modules() if exclude_embeddings else ():
            if hasattr(module, "num_embeddings") and not isinstance(module, nn.Embedding):
                weight: Any = module.weight
                left_out[id(weight)] = weight.numel() if weight.requires_grad or not only_trainable else 0
        return int(count(only_trainable, exclude_embeddings)) - sum(left_out.values())


def order_of_pipeline_plan(model: nn.Module) -> dict[str, bool]:
    """Find the modules that come before the blocks by `base_model_pp_plan` of a transformers model."""
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    if "layers" not in plan:
        return {}
    prefix, place = base_and_prefix(model)[1], list(plan).index("layers")
    return {prefix + name: index < place for index, name in enumerate(plan) if index != place}


def checkpoints_itself(layer: nn.Module) -> bool:
    """True if this is a layer whose forward checkpoints itself (GradientCheckpointingLayer)."""
    return _checkpointing_class(layer) is not None


def _checkpointing_class(layer: nn.Module) -> type | None:
    return next((kind for kind in type(layer).__mro__ if kind.__name__ == "GradientCheckpointingLayer"), None)


def compile_inside_of_own_checkpoints(layers: Iterable[nn.Module]) -> None:
    """Have those layers that checkpoint themselves compile what they checkpoint: torch cannot save, in a graph, what a
    checkpoint within it unwraps of sharded parameters.

    Transformers' checkpoints were around the call of a layer, and so of a compiled one, before they were around its
    forward.
    """
    for layer in layers:
        kind = _checkpointing_class(layer)
        if kind is not None and "__call__" not in vars(kind):
            _compile_inside_of_checkpoint(layer)


def _compile_inside_of_checkpoint(layer: Any) -> None:
    own, compile_layer = layer.forward, layer.compile
    compile_forward: Callable[..., Any] | None = None
    compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    def compile_both(*args: Any, **kwargs: Any) -> None:
        nonlocal compile_forward
        compile_forward = functools.partial(torch.compile, *args, **kwargs)
        compiled.clear()
        compile_layer(*args, **kwargs)

    @torch.compiler.disable
    def checkpoint_compiled(*args: Any, **kwargs: Any) -> Any:
        checkpoint = layer._gradient_checkpointing_func

        def checkpoint_inner(function: functools.partial[Any], *inputs: Any) -> Any:
            if compile_forward is None:
                return checkpoint(function, *inputs)
            if function.func not in compiled:
                compiled[function.func] = compile_forward(function.func)
            return checkpoint(functools.partial(compiled[function.func], *function.args, **function.keywords), *inputs)

        layer._gradient_checkpointing_func = checkpoint_inner
        try:
            return own(*args, **kwargs)
        finally:
            layer._gradient_checkpointing_func = checkpoint

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        checkpoints = layer.training and layer.gradient_checkpointing
        return (checkpoint_compiled if checkpoints else own)(*args, **kwargs)

    layer.forward, layer.compile = forward, compile_both


def checkpoint_layers(model: nn.Module) -> bool:
    """Have a transformers model checkpoint its layers, by `_gradient_checkpointing_func` of those that do so
    themselves; returns False for a model that has no such function."""
    enables = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the second before transformers 5
    enable = next((getattr(model, name) for name in enables if hasattr(model, name)), None)
    if not is_pretrained_model(model) or enable is None:
        return False
    enable({"use_reentrant": False})
    return True


def refusal_of_checkpointing(model: nn.Module) -> str | None:
    """Say why activation checkpointing of a transformers model is refused; None if it is not."""
    if not is_pretrained_model(model) or getattr(model, "supports_gradient_checkpointing", True):
        return None
    return (
        f"{type(model).__name__} does not support activation checkpointing, as transformers says "
        "(supports_gradient_checkpointing)"
    )
