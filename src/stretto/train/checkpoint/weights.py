# SPDX-License-Identifier: Apache-2.0
"""Imports weights from safetensors files, which other libraries write, under the model's own names and shapes.

torch is imported only after a file has been found, so that a wrong path is reported immediately.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cluster import read_bounded
from stretto.huggingface.weight_names import NamesInFiles, advise_tying, match_names
from stretto.train.checkpoint.file_tensors import (
    CheckedTensor,
    FileTensor,
    PlainTensor,
    refusal_of_dtypes,
    stack,
    with_scales,
)
from stretto.train.checkpoint.folders import warn_once
from stretto.train.checkpoint.metadata import differences, first_names, persistent_buffers, saved_tensors
from stretto.train.checkpoint.safetensors_checksums import StoredTensor, read_header, require_sealed_index

if TYPE_CHECKING:
    from torch import nn

MAX_INDEX_BYTES = 1 << 26  # a tensor takes about 100
_COMPARED_AT_ONCE = 1 << 23  # numbers


def import_safetensors(model: "nn.Module", file: str | Path) -> None:
    """Fill the model's parameters from `file`: a .safetensors file, or the .index.json of several.

    `model` is plain or returned by `parallelize`: each rank reads only its own part, and converts it to the dtype of
    its parameters. A tied weight may have any of its names in the file; if it has several, with different values, those
    of a plain model are untied (`untie_as_in`). Of a Hugging Face model, names may have or lack
    the prefix of the model without its head, as in files of either of the two; what its class says to ignore is
    ignored; tensors of one expert each are read into the parameter that has all experts; and fp8 with a scale for each
    block of 128 x 128 is dequantized. Persistent buffers are filled too. Layers that predict further tokens
    (`num_nextn_predict_layers`), which transformers' model does not have, are dropped with a warning.

    Of files that Stretto has written, what is read is checked. Raises DamagedError, with the parameters filled in part,
    where it is not what was written; and ValueError, before anything is changed, for a file that is not safetensors,
    for the first parameter that is missing, unexpected, of another shape or in a dtype of quantized weights, and as
    `untie_as_in` does.
    """
    import torch

    from stretto.parallel.pipeline.stages import whole_model
    from stretto.train.checkpoint.state import sharded_state_of

    file = Path(file)
    untie_as_in(model, file)
    with _open_weights(whole_model(model), file) as sources, torch.no_grad():
        held = saved_tensors(model)
        for name, source in sources:
            if name not in held:  # another pipeline stage has it
                continue
            for box in sharded_state_of(held[name]).boxes:
                source.copy_into(box.values, box.offsets)


def check_safetensors(model: "nn.Module", file: Path) -> None:
    """Raise the ValueError that `import_safetensors` would. Reads no weights; the model may be on the meta device."""
    with _open_weights(model, file):
        pass


def untie_as_in(model: "nn.Module", file: Path) -> None:
    """Untie the weights of a plain model that the file holds under several names with different values.

    Each gets a parameter of its own, with a line in the log, as transformers does where a configuration ties weights
    that its file has twice. Reads only tensors of tied weights; the model may be on the meta device. Raises ValueError,
    which names both, if `parallelize` has returned the model.
    """
    from torch import nn

    from stretto.parallel.layout import has_layout
    from stretto.parallel.pipeline.stages import whole_model

    whole = whole_model(model)
    first = first_names(whole)
    if len(set(first.values())) == len(first):
        return
    tied: dict[str, dict[str, FileTensor]] = {}  # by a parameter's first name, tensors of the file by each of its names
    with _open_tensors(file) as tensors:
        own = {name: there for there, name in _match(whole, file, tensors).own_names.items()}
        for name in (name for name in first if name in own):
            tied.setdefault(first[name], {})[name] = tensors[own[name]]
        for parameter_name, by_name in tied.items():
            kept, *others = _group_equal(by_name)
            if others and any(map(has_layout, model.parameters())):
                raise ValueError(
                    f"{file} has {kept[0]} and {others[0][0]} with different values, but they are one parameter of the "
                    "model that parallelize has returned: load the file before parallelize, or build the model with "
                    "tie_word_embeddings=False in its configuration (a GPT: tie_embeddings=False)"
                )
            if others:
                check_safetensors(whole, file)  # before anything is changed
            for names in others:
                like = model.get_parameter(parameter_name)
                parameter = nn.Parameter(like.detach().clone(), like.requires_grad)
                for name in names:
                    owner, _, key = name.rpartition(".")
                    setattr(model.get_submodule(owner), key, parameter)
                    getattr(model, "all_tied_weights_keys", {}).pop(name, None)  # by transformers: what it saves once
                warn_once(
                    f"{file} has {kept[0]} and {', '.join(names)} with different values: they are not tied, although "
                    "the model's configuration ties them"
                )


def _group_equal(tensors: Mapping[str, FileTensor]) -> list[list[str]]:
    """Group the names of tensors whose values are equal, in order."""
    groups: list[list[str]] = []
    for name, tensor in tensors.items():
        group = next((group for group in groups if _are_equal(tensors[group[0]], tensor)), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return groups


def _are_equal(one: FileTensor, other: FileTensor) -> bool:
    """Compare two tensors of files, some rows at a time."""
    import torch

    if one.shape != other.shape:
        return False
    rows, *sizes = one.shape or (1,)
    at_once = max(1, _COMPARED_AT_ONCE // max(1, prod(sizes)))
    for start in range(0, rows, at_once):
        values = torch.empty((2, min(at_once, rows - start), *sizes), dtype=torch.float64, device="cpu")
        for tensor, into in zip((one, other), values, strict=True):
            tensor.copy_into(into.view(-1 if tensor.shape else (), *sizes), (start, *(0 for _ in sizes)))
        if not torch.equal(*values):
            return False
    return True


@contextmanager
def _open_tensors(file: Path) -> Iterator[dict[str, FileTensor]]:
    """Open the tensors of a file, or of those of an index, by name."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as files:
        opened: dict[str, PlainTensor] = {}
        for part in files_of_index(file):
            try:
                stored = read_header(part)
                content = files.enter_context(safe_open(part, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{part} cannot be read as safetensors: {error}") from error
            opened |= {name: _tensor_of(content.get_slice(name), stored[name]) for name in content.keys()}  # noqa: SIM118
        try:
            tensors = with_scales(opened)
        except ValueError as error:
            raise ValueError(f"{file} is of another model: {error}") from None
        yield tensors


def _match(model: "nn.Module", file: Path, tensors: Mapping[str, FileTensor]) -> NamesInFiles:
    try:
        return match_names(model, tensors, first_names(model), saved_tensors(model))
    except ValueError as error:
        raise ValueError(f"{file} is of another model: {error}") from None


@contextmanager
def _open_weights(model: "nn.Module", file: Path) -> Iterator[list[tuple[str, FileTensor]]]:
    """Open the file's tensors, each with the name of the model's parameter or buffer that it is for."""
    with _open_tensors(file) as tensors:
        names, first = _match(model, file, tensors), first_names(model)
        try:
            stacked = [(name, stack(tensors, experts)) for name, experts in names.stacked.items()]
        except ValueError as error:
            raise ValueError(f"{file} is of another model: {error}") from None
        sources = [(first[name], tensors[there]) for there, name in names.own_names.items()] + stacked
        found = {name: tensors[there].shape for there, name in names.own_names.items()}
        found |= {name: source.shape for name, source in stacked}
        filled = {first[name] for name in found}
        buffers = {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model).items()}
        wanted = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name in found or (first[name] == name and name not in filled)
        }
        wanted |= {name: shape for name, shape in buffers.items() if name in found}
        found |= {name: tensors[name].shape for name in names.unknown}
        if difference := next(differences(found, wanted), None):
            raise ValueError(f"{file} is of another model: {difference}{advise_tying(model, found, wanted)}")
        held = saved_tensors(model)
        for name, source in sources:
            if refusal := refusal_of_dtypes(name, source.dtypes, held[name].dtype):
                raise ValueError(f"{file}: {refusal}")
        _warn_of_differences(file, names.dropped, [name for name in buffers if name not in found])
        yield sources


def _tensor_of(opened: Any, stored: StoredTensor) -> PlainTensor:
    return PlainTensor(opened) if stored.checksums is None else CheckedTensor(opened, stored)


def _warn_of_differences(file: Path, dropped: Sequence[str], missing: Sequence[str]) -> None:
    """Warn, on the first rank, of tensors of the file that are not read, and of buffers that it does not have."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_rank() > 0:
        return
    if dropped:
        warnings.warn(
            f"{file} has layers that predict further tokens ({dropped[0]} and {len(dropped) - 1} other tensors), which "
            "transformers' model does not have: they are dropped, neither trained nor exported",
            stacklevel=2,
        )
    if missing:
        warnings.warn(f"{file} has no {', '.join(missing)}: the model's initial values stay", stacklevel=2)


def files_of_index(file: Path) -> list[Path]:
    """List the safetensors files of an index, or the one file that is none. Raises ValueError."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    if file.suffix != ".json":
        return [file]
    text = read_bounded(file, MAX_INDEX_BYTES, "an index of safetensors files")
    require_sealed_index(file, text)
    try:
        weight_map = json.loads(text)["weight_map"]
        names = sorted({Path(str(name)).name for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not an index of safetensors files: {error!r}") from error
    return [file.with_name(name) for name in names]
