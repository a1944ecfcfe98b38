# SPDX-License-Identifier: Apache-2.0
"""Linear attention of transformers' models over context: finds layers that carry a state along the sequence, and has
the functions that they call for it run on parts of sequences. Nothing of transformers is changed.

Their forward calls functions of its module: a short causal convolution, and a scan, each a kernel where its package is
installed. A layer gets a copy of its class's forward to which these names mean `stretto.parallel`'s functions, which
call the layer's own.
"""

import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Protocol

from torch import Tensor, nn

_CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_STATE_SPACE = "mamba2_chunk_scan"
_FUSED = "mamba2_split_conv1d_scan_combined"
"""Convolution, scan and projection in one: the layer does without it if it returns None."""

_PACKAGES = {_CONVOLUTION: "causal_conv1d", _STATE_SPACE: "mamba_ssm"} | dict.fromkeys(_DELTA_RULES, "fla")
"""Packages whose kernels know documents, which transformers' own operators do not."""

_OTHERS = {  # for single tokens after a cache, which training has none of, and for what is no matter of the sequence
    "causal_conv1d_update",
    "mamba2_selective_state_update",
    "recurrent_kimi_delta_attention",
    "torch_recurrent_gated_delta_rule",
    "apply_mask_to_padding_states",
    "torch",
    "nn",
    "F",
    "math",
}


class ScanParts(Protocol):
    """`stretto.parallel`'s functions of this rank's part of each sequence. Each takes the layer's own function, then
    what that takes."""

    def convolve(self, convolve: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor: ...

    def scan_delta_rule(self, scan: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any: ...

    def scan_state_space(self, scan: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any: ...


def linear_attentions_of(model: nn.Module) -> list[nn.Module]:
    """The layers that carry a state along the sequence by functions that are known here."""
    return [module for module in model.modules() if _CONVOLUTION in _functions_of(module)]


def _functions_of(module: nn.Module) -> dict[str, Any]:
    """The functions of its own module that a layer's forward calls, by name; none of a layer that is not known."""
    forward = inspect.unwrap(type(module).forward)
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if not type(module).__module__.startswith("transformers.") or "forward" in vars(module) or code is None:
        return {}
    called = {name: names[name] for name in code.co_names if name in names}
    is_known = called.keys() <= {_CONVOLUTION, *_DELTA_RULES, _STATE_SPACE, _FUSED} | _OTHERS
    return {name: called[name] for name in called.keys() - _OTHERS} if is_known else {}


def positions_before(model: nn.Module) -> int:
    """The number of positions before each that the convolutions of a model's linear attention read, at most."""
    layers = [part for each in linear_attentions_of(model) for part in each.modules() if isinstance(part, nn.Conv1d)]
    return max((layer.kernel_size[0] - 1 for layer in layers), default=0)


def packages_for_documents(model: nn.Module) -> list[str]:
    """The packages that are missing for a model's linear attention to keep documents of one row apart."""
    needed = {
        _PACKAGES[name] for each in linear_attentions_of(model) for name in _functions_of(each).keys() & _PACKAGES
    }
    return sorted(package for package in needed if importlib.util.find_spec(package) is None)


def replace_scans(model: nn.Module, parts: ScanParts) -> None:
    """Have a model's linear attention be computed on parts of sequences by `parts`."""
    takes: dict[str, Any] = {_CONVOLUTION: parts.convolve, _STATE_SPACE: parts.scan_state_space}
    takes |= dict.fromkeys(_DELTA_RULES, parts.scan_delta_rule)
    for module in linear_attentions_of(model):
        forward: Any = inspect.unwrap(type(module).forward)
        names = dict(forward.__globals__)
        for name, function in _functions_of(module).items():
            names[name] = _nothing if name == _FUSED else partial(takes[name], function)
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(own, module)


def _nothing(*_: Any, **__: Any) -> None:
    """Compute nothing: the layer calls its convolution and its scan instead."""
