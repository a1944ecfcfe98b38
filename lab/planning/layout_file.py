# SPDX-License-Identifier: Apache-2.0
"""Settings of `python -m lab layouts`, and the file that defines its runs.

Such a file has the options of `stretto train` that all layouts share, those of each layout, and peers:

    [config.model]              # options of `stretto train`, as in its own files; no `out`, no `[data]`
    layers = 16
    ...
    [config.train]
    batch = 16
    ...
    [layouts."pipe=2 z=2"]      # a layout's own options: its grid, schedule, micro-batch, recomputation, state
    grid = { pipe = 2, z = 2 }
    pipeline.schedule = "1f1b"
    train.micro_batch = 1
    [peers."FSDP2, state on the host"]
    micro_batch = 2
    optimizer_state = "host"
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from stretto.bench.settings import require_known
from stretto.suggestions import did_you_mean_file
from stretto.train.config.messages import describe_problems
from stretto.train.config.options import Section

if TYPE_CHECKING:
    from stretto.train.config import TrainConfig

MAX_LAYOUTS = 64
_SECTIONS = ("config", "layouts", "peers")


class FsdpPeer(Section):
    """Options of torch's FSDP2 over all ranks.

    micro_batch: sequences of a forward and backward pass; gradients accumulate, unreduced, over those of a step.
    frees_weights: gather weights again in the backward pass. recompute: activation checkpointing of every block.
    optimizer_state: "host" is FSDP2's CPUOffloadPolicy. Gradients are reduced in bf16, as Stretto's are.
    """

    micro_batch: int = Field(1, ge=1)
    frees_weights: bool = False
    recompute: bool = False
    optimizer_state: Literal["fp32", "host"] = "fp32"


@dataclass(frozen=True)
class LayoutFile:
    """A file of layouts, checked. `layouts` are configurations without data: their `data.path` names no file."""

    path: Path
    layouts: "Mapping[str, TrainConfig]"
    peers: Mapping[str, FsdpPeer]

    @property
    def name(self) -> str:
        """The file's name without its ending, which names the results."""
        return self.path.stem

    @property
    def first(self) -> "TrainConfig":
        """The first layout: all have the same model, batch and number of ranks."""
        return next(iter(self.layouts.values()))


def read_layouts(path: Path) -> LayoutFile:
    """Read and check a file of layouts. Raises ValueError that names the layout, the option and the rule."""
    if not path.is_file():
        raise ValueError(f"there is no file of layouts {path}{did_you_mean_file(path, ('.toml',))}")
    try:
        content = tomllib.loads(path.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is no file of layouts: {error}") from error
    require_known("section", content, _SECTIONS)
    parts = {name: content.get(name, {}) for name in _SECTIONS}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ValueError(f"{path}: {name} is {part!r}, but must be a table")
    if not 1 <= len(parts["layouts"]) <= MAX_LAYOUTS:
        raise ValueError(f"{path} has {len(parts['layouts'])} layouts, but there must be 1 to {MAX_LAYOUTS}")
    layouts = {name: _read_layout(path, name, parts["config"], own) for name, own in parts["layouts"].items()}
    file = LayoutFile(path, layouts, {name: _read_peer(path, name, own) for name, own in parts["peers"].items()})
    shared = _describe_shared(file.first)
    for name, layout in layouts.items():
        for what, value in _describe_shared(layout).items():
            if value != shared[what]:
                raise ValueError(
                    f"{path}: the layout {name!r} has another {what} than {next(iter(layouts))!r}: {value!r}, not "
                    f"{shared[what]!r}"
                )
    batch, ranks = file.first.train.batch, file.first.ranks
    for name, peer in file.peers.items():
        if batch % (ranks * peer.micro_batch):
            raise ValueError(
                f"{path}: the peer {name!r} has micro_batch={peer.micro_batch}, which does not divide the {batch} "
                f"sequences of {ranks} ranks"
            )
    return file


def _describe_shared(layout: "TrainConfig") -> dict[str, Any]:
    """The options that all layouts of a file must share."""
    run = layout.train
    return {
        "model": layout.model,
        "train.batch": run.batch,
        "train.seq_len": run.seq_len,
        "number of ranks": layout.ranks,
    }


def _read_layout(path: Path, name: str, shared: Mapping[str, Any], own: Any) -> "TrainConfig":
    from stretto.train.config import ConfigError, TrainConfig, make_config

    if not isinstance(own, dict):
        raise ValueError(f"{path}: the layout {name!r} is {own!r}, but must be a table of options")
    unmeasured = {"out": "nowhere", "data": {"path": "nowhere"}, "train": {"steps": 1 << 20, "lr": 1e-5}}
    merged = _merge(_merge(unmeasured, shared), own)
    try:
        config = make_config(merged, source=f"{path}: the layout {name!r}")
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path}: the layout {name!r} is of a DLRM, which has no grid")
    return config


def shrink(file: LayoutFile) -> LayoutFile:
    """The same layouts of a model that a CPU trains in no time: narrow, with short sequences, in fp32."""
    from stretto.train.config import TrainConfig

    def shrink_one(layout: "TrainConfig") -> "TrainConfig":
        options = layout.model_dump(mode="json", exclude_unset=True)
        heads = layout.model.heads or 8
        sizes = {"hidden": 8 * heads, "heads": heads, "ffn": 128, "vocab": 256, "max_seq_len": 32}
        sizes["layers"] = min(layout.model.layers or 8, 8)
        if layout.model.num_experts is not None:
            sizes |= {"expert_ffn": 64, "num_experts": min(layout.model.num_experts, 8)}
        options["model"] |= sizes
        options["train"] |= {"seq_len": 32, "dtype": "fp32"}
        options["train"].pop("expert_rows", None)
        options.get("pipeline", {}).pop("cuts", None)
        return TrainConfig.model_validate(options)

    return LayoutFile(file.path, {name: shrink_one(layout) for name, layout in file.layouts.items()}, file.peers)


def _merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings, with the second's values where both have one; tables are merged by their keys."""
    merged = dict(first)
    for key, value in second.items():
        is_both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if is_both else value
    return merged


def _read_peer(path: Path, name: str, own: Any) -> FsdpPeer:
    if not isinstance(own, dict):
        raise ValueError(f"{path}: the peer {name!r} is {own!r}, but must be a table of options")
    try:
        return FsdpPeer.model_validate(own)
    except ValidationError as error:
        problems = "; ".join(describe_problems(error, FsdpPeer.model_fields))
        raise ValueError(f"{path}: the peer {name!r}: {problems}") from None


def predictions_file(out: Path, name: str) -> Path:
    """Where the predictions of a file of layouts are, in the folder of results."""
    return out / f"predictions-{name}.json"


def read_layout_predictions(out: Path, file: LayoutFile) -> list[dict[str, Any]]:
    """Read each layout's prediction. Raises ValueError if the file is absent or of other options."""
    path = predictions_file(out, file.name)
    remedy = f"write it before you measure: python -m lab layouts --file {file.path} --cluster CLUSTER.toml"
    if not path.is_file():
        raise ValueError(f"there is no file of predictions at {path}; {remedy}")
    try:
        rows: dict[str, dict[str, Any]] = {row["grid"]: row for row in json.loads(path.read_text())["rows"]}
        for name, layout in file.layouts.items():
            if name not in rows:
                raise ValueError(f"{path} has no prediction for the layout {name!r}; {remedy}")
            if rows[name]["options"] != describe_options(layout):
                raise ValueError(f"{path} predicts the layout {name!r} with other options; {remedy}")
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no predictions: {error!r}; {remedy}") from error
    return [rows[name] for name in file.layouts]


def describe_options(layout: "TrainConfig") -> dict[str, Any]:
    """All options of a layout, as JSON has them."""
    dumped: dict[str, Any] = layout.model_dump(mode="json")
    return {name: dumped[name] for name in ("grid", "model", "train", "overlap", "pipeline")}
