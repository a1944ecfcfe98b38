# SPDX-License-Identifier: Apache-2.0
"""`stretto plan`: predicts which grid is fastest and fits into memory, without the machine."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from stretto.cli.commands import allow_only, refuse_options
from stretto.cli.console import Json, refusing_bad_input
from stretto.cli.plan_tables import plan_dlrm, print_formulas, print_inference, print_modes, print_table
from stretto.execution import StateLocation, StateOptions, TwoLevel, check_sparsity, option_help
from stretto.quantities import read_seconds
from stretto.suggestions import are_missing, require_one_of

if TYPE_CHECKING:
    from stretto.cluster import Cluster
    from stretto.planner import GridPlan
    from stretto.recommendation.training.config import DLRMTrainConfig


ConfigFile = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.toml", help="A training configuration: its model, batch, lengths and dtype."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A name (llama-3-8b, qwen3-30b-a3b, gpt-20b; any other lists all), a .toml with [model], or a Hugging "
        "Face config.json."
    ),
]
ClusterName = Annotated[
    str | None, typer.Option(help="A machine of `stretto cluster list`, or a cluster file (`stretto probe`).")
]
Batch = Annotated[int | None, typer.Option(help="Global batch, in sequences.")]
SeqLen = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
DocumentLengths = Annotated[
    str | None,
    typer.Option(metavar="FILE|pile", help="Lengths of packed documents, in tokens, a line each; pile: long-tailed."),
]
# Options under a heading of --help.
_in_step = partial(typer.Option, rich_help_panel="How a step runs")
_of_experts = partial(typer.Option, rich_help_panel="Mixtures of experts")
_of_pipelines = partial(typer.Option, rich_help_panel="Pipelines")
_of_inference = partial(typer.Option, rich_help_panel="Inference")
_of_output = partial(typer.Option, rich_help_panel="Output")


def plan(
    call: typer.Context,
    config: ConfigFile = None,
    model: Model = None,
    cluster: ClusterName = None,
    gpus: Annotated[int | None, typer.Option(help="Number of GPUs (default: all).")] = None,
    batch: Batch = None,
    seq_len: SeqLen = None,
    documents: DocumentLengths = None,
    cost: Annotated[
        str,
        typer.Option(
            help="full: whole steps. paper: the linears' collectives (Singh, 5.1 to 5.7). simulated: full, then the "
            "best grids simulated."
        ),
    ] = "full",
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, fp64 or fp8.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw, muon or sgd.")] = None,
    micro_batch: Annotated[int | None, _in_step(help="Sequences in a forward pass (default: searched).")] = None,
    recompute: Annotated[
        str | None, _in_step(help=f"As train.recompute: {option_help('recompute')} (default: none or full).")
    ] = None,
    optimizer_state: Annotated[str | None, _in_step(help="As train.optimizer_state: fp32, device or host.")] = None,
    sparsity: Annotated[
        float | None,
        _in_step(
            help="As train.sparsity: part of weights that is pruned; state is on the device, or by --optimizer-state."
        ),
    ] = None,
    clip: Annotated[bool | None, _in_step(help="Whether gradients are clipped.")] = None,
    memory: Annotated[
        str | None,
        _in_step(metavar="auto", help="auto: search --optimizer-state and --recompute, unless they are set."),
    ] = None,
    modes: Annotated[bool, _of_output("--modes", help="Memory and time of each --recompute on the best grid.")] = False,
    explain: Annotated[
        bool,
        _of_output(
            "--explain", help="Memory formulas and bytes sent, of the best grid; of a DLRM, why tables are cut."
        ),
    ] = False,
    reshard: Annotated[
        str | None,
        _in_step(help=f"As train.reshard: {option_help('reshard')} (default: after_backward or after_forward)."),
    ] = None,
    shard_sequence: Annotated[bool | None, _in_step(help="As train.shard_sequence (default: searched).")] = None,
    two_level: Annotated[
        str | None,
        _in_step(
            metavar="auto|true|false",
            help="As train.two_level: z and data in two levels, between nodes and inside them (default: false).",
        ),
    ] = None,
    overlap: Annotated[bool, _in_step(help="Overlap collectives with computation.")] = True,
    captured: Annotated[
        bool, _in_step("--captured", help="Steps run as one CUDA graph, which the host just starts.")
    ] = False,
    context: Annotated[
        str | None,
        _in_step(
            metavar="N|auto",
            help="Ranks that each sequence is cut among; auto searches (default: 1; auto from 32,768 tokens on). With "
            "--inference: tokens in the cache of a request that decodes; several, with commas, are equally likely.",
        ),
    ] = None,
    expert: Annotated[int | None, _of_experts(help="Expert-parallel ranks (default: searched).")] = None,
    expert_tensor: Annotated[
        str | None, _of_experts(help="cut: x splits each expert. fold: x is expert-parallel (default: searched).")
    ] = None,
    imbalance: Annotated[
        float | None, _of_experts(help="Rows of the most loaded rank, divided by the mean (default: 1.1).")
    ] = None,
    pipe: Annotated[
        str | None, _of_pipelines(metavar="N|auto", help="Pipeline ranks; auto searches (default: 1).")
    ] = None,
    schedule: Annotated[
        str | None,
        _of_pipelines(help="gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v or message-driven (default: searched)."),
    ] = None,
    virtual_stages: Annotated[
        int | None, _of_pipelines(help="Stages on each rank of pipe (default: searched).")
    ] = None,
    extra_warm_up: Annotated[
        int | None, _of_pipelines(help="For 1f1b: more forward passes before the first backward.")
    ] = None,
    limit: Annotated[int | None, _of_pipelines(help="For message-driven: micro-batches in flight.")] = None,
    serve_first: Annotated[str | None, _of_pipelines(help="For message-driven: arrival, backward or forward.")] = None,
    inference: Annotated[
        bool,
        _of_inference(
            "--inference", help="Rank grids by how they answer --batch requests at a time (stretto.inference)."
        ),
    ] = False,
    prompt: Annotated[
        str | None, _of_inference(help="Tokens of a prompt; several, with commas, are equally likely.")
    ] = None,
    tpot: Annotated[str | None, _of_inference(help="The longest time per output token, such as 20ms.")] = None,
    top: Annotated[int, _of_output(help="Number of rows in the table.", min=1)] = 15,
    as_json: Json = False,
) -> None:
    """Rank every grid of data x X x Y x Z for a model on a cluster by predicted time, with memory and reasons.

    With --pipe, grids of several pipeline stages too, each with its best schedule; with --context, those that cut
    sequences.

    Needs no GPU. Options that are not given are a configuration's, or the defaults of train. For example:

    - stretto plan --model gpt-20b --cluster perlmutter --gpus 32 --batch 1024 --seq-len 2048
    - stretto plan demo.toml --cluster dgx-h200 --gpus 4
    - stretto plan dlrm.toml --cluster dgx-h200 --gpus 8 --explain (a DLRM: its tables' placement)
    - stretto plan --model gpt-80b --cluster alps --gpus 512 --batch 2048 --seq-len 2048 --pipe auto
    - stretto plan --inference --model llama-3-8b --cluster dgx-h200 --prompt 2048 --context 1024 --batch 64 --tpot 20ms
    """
    if inference:
        requests = {"model": model, "cluster": cluster, "prompt": prompt, "context": context, "batch": batch}
        with refusing_bad_input(as_json=as_json):
            allow_only(call, "--inference", *requests, "inference", "gpus", "tpot", "dtype", "top")
            _plan_inference(requests, gpus, tpot, dtype or "bf16", top, as_json=as_json)
        return
    with refusing_bad_input(as_json=as_json):
        refuse_options(call, "a training plan; --inference takes it", "prompt", "tpot")
        dlrm = None if config is None else _find_dlrm(config)
        if dlrm is not None:
            what = "a DLRM's plan, which takes --cluster, --gpus, --explain and --json"
            allow_only(call, what, "config", "cluster", "gpus", "explain")
            plan_dlrm(dlrm, cluster, gpus, explain=explain, as_json=as_json)
            return
        if as_json:
            refuse_options(call, "--json, which has all plans", "top", "explain")
        if modes:
            refuse_options(call, "--modes, which shows one grid", "top")
        given = {name: call.params[name] for name in (*_OF_STEPS, *_OF_EXPERTS, *_OF_PIPELINES)} | {
            "clips": clip,
            "two_level": _read_two_level(two_level),
            "context": _read_ranks("context", context),
            "pipe": _read_ranks("pipe", pipe),
        }
        asked = read_workload(config) if config is not None else {}
        asked |= {name: value for name, value in given.items() if value is not None}
        if model is not None:
            asked["model"] = model
        is_auto = _check_memory(memory)
        if recompute is not None:
            asked["recompute"] = recompute
        elif is_auto:
            asked.pop("recompute", None)
        asked["state"] = _choose_state(optimizer_state, asked.get("state"), is_auto, sparsity)
        require_all(asked | {"cluster": cluster})
        assert cluster is not None

        from stretto.cluster import Cluster
        from stretto.planner import plan as search

        machine = Cluster.find(cluster)

        options: dict[str, Any] = {
            "micro_batch": micro_batch,
            "memory": "auto" if is_auto else None,
            "overlaps": overlap,
        } | {name: value for name, value in asked.items() if name != "model"}
        if cost not in ("full", "paper", "simulated"):
            raise ValueError(f"--cost is {cost!r}, but must be full, paper or simulated")
        if cost == "simulated":
            from stretto.simulator.training import plan_simulated

            plans, cost = plan_simulated(asked["model"], machine, **options), "full"
        else:
            plans = search(asked["model"], machine, cost=cost, **options)  # type: ignore[arg-type]
        if modes:
            plans = _in_each_mode(plans[0], asked, machine, cost, overlap)
    if as_json:
        print(json.dumps([plan.as_dict() for plan in plans]), flush=True)
    elif modes:
        print_modes(plans, cost)
    else:
        print_table(plans, machine, cost, top, has_memory=is_auto or plans[0].optimizer_state != "fp32")
    if explain and not as_json:
        print_formulas(plans[0])


def _find_dlrm(path: Path) -> "DLRMTrainConfig | None":
    from stretto.recommendation.training.config import DLRMTrainConfig
    from stretto.train.config import load_config

    config = load_config(path)
    return config if isinstance(config, DLRMTrainConfig) else None


def _plan_inference(
    asked: dict[str, Any], gpus: int | None, tpot: str | None, dtype: str, top: int, *, as_json: bool
) -> None:
    """Print grids by how they answer requests."""
    _require(_OF_REQUESTS, asked)
    prompts, contexts = (_read_lengths(name, asked[name]) for name in ("prompt", "context"))
    seconds = None if tpot is None else read_seconds(tpot)

    from stretto.cluster import Cluster
    from stretto.planner.inference import plan_inference

    machine = Cluster.find(asked["cluster"])
    plans = plan_inference(
        asked["model"],
        machine,
        prompts=prompts,
        contexts=contexts,
        batch=asked["batch"],
        gpus=gpus,
        token_seconds=seconds,
        dtype=dtype,
    )
    if as_json:
        print(json.dumps([plan.as_dict() for plan in plans]), flush=True)
    else:
        print_inference(plans, machine, top)


def _read_lengths(option: str, value: str) -> list[int]:
    """Numbers of tokens with commas between them. ValueError for anything else."""
    parts = value.split(",")
    if not all(part.strip().isdecimal() and part.isascii() and len(part) < 10 for part in parts):
        raise ValueError(f"--{option} is {value!r}, but must be numbers of tokens, such as 2048 or 512,2048")
    return [int(part) for part in parts]


def _read_ranks(option: str, value: str | None) -> int | str | None:
    """A number of ranks, or "auto". ValueError for another value."""
    if value is None or value == "auto":
        return value
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"--{option} is {value!r}, but must be a whole number, at least 1, or auto")
    return int(value)


def _read_two_level(value: str | None) -> TwoLevel | None:
    """A value of train.two_level, or None. ValueError for another one."""
    known: dict[str | None, TwoLevel | None] = {None: None, "auto": "auto", "true": True, "false": False}
    if value not in known:
        raise ValueError(f"--two-level is {value!r}, but must be auto, true or false")
    return known[value]


def _check_memory(memory: str | None) -> bool:
    """True if `--memory auto` was given. ValueError for another value."""
    if memory not in (None, "auto"):
        raise ValueError(
            f"--memory is {memory!r}, but can be auto alone; --optimizer-state and --recompute take values"
        )
    return memory == "auto"


def _choose_state(
    location: str | None, of_file: StateOptions | None, is_auto: bool, sparsity: float | None
) -> StateOptions | None:
    """Choose where optimizer state is stored: by the command line, else anywhere, or by the file. None: anywhere."""
    if sparsity is not None and is_auto and location is None:
        raise ValueError("--sparsity is given with --memory auto; --optimizer-state=device or host would do")
    if sparsity is not None:
        check_sparsity(sparsity)
        is_named = location is not None or (of_file is not None and of_file.is_separate)
        location = location if is_named or not sparsity else "device"
        of_file = replace(of_file or StateOptions("device"), sparsity=0.0)
    if location is not None:
        require_one_of(get_args(StateLocation), **{"--optimizer-state": location})
        of_file = replace(of_file or StateOptions(), location=cast(StateLocation, location))
    if of_file is not None and sparsity:
        of_file = replace(of_file, sparsity=sparsity)
    if location is not None:
        return of_file
    return None if is_auto else of_file


# Options that the planner takes under the same names.
OF_WORKLOAD = ("batch", "seq_len", "documents", "dtype", "optimizer")
_OF_STEPS = ("gpus", *OF_WORKLOAD, "reshard", "shard_sequence", "captured")
_OF_EXPERTS = ("expert", "expert_tensor", "imbalance")
_OF_PIPELINES = ("schedule", "virtual_stages", "extra_warm_up", "limit", "serve_first")
_REQUIRED = {
    "model": "the model's name or file",
    "batch": "the global batch, in sequences",
    "seq_len": "tokens a sequence",
    "cluster": "a machine of `stretto cluster list`, or a cluster file",
}
_OF_REQUESTS = {name: _REQUIRED[name] for name in ("model", "cluster")} | {
    "prompt": "tokens of a prompt",
    "context": "tokens in the cache of a request that decodes",
    "batch": "requests at a time",
}


def require_all(asked: dict[str, Any]) -> None:
    """Raise ValueError that names all options of a training plan that are missing."""
    _require(_REQUIRED, asked, "\nA CONFIG.toml has all of these but --cluster.")


def _require(meanings: dict[str, str], asked: dict[str, Any], note: str = "") -> None:
    """Raise ValueError that names all options that are missing, and what they mean."""
    missing = {f"--{name.replace('_', '-')}": text for name, text in meanings.items() if asked.get(name) is None}
    if missing:
        lines = "".join(f"\n  {option}  {text}" for option, text in missing.items())
        raise ValueError(f"{are_missing(list(missing))}:{lines}{note if set(missing) - {'--cluster'} else ''}")


def read_workload(path: Path) -> dict[str, Any]:
    """The planner's inputs from a training configuration. Of its data only some documents' lengths are read, if there
    are any: it may not exist yet."""
    from stretto.huggingface.public_models import PUBLIC_MODELS
    from stretto.train.config import TrainConfig, load_config
    from stretto.train.gpt.preflight import sample_documents

    config = load_config(path)
    if not isinstance(config, TrainConfig):
        raise ValueError(f"{path}: plans are for GPTs, and this is a configuration of another kind of model")
    run = config.train
    is_bytes = config.data.tokenizer in (None, "bytes") and config.data.format in ("auto", "text")
    folder = None if config.model.path is None else str(Path(config.model.path).expanduser())
    if folder is None and config.model.name in PUBLIC_MODELS:
        folder = config.model.name
    if folder is None and config.model.known_vocab() is None and not is_bytes:
        raise ValueError(f"{path}: model.vocab is left to the data; say it for a plan")
    packed = sample_documents(config)
    execution = config.execution
    is_searched = not (execution.gathers_once or execution.scatters_once)
    return (
        ({"recompute": run.recompute} if "recompute" in run.model_fields_set else {})
        | ({"shard_sequence": run.shard_sequence} if "shard_sequence" in run.model_fields_set else {})
        | ({} if is_searched else {"reshard": run.reshard})
        | {
            "model": config.model.to_gpt(data_vocab=256, seq_len=run.seq_len) if folder is None else folder,
            "gpus": config.ranks if config.ranks > 1 else None,
            "batch": run.batch,
            "seq_len": run.seq_len,
            "dtype": run.dtype,
            "optimizer": run.optimizer,
            "state": run.state,
            "clips": run.clip is not None,
            "two_level": run.two_level,
        }
        | ({} if packed is None else {"documents": packed})
        | {axis: size for axis in ("context", "pipe") if (size := getattr(config.grid, axis)) > 1}
    )


_OF_PREDICT = (*OF_WORKLOAD, "state", "clips", "imbalance", "captured", "two_level")


def _schedule_of(plan: "GridPlan") -> dict[str, Any]:
    """Return how a plan's pipeline runs, as `predict` takes it."""
    options = {name: getattr(plan, name) for name in ("schedule", "virtual_stages", "limit", "serve_first")}
    options["extra_warm_up"] = plan.extra_warm_up or None
    return {name: value for name, value in options.items() if value is not None} if plan.schedule else {}


def _in_each_mode(
    best: "GridPlan", asked: dict[str, Any], cluster: "Cluster", cost: str, overlaps: bool
) -> "list[GridPlan]":
    """Predict the best plan's grid and micro-batch in each mode of recomputation."""
    from stretto.planner import predict, read_architecture

    layers = read_architecture(asked["model"], asked["seq_len"]).layers
    asked = asked | {"state": asked["state"] or StateOptions(best.optimizer_state)}
    segments = [f"every:{length}" for length in (2, 4, 8) if length <= layers]
    return [
        predict(
            asked["model"],
            cluster,
            grid=best.grid,
            micro_batch=best.micro_batch,
            cost=cost,  # type: ignore[arg-type]
            overlaps=overlaps,
            recompute=mode,
            reshard=best.reshard,
            shard_sequence=best.shard_sequence,
            **_schedule_of(best),
            **{name: value for name, value in asked.items() if name in _OF_PREDICT},
        )
        for mode in ("none", "full", *segments, "products", "communication", "host")
    ]
