# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md from the options: `python docs/configuration.py`."""

import types
from collections.abc import Iterator
from inspect import getdoc
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from stretto.atomic_files import write_atomically
from stretto.train.config.gpt import TrainConfig
from stretto.train.config.options import JobConfig, RunOptions, Section
from stretto.train.kinds import KINDS, config_type

HEAD = """\
# Configuration

<!-- Written by `python docs/configuration.py` from src/stretto/train/config. -->

You can look up every option of a training run here, with its default. A run is described by a TOML file:
`stretto train CONFIG.toml`. Any option can be replaced on the command line with
`--set`, as often as needed:

```sh
stretto init demo
stretto train demo.toml --set train.steps=3 --set train.lr=1e-3 --set out=runs/mine
```

A value is read as TOML (`2`, `true`, `["a", "b"]`) if it is valid TOML, and otherwise as text, so paths and names need
no quotes. The text `none` turns off an option that can be turned off. Unknown options are refused. The run's folder
stores the whole configuration in `config.toml`, which is again a file for `stretto train`.

`stretto init` lists configurations to start from, and `stretto init NAME` writes one:
[demo](../src/stretto/configs/demo.toml), [gpt2-small](../src/stretto/configs/gpt2-small.toml),
[llama](../src/stretto/configs/llama.toml), [long-context](../src/stretto/configs/long-context.toml),
[moe](../src/stretto/configs/moe.toml) and [dlrm](../src/stretto/configs/dlrm.toml). The options of GPTs and of
[Hugging Face models](fine-tuning.md) come first, then [those of DLRMs](#a-dlrms-options), and at last
[environment variables](#environment-variables), which are not of a run alone.
"""

VARIABLES = (  # name, value, default, meaning
    (
        "STRETTO_CACHE",
        "a folder",
        "`$XDG_CACHE_HOME/stretto`, or `~/.cache/stretto`",
        "where measured times, compiled code and tokens are kept: all of it can be made again. On several "
        "machines, a folder that all see saves [tokenizing](data.md#documents) on each",
    ),
    (
        "STRETTO_DEBUG",
        "`0` \\| `1`",
        "`0`",
        "ranks compare each call of an [operator](operators.md#limits) or of the "
        "[backend](backend.md#when-something-goes-wrong) before it starts",
    ),
    (
        "STRETTO_CONFIRM",
        "`0` \\| `1`",
        "`1`",
        "the first call of a kind [times](operators.md#which-implementation-runs) kernel and library on its "
        "own operands",
    ),
    (
        "STRETTO_COLLECTIVES_TABLE",
        "a file",
        "the times in the cache",
        "measured times by which [collectives](gpu-collectives.md#which-algorithm-runs) are chosen",
    ),
    (
        "STRETTO_SCHEDULES",
        "a folder",
        "none",
        "MSCCL XML files that each group of the [backend](backend.md) installs",
    ),
    (
        "STRETTO_NODES",
        "`2x4`: nodes x ranks, or `3,1`: ranks of each node",
        "machines are nodes",
        "declares ranks of one machine to be [several nodes](two-levels.md#try-it-on-one-machine); the same "
        "on all ranks, or it is refused",
    ),
    (
        "STRETTO_NICS",
        "names, with commas",
        "all that are up and about the fastest",
        "the [interfaces](two-levels.md#network-interfaces) of which each rank takes the nearest",
    ),
    (
        "STRETTO_PROXY",
        "`auto` \\| `native` \\| `python`",
        "`auto`",
        "who sends [puts between nodes](between-nodes.md): a thread in C++, compiled at first use (4 "
        "seconds), or one in Python, with the same frames; `auto` is native where there is a compiler",
    ),
    (
        "STRETTO_WATCHDOG",
        "seconds, 0 for never",
        "`60`",
        "a [failed wait](when-ranks-fail.md#failed-waits-of-gpu-kernels) that nothing has raised by then ends "
        "the process",
    ),
    (
        "STRETTO_JOB_TOKEN",
        "a secret",
        "none",
        "keys what [watchers](security.md#how-ranks-are-watched) of several nodes tell each other",
    ),
    (
        "STRETTO_SHARE_GPUS",
        "`0` \\| `1`",
        "`0`",
        "for tests: [several ranks share a GPU](testing.md#ranks-that-share-a-gpu)",
    ),
    (
        "STRETTO_SIGNAL_BY_COPIES",
        "`0` \\| `1`",
        "`0`",
        "for tests: operators do as on [GPUs without atomic operations on each other's "
        "memory](operators.md#which-implementation-runs)",
    ),
)

ENVIRONMENT = """\
## Environment variables

Set them for all ranks alike, before the ranks start. Empty is unset; another value than the table's is an error.

| variable | value | default | meaning |
|---|---|---|---|
{rows}

`stretto train` sets two for its ranks: `STRETTO_ATTEMPT`, how often ranks were started before, and, with
`train.max_restarts`, `STRETTO_SLOTS`, [the slots in use](when-ranks-fail.md#restartsjsonl). Of others' variables it
reads those of [launchers](launching.md), `CUDA_DEVICE_MAX_CONNECTIONS` (queues to a GPU,
[unset or at least 4](operators.md#which-implementation-runs)), `GLOO_SOCKET_IFNAME`, `MASTER_ADDR`, `OMP_NUM_THREADS`,
and `CXX` and `NCCL_HOME` to compile; `TRITON_INTERPRET=1` has kernels [run on CPUs](tiles.md#without-a-gpu).
"""


def reference() -> str:
    """Write the text of docs/configuration.md: a table of options for each section of each kind of model."""
    pieces = [HEAD, *_tables(TrainConfig)]
    for kind in map(config_type, KINDS):
        if kind is not TrainConfig:
            also = ", ".join(f"`{name}`" for name in RunOptions.model_fields if _is_shared(name, kind))
            pieces += [f"{kind.reference}{also}.\n", *_tables(kind)]
    rows = (f"| `{name}` | {value} | {default} | {meaning} |" for name, value, default, meaning in VARIABLES)
    pieces.append(ENVIRONMENT.format(rows="\n".join(rows)))
    return "\n".join(pieces)


def _tables(kind: type[JobConfig]) -> Iterator[str]:
    """Write a table for each section, without the options that a kind shares with a GPT."""
    is_first = kind is TrainConfig
    top = {
        name: field
        for name, field in kind.model_fields.items()
        if _section(field) is None and (is_first or name not in JobConfig.model_fields)
    }
    yield _table("The run", "Options before any section.", "", top)
    for name, field in kind.model_fields.items():
        if (section := _section(field)) is not None:
            fields = {
                key: f
                for key, f in section.model_fields.items()
                if is_first or name != "train" or not _is_shared(key, kind)
            }
            yield _table(f"`[{name}]`", getdoc(section) or "", f"{name}.", fields)


def _is_shared(name: str, kind: type[JobConfig]) -> bool:
    """Check whether an option of `[train]` is the same for every kind of model."""
    options = _section(kind.model_fields["train"])
    assert options is not None
    return repr(RunOptions.model_fields.get(name)) == repr(options.model_fields[name])


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _table(title: str, about: str, prefix: str, fields: dict[str, FieldInfo]) -> str:
    lines = [f"## {title}", "", about, "", "| option | value | default | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{prefix}{name}` | {_values(field)} | {_default(field)} | {field.description} |"
        for name, field in fields.items()
    ]
    return "\n".join(lines) + "\n"


def _values(field: FieldInfo) -> str:
    """Describe the values that an option takes: type or choices, unit, bounds."""
    words = _type_words(field.annotation)
    signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    bounds = [
        f"{word} {_number(bound)}"
        for rule in field.metadata
        for sign, word in signs.items()
        if (bound := getattr(rule, sign, None)) is not None
    ]
    unit = _extra(field)["unit"]
    return ", ".join(filter(None, [f"{words} of {unit}" if unit else words, *bounds]))


def _extra(field: FieldInfo) -> dict[str, Any]:
    assert isinstance(field.json_schema_extra, dict)  # `option` puts it there
    return field.json_schema_extra


def _number(bound: float) -> str:
    """Write a bound; large powers of two as 2^63."""
    is_power = isinstance(bound, int) and bound >= 1 << 16 and bound.bit_count() == 1
    return f"2^{int(bound).bit_length() - 1}" if is_power else f"{bound:g}"


def _type_words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " \\| ".join(f"`{_word(choice)}`" for choice in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return ", or ".join(_type_words(kind) for kind in get_args(annotation) if kind is not types.NoneType)
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        words = _type_words(get_args(item)[0] if get_origin(item) is Annotated else item)
        return f"a list of {words.removeprefix('a ').replace('list', 'lists', 1) if words[:2] == 'a ' else words + 's'}"
    return {int: "number", float: "number", bool: "`true` \\| `false`", str: "text", Path: "path"}[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    match field.default:
        case None:
            return str(_extra(field)["unset"])
        case value:
            return f"`{_word(value)}`"


def _word(value: Any) -> str:
    """A value as TOML has it, as far as that differs from Python's text."""
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    write_atomically(Path(__file__).with_suffix(".md"), reference())
