# SPDX-License-Identifier: Apache-2.0
"""Matches the names of tensors in a Hugging Face model's files with those of its parameters.

transformers renames tensors as it loads a file, and joins those of experts into one parameter; its table of both
(`conversion_mapping`) is used here as data. Other conversions that it knows are not applied.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

# What transformers calls the steps that stack tensors of experts, and first put several of an expert side by side.
_STACKS = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


@dataclass
class NamesInFiles:
    """Names under which files hold a model's tensors.

    own_names: the model's name of each tensor of the files that is a parameter, or a buffer, as it is; of a tied
    parameter, which has several names, the one that the tensor stands for. stacked: of a
    parameter that is stacked from several, the files' names of each expert's parts, by its own name. dropped: names of
    layers that predict further tokens, which transformers' model does not have. unknown: all others.
    """

    own_names: dict[str, str] = field(default_factory=dict)
    stacked: dict[str, list[list[str]]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def match_names(
    model: "nn.Module", names: Collection[str], own: Mapping[str, str], tensors: "Mapping[str, Tensor]"
) -> NamesInFiles:
    """Find what each tensor of the files is in the model, by its name.

    own: the first name of each of the model's tensors, by all of its names. tensors: these, by first name. Raises
    ValueError if experts are missing, or if there are more than the model has.
    """
    matched = NamesInFiles()
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # of Hugging Face's models
    taken: dict[str, str] = {}
    for name in own:
        for spelling in (name, f"{prefix}{name}", name.removeprefix(prefix)):
            if spelling in names:
                taken[spelling] = name
                break
    matched.own_names = taken
    left = [name for name in names if name not in taken]
    extra = [name for name in left if _is_of_extra_layer(model, name)]
    matched.dropped = extra
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # as the model's class says
    dropped = set(extra)
    stacks = _apply_conversions(model, [name for name in left if name not in dropped], own, prefix, matched)
    for name, parts in stacks.items():
        matched.stacked[name] = _in_order(name, parts, tensors[name].shape[0])
    matched.unknown = [name for name in matched.unknown if not any(re.search(pattern, name) for pattern in ignored)]
    return matched


def _is_of_extra_layer(model: "nn.Module", name: str) -> bool:
    """True if a tensor belongs to a layer after the model's last one that predicts tokens further ahead (MTP)."""
    config: Any = getattr(model, "config", None)
    counts = [getattr(config, key, 0) for key in ("num_nextn_predict_layers", "num_mtp_layers")]
    count = max((each for each in counts if isinstance(each, int)), default=0)
    found = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    layers = getattr(config, "num_hidden_layers", 0)
    return count > 0 and found is not None and layers <= int(found[1]) < layers + count


@dataclass(frozen=True)
class _Part:
    """An expert's part of a stack that a tensor is, and its name in the files, in two: `before`<expert>`after`."""

    expert: int
    part: int
    parts: int
    before: str
    after: str


def _apply_conversions(
    model: "nn.Module", names: Iterable[str], own: Mapping[str, str], prefix: str, matched: NamesInFiles
) -> dict[str, list[_Part]]:
    """Rename tensors as transformers does. Returns those that it stacks, by the parameter's name."""
    renamings, stackings = _conversions(model)
    stacks: dict[str, list[_Part]] = {}
    for name in names:
        renamed = name
        for each in renamings:
            renamed = each.rename_source_key(renamed)[0]
        target = _spelled(renamed, own, prefix)
        if target is not None:
            matched.own_names[name] = target
            continue
        for stacking in stackings:
            joined, pattern = stacking.rename_source_key(renamed)
            if pattern is None:
                continue
            place = _place_of(name, renamed, pattern)
            target = _spelled(joined, own, prefix)
            if target is not None and place is not None:
                patterns = list(stacking.source_patterns)
                before, expert, after = place
                part = _Part(int(expert), patterns.index(pattern), len(patterns), before, after)
                stacks.setdefault(own[target], []).append(part)
                break
        else:
            matched.unknown.append(name)
    return stacks


def _spelled(name: str, own: Mapping[str, str], prefix: str) -> str | None:
    return next((each for each in (name, f"{prefix}{name}", name.removeprefix(prefix)) if each in own), None)


def _place_of(name: str, renamed: str, pattern: str) -> tuple[str, str, str] | None:
    """A file's name around the number of an expert, for which the pattern has a star."""
    found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), renamed)
    if found is None or found.re.groups != 1:
        return None
    tail = renamed[found.end(1) :]  # a renaming changes what is before the number, if anything
    head = name.removesuffix(tail).removesuffix(found[1])
    return (head, found[1], tail) if f"{head}{found[1]}{tail}" == name else None


def _conversions(model: "nn.Module") -> tuple[list[Any], list[Any]]:
    """transformers' renamings for this model, and its conversions that stack tensors of experts."""
    if not hasattr(model, "base_model_prefix"):
        return [], []
    from transformers.conversion_mapping import WeightConverter, WeightRenaming, get_model_conversion_mapping

    transformers_model: Any = model
    conversions = get_model_conversion_mapping(transformers_model)
    renamings = [each for each in conversions if type(each) is WeightRenaming]
    stackings = [each for each in conversions if type(each) is WeightConverter and _is_stacking(each)]
    return renamings, stackings


def _is_stacking(conversion: Any) -> bool:
    """True if a conversion stacks experts over dim 0, after it has put their parts side by side over their rows."""
    operations = list(conversion.operations)
    dims = [getattr(each, "dim", None) for each in operations]
    return (
        [type(each).__name__ for each in operations] in _STACKS
        and dims == [0, 1][: len(dims)]
        and len(conversion.target_patterns) == 1
        and (len(conversion.source_patterns) == 1 or len(operations) == 2)
    )


def _in_order(name: str, parts: Collection[_Part], experts: int) -> list[list[str]]:
    """The files' names of each expert's parts, in order."""
    found = {(part.expert, part.part): f"{part.before}{part.expert}{part.after}" for part in parts}
    for expert, part in sorted(found):
        if expert >= experts:
            raise ValueError(f"{found[expert, part]} is unexpected: {name} has {experts} experts")
    around = {part.part: part for part in parts}
    for part in range(next(iter(parts)).parts):
        if part not in around:
            raise ValueError(f"{name} is stacked from several tensors of each expert, and some of them are missing")
    for expert in range(experts):
        for part, like in sorted(around.items()):
            if (expert, part) not in found:
                raise ValueError(f"{like.before}{expert}{like.after} is missing, which is a part of {name}")
    return [[found[expert, part] for part in sorted(around)] for expert in range(experts)]


def advise_tying(model: "nn.Module", found: Collection[str], wanted: Collection[str]) -> str:
    """Advise what to do if the first missing parameter can be tied by a Hugging Face model to one of the file's."""
    missing = next((name for name in wanted if name not in found), None)
    can_tie = getattr(model, "_tied_weights_keys", None)
    tied_to = can_tie.get(missing) if isinstance(can_tie, Mapping) else None
    if tied_to not in found:
        return ""
    return f"; if it is {tied_to}, tie_word_embeddings=True in the configuration would do"


def is_kept_in_fp32(model: "nn.Module", name: str) -> bool:
    """True if the model's class keeps a parameter in fp32, whatever dtype the others are loaded in."""
    parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(str(part))}($|\.)", name) for part in parts)
