# SPDX-License-Identifier: Apache-2.0
"""The parts of a language model's run, checked before any process starts: data, model, memory, checkpoint.

Checks that need no torch run first, so that mistakes are reported immediately.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stretto.axes import check_sizes, name_grid
from stretto.cluster import Cluster
from stretto.cluster.host_memory import check_room, host_memory_limit
from stretto.cluster.local_ranks import count_ranks_here
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.models import GPTConfig
from stretto.planner import predict
from stretto.planner.architecture import Architecture
from stretto.planner.documents import PackedDocuments, pack
from stretto.planner.grid_plan import GridPlan
from stretto.planner.grids import why_impossible
from stretto.planner.optimizer_state import max_parameters, min_on_device, number_bytes, state_on_host
from stretto.planner.pipeline.memory import max_local_parameters
from stretto.planner.pipeline.stage_times import cut_by_weights
from stretto.planner.search_space import PredictKeywords
from stretto.planner.workload import NumberTypes
from stretto.train.checkpoint import find_checkpoint
from stretto.train.checkpoint.metadata import CheckpointMetadata, check_description
from stretto.train.checkpoint.torch_format import fit_to_model, read_index
from stretto.train.config import TrainConfig
from stretto.train.config.rules import nearest_grid
from stretto.train.data import SequenceDataset, open_dataset, write_demo_corpus
from stretto.train.data.documents import sample_lengths
from stretto.train.data.files import OF_DOCUMENTS, find_files
from stretto.train.gpt.model_source import FolderSource, GPTSource, HuggingFaceSource, ModelSource
from stretto.train.path_checks import PYTHON_DOCS, check_outside_data

if TYPE_CHECKING:
    from torch import nn


def check_gpt(config: TrainConfig) -> CheckpointMetadata | None:
    """Check what only language models have. Returns the index of the checkpoint to resume. Raises ValueError."""
    for paths in (config.data.path, config.data.evaluation_path):
        check_outside_data(config.out, paths or [], reads_all=config.data.format not in ("nanogpt", "megatron"))
    folder = open_folder(config)
    dataset = open_data(config)
    open_held_out(config, dataset)
    source = build_source(config, dataset, folder)
    check_placement(config, source)
    predict_run(config, source)
    checkpoint = find_checkpoint(config.out, config.train.resume)
    metadata = None if checkpoint is None else read_index(checkpoint)
    if checkpoint is not None and metadata is not None:
        check_description(checkpoint, metadata, source.description(), config.train.optimizer)

    model = source.build()
    check_built(config, source, model)
    if dataset.has_documents:
        check_takes_documents(config, source, model)
    if folder is not None:
        _check_router_loss(config, folder, model)
    if isinstance(folder, FolderSource):
        from stretto.train.checkpoint.weights import check_safetensors

        check_safetensors(model, folder.weights_file)
    if checkpoint is not None and metadata is not None:
        from stretto.train.checkpoint.state import check_shapes

        check_shapes(checkpoint, fit_to_model(checkpoint, metadata, model), model)
    return metadata


def check_placement(config: TrainConfig, source: ModelSource) -> None:
    """Check, without torch, that the model can be on the run's grid and fits into memory. Raises ValueError."""
    _check_fits_machine(config, source)
    _check_grid(config, source)
    if (architecture := source.architecture(config.train.seq_len)) is not None:
        check_state_fits(config, architecture, gpu_memory_of_cluster(config))


def check_built(config: TrainConfig, source: ModelSource, model: "nn.Module") -> None:
    """Check that the model, which `source` has built, can be on the run's grid. Raises ValueError."""
    from stretto.parallel.resolve import resolve

    resolve(model, config.grid.sizes(), options=config.execution)
    if source.architecture(config.train.seq_len) is None:
        count = sum(parameter.numel() for parameter in model.parameters())
        check_state_fits(config, count, gpu_memory_of_cluster(config))


def open_folder(config: TrainConfig) -> HuggingFaceSource | None:
    """Open the Hugging Face folder, or the public model, that a run names; None if it names a GPT.

    Raises ValueError for one that cannot be trained.
    """
    without_dropout = config.model.dropout == 0
    if config.model.path is not None:
        return FolderSource(config.model.path, without_dropout=without_dropout)
    if config.model.name in PUBLIC_MODELS:
        return HuggingFaceSource(config.model.name, without_dropout=without_dropout)
    return None


def _check_router_loss(config: TrainConfig, folder: HuggingFaceSource, model: "nn.Module") -> None:
    """Raise ValueError for a load-balancing loss of the model's own code that would be added once a micro-batch."""
    from stretto.huggingface.router_loss import balances_load

    if not folder.config.get("output_router_logits") or not balances_load(model):
        return
    sizes = check_sizes(config.grid.sizes())
    rows = config.train.batch // (sizes["data"] * sizes["z"])
    if config.is_pipelined or config.train.micro_batch not in (None, rows):
        what = "pipeline stages" if config.is_pipelined else f"train.micro_batch={config.train.micro_batch}"
        raise ValueError(
            f"output_router_logits of {folder.origin} adds a load-balancing loss in each "
            f"micro-batch, as large as that of the batch, and the run has {what}: set it to false there, or take "
            f"train.micro_batch={rows} and no pipeline"
        )


def check_takes_documents(config: TrainConfig, source: ModelSource, model: "nn.Module") -> None:
    """Raise ValueError for a model, or a run of it, that would not keep attention to a sequence's documents apart."""
    from stretto.huggingface.context import ignores_documents

    reason = ignores_documents(model) if isinstance(source, HuggingFaceSource) else None
    if config.train.cuda_graph:
        reason = "train.cuda_graph is on, and a graph cannot wait for the host, which looks for them"
    if reason is not None:
        raise ValueError(
            f"data.path has documents that attention is to keep apart, but {reason}; data.document_mask=false would do"
        )


def open_data(config: TrainConfig) -> SequenceDataset:
    """Open the data set of a run. Writes the text of `python-docs` to `out` first, if the run asks for it.

    Raises ValueError for files that cannot be trained on.
    """
    return _open(config, config.data.path, config.data.weights)


@dataclass(frozen=True)
class HeldOut:
    """Sequences of a data set that a run is evaluated on, and how many of those of `data.path` it is trained on."""

    dataset: SequenceDataset
    sequences: range
    trained_on: int


def open_held_out(config: TrainConfig, dataset: SequenceDataset) -> HeldOut | None:
    """Open a run's evaluation data, if any; `dataset` is the result of `open_data`.

    Raises ValueError for files that cannot be read, for those that are trained on, and if nothing is left to train on.
    """
    data, wanted = config.data, config.data.evaluation_sequences
    if data.evaluation_path is None:
        if wanted is None:
            return None
        if wanted >= len(dataset):
            raise ValueError(
                f"data.evaluation_sequences is {wanted}, but {data.path!r} has {len(dataset)} sequences of "
                f"train.seq_len={config.train.seq_len}, of which at least 1 is to be trained on"
                + (f"; {max(1, len(dataset) // 10)} would do" if len(dataset) > 1 else "")
            )
        return HeldOut(dataset, range(len(dataset) - wanted, len(dataset)), len(dataset) - wanted)
    sources = data.path if isinstance(data.path, list) and data.weights is not None else [data.path]
    trained_on = {path.resolve() for source in sources for path in find_files(_paths(config, source), data.format)[1]}
    for path in find_files(_paths(config, data.evaluation_path), data.format)[1]:
        if path.resolve() in trained_on:
            raise ValueError(
                f"data.evaluation_path has {path}, which data.path has, too: an evaluation is of data that is not "
                "trained on; data.evaluation_sequences holds out a part of data.path"
            )
    others = _open(config, data.evaluation_path)
    return HeldOut(others, range(len(others) if wanted is None else min(wanted, len(others))), len(dataset))


def _open(config: TrainConfig, path: str | list[str], weights: list[float] | None = None) -> SequenceDataset:
    folder, data = open_folder(config), config.data
    return open_dataset(
        _paths(config, path),
        weights=weights,
        format=data.format,
        field=data.field,
        separator=data.separator,
        document_mask=data.document_mask,
        tokenizer=data.tokenizer,
        model_folder=folder.folder if isinstance(folder, FolderSource) else None,
        token_dtype=data.token_dtype,
        seq_len=config.train.seq_len,
        vocab=config.model.known_vocab() if folder is None else folder.vocab,
    )


def _paths(config: TrainConfig, path: str | list[str]) -> list[str]:
    paths = [path] if isinstance(path, str) else path
    return [str(write_demo_corpus(config.out / f"{each}.txt")) if each == PYTHON_DOCS else each for each in paths]


def build_source(config: TrainConfig, dataset: SequenceDataset, folder: HuggingFaceSource | None) -> ModelSource:
    """Make the source of a run's model, given its data. Raises ValueError where the two do not fit."""
    if folder is None:
        return GPTSource(build_model_config(config, dataset))
    if folder.max_seq_len is not None and config.train.seq_len > folder.max_seq_len:
        raise ValueError(
            f"train.seq_len is {config.train.seq_len}, but the model {folder.origin} is made for at most "
            f"{folder.max_seq_len} tokens; train.seq_len={folder.max_seq_len} would do"
        )
    return folder


def build_model_config(config: TrainConfig, dataset: SequenceDataset) -> GPTConfig:
    """Build the shape of a run's GPT on its data. Raises ValueError where the two do not fit."""
    model = config.model.to_gpt(data_vocab=dataset.vocab_size, seq_len=config.train.seq_len)
    if config.train.seq_len > model.max_seq_len:
        raise ValueError(
            f"train.seq_len is {config.train.seq_len}, but the model's max_seq_len is {model.max_seq_len}; "
            f"train.seq_len={model.max_seq_len} would do, or a larger model.max_seq_len"
        )
    return model


def predict_run(config: TrainConfig, source: ModelSource) -> dict[str, Any] | None:
    """Predict step time and exposed communication by axis (seconds), and peak memory (bytes), with the planner.

    Returns None without `config.cluster`. Raises ValueError for a cluster that is not known, or does not say what a
    prediction needs, and for a family of models that the planner does not know.
    """
    if config.cluster is None:
        return None
    plan = plan_of_run(config, source, Cluster.find(config.cluster))
    return {"step_time": plan.step_time, "exposed": dict(plan.exposed), "peak_memory": plan.peak_memory}


def plan_of_run(config: TrainConfig, source: ModelSource, cluster: Cluster) -> GridPlan:
    """Predict a run on a cluster with the planner. Raises ValueError as `predict_run`."""
    run = config.train
    architecture = source.architecture(run.seq_len)
    if architecture is None:
        raise ValueError(
            f"cluster is {config.cluster!r}, but the planner does not know the blocks of this model, so that nothing "
            "can be predicted; cluster=none would do"
        )
    options = config.execution
    if config.grid.pipe > 1 and options.stages.cuts is None:  # as `parallelize` cuts it
        stages = config.grid.pipe * options.stages.virtual_stages
        options = replace(options, stages=replace(options.stages, cuts=cut_by_weights(architecture, stages)[1:-1]))
    return predict(
        architecture,
        cluster,
        grid=config.grid.sizes(),
        batch=run.batch,
        seq_len=run.seq_len,
        micro_batch=run.micro_batch,
        dtype=run.dtype,
        optimizer=run.optimizer,
        options=options,
        state=run.state,
        clips=run.clip is not None,
        **_schedule_of(config) | {"documents": sample_documents(config)},
    )


def sample_documents(config: TrainConfig) -> PackedDocuments | None:
    """Rows that pack documents as the run's do, of a sample of its data; None where there are none, or no data yet.

    Data sets that are mixed have their shares of the rows.
    """
    data, folder = config.data, config.model.path
    tokenizer = data.tokenizer if data.tokenizer not in (None, "bytes") else folder if data.tokenizer is None else None
    paths = [data.path] if isinstance(data.path, str) else data.path
    if not data.document_mask or PYTHON_DOCS in paths:
        return None
    sources = [[path] for path in paths] if data.weights is not None else [paths]
    rows: list[tuple[int, ...]] = []
    try:
        for source, weight in zip(sources, data.weights or [1.0], strict=True):
            format, files = find_files(source, data.format)
            lengths = (
                []
                if format not in OF_DOCUMENTS
                else sample_lengths(
                    files,
                    format,
                    field=data.field,
                    tokenizer=None if tokenizer is None else Path(tokenizer).expanduser(),
                    separator=data.separator,
                )
            )
            own = pack([(length, 1) for length in lengths or [1 << 40]], config.train.seq_len).rows
            rows += own[: math.ceil(len(own) * weight / sum(data.weights or [1.0]))]
    except ValueError:  # a path that is missing, or what is no data: training says so
        return None
    is_packed = any(len(row) > 2 for row in rows)
    return PackedDocuments(tuple(rows)) if is_packed else None


def _schedule_of(config: TrainConfig) -> PredictKeywords:
    """Describe how a pipeline's steps run, as `predict` takes it."""
    pipeline = config.pipeline
    if config.grid.pipe == 1:
        return {}
    names = ("extra_warm_up", "limit", "serve_first")
    asked = {name: value for name in names if (value := getattr(pipeline, name))}
    asked |= {"schedule": pipeline.schedule, "virtual_stages": pipeline.stages.virtual_stages}
    return cast(PredictKeywords, asked)


def _check_fits_machine(config: TrainConfig, source: ModelSource) -> None:
    """Raise ValueError if the ranks on this machine certainly need more memory than it has.

    Counts parameters, gradients, the optimizer's state and the tokens of a step, but not activations. Only for CPUs:
    a GPU immediately raises an out-of-memory error. Of models that the planner does not know, it counts only the
    tokens.
    """
    if config.device != "cpu":
        return
    grid, run = config.grid, config.train
    architecture = source.architecture(run.seq_len)
    numbers = 0 if architecture is None else architecture.parameters
    sizes = check_sizes(grid.sizes())
    parts = (sizes if architecture is None else architecture.splitting_sizes(sizes)).weight_parts * sizes.pipe
    state = numbers * sum(number_bytes(_types(config), run.state)) // parts
    tokens = run.batch // grid.batch_parts * run.seq_len * 8
    kind, what = (
        ("model", f"a model of {numbers:,} parameters")
        if state > tokens
        else ("batch", f"a batch of train.batch={run.batch} x train.seq_len={run.seq_len} tokens")
    )
    check_room(state + tokens, config.ranks, what, kind)


def _types(config: TrainConfig) -> NumberTypes:
    run = config.train
    averages = run.ema is not None
    return NumberTypes(dtype=run.dtype, optimizer=run.optimizer, has_momentum=bool(run.momentum), has_averages=averages)


def gpu_memory_of_cluster(config: TrainConfig) -> float | None:
    """Bytes of a GPU's memory, where the run names its cluster and that says it; None otherwise, and on CPUs."""
    return None if config.cluster is None or config.device == "cpu" else Cluster.find(config.cluster).gpu.memory


def check_state_fits(config: TrainConfig, model: Architecture | int, gpu_memory: float | None) -> None:
    """Raise ValueError if separate optimizer state needs more than this machine's host memory, or the rest more than a
    GPU's, with the largest model that would fit.

    model: its sizes; or, of one that the planner does not know, its parameters, which are taken to be divided evenly.
    gpu_memory: bytes, None if unknown. Activations are not counted.
    """
    run, types = config.train, _types(config)
    # Of a run that prunes later, the dense state comes first.
    state = replace(run.state, sparsity=0.0) if run.prune_at else run.state
    if not state.is_separate:
        return
    known = None if isinstance(model, int) else model
    sizes = check_sizes(config.grid.sizes())
    sizes = sizes if known is None else known.splitting_sizes(sizes)
    whole = model if isinstance(model, int) else model.parameters
    parameters = whole / sizes.weight_parts / sizes.pipe if known is None else max_local_parameters(known, sizes)

    def name_largest(needed: Callable[[float], float], room: float) -> str:
        count = max_parameters(needed, room)
        largest = f"at most {round(count * whole / parameters):,} parameters"
        if known is None or config.model.path is not None or config.model.name in PUBLIC_MODELS:
            return f"{largest} would fit"
        layers = range(1, known.layers + 1)
        blocks = bisect_right(
            layers, count, key=lambda fewer: math.ceil(max_local_parameters(replace(known, layers=fewer), sizes))
        )
        return f"{largest} would fit, of this GPT {f'model.layers={blocks}' if blocks else 'not one layer'}"

    on_host, on_device = partial(state_on_host, types, state), partial(min_on_device, types, state)
    if run.optimizer_state == "host":
        ranks, limit = count_ranks_here(config.ranks), host_memory_limit(run.host_memory)
        if (needed := on_host(parameters) * ranks) > limit.bytes:
            raise ValueError(
                f"train.optimizer_state is 'host', and the state of {whole:,} parameters takes {needed / 1e9:,.4g} GB "
                f"of host memory (ranks here: {ranks}, {needed / ranks / 1e9:,.4g} GB each), but there are "
                f"{limit.bytes / 1e9:,.4g} GB ({limit.source}); "
                f"{name_largest(on_host, limit.bytes / ranks)}"
            )
    if gpu_memory is not None and (needed := on_device(parameters)) > gpu_memory:
        raise ValueError(
            f"train.optimizer_state is {run.optimizer_state!r}, and a model of {whole:,} parameters needs at least "
            f"{needed / 1e9:,.4g} GB on each GPU without any activations, but a GPU has {gpu_memory / 1e9:,.4g} GB; "
            f"{name_largest(on_device, gpu_memory)}, or more of grid.x, grid.y and grid.z"
        )


def _check_grid(config: TrainConfig, source: ModelSource) -> None:
    """Raise ValueError, with what would do, if the grid cannot hold the model, or `recompute` takes more blocks.

    Where the planner does not know the model, `stretto.parallel.validate` says it later, without another grid.
    """
    architecture, batch = source.architecture(config.train.seq_len), config.train.batch
    if architecture is None:
        return
    config.execution.recomputation.check_blocks(architecture.layers)
    try:
        config.execution.stages.check(config.grid.pipe, architecture.layers)
    except ValueError as error:
        raise ValueError(f"{'pipeline' if str(error).startswith('cuts') else 'grid'}.{error}") from None
    if why := why_impossible(architecture, check_sizes(config.grid.sizes()), batch):
        near = nearest_grid(config.grid, config.ranks, lambda sizes: why_impossible(architecture, sizes, batch) is None)
        would = f"no grid of {config.ranks} ranks can: take fewer" if near is None else f"the grid {near} would do"
        raise ValueError(f"the grid {name_grid(config.grid.sizes())} cannot hold the model: {why}; {would}")
