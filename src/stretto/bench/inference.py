# SPDX-License-Identifier: Apache-2.0
"""`stretto bench inference`: time per token of a batch, and of prompts, by an engine and by its peers."""

import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.bench.harness import FAILURES, Column, print_row, print_table, run_ranks, write_result
from stretto.bench.settings import InferenceSetting
from stretto.cluster import Cluster
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.inference import Engine
from stretto.parallel import Grid, parallelize
from stretto.planner.inference import PassSeconds, plan_inference

COLUMNS = (
    Column("what", "what"),
    Column("stretto", "Stretto (ms)", "{:.3f}"),
    Column("generate", "generate, static cache, compiled (ms)", "{:.3f}"),
    Column("limit", "bytes and FLOPs (ms)", "{:.3f}"),
    Column("of_limit", "of the limit", "{:.0%}"),
    Column("predicted", "plan --inference (ms)", "{:.3f}"),
    Column("tokens", "tokens/s", "{:,.0f}"),
    Column("error", "error"),
)


def bench_inference(ranks: int, out: Path, setting: InferenceSetting) -> list[dict[str, Any]]:
    """Measure all batches and prompts, and print the table; the JSON is written anew after every row."""
    rows = run_ranks(ranks, measure_all, ranks, out, setting, trains=False)
    print_table(f"{setting.model}, {ranks} ranks", COLUMNS, rows)
    return rows


def measure_all(ranks: int, out: Path, setting: InferenceSetting) -> list[dict[str, Any]]:
    """The job of each rank; returns the rows."""
    grid = Grid(x=ranks, device=None if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    plain = _make(setting, grid.device) if ranks == 1 and "generate" not in setting.skip else None
    model = parallelize(_make(setting, grid.device), grid)
    longest = max(setting.context + setting.new_tokens, *setting.prompts)
    most = max(setting.batches)
    engine = Engine(model, most, (most + 1) * (longest + 16), chunk=max(2048, *setting.prompts))

    def record(what: str, predicted: PassSeconds | None, seconds: dict[str, Any], tokens: int) -> None:
        row = {"what": what, "tokens": tokens / seconds["stretto"]}
        row |= {name: value * 1e3 if name != "error" else value for name, value in seconds.items()}
        if predicted is not None:
            row |= {"limit": predicted.limit * 1e3, "predicted": predicted.total * 1e3}
            row["of_limit"] = predicted.limit / seconds["stretto"]
        rows.append(row)
        print_row(row)
        if dist.get_rank() == 0:
            write_result(out, "inference", COLUMNS, rows, ranks=ranks, model=setting.model, layers=setting.layers)

    for batch in setting.batches:
        runs: dict[str, Callable[[], float]] = {"stretto": partial(_decode, engine, setting, batch)}
        if plain is not None:
            runs["generate"] = partial(_generate, plain, setting, batch)
        predicted = _predict(setting, ranks, setting.prompts[0], batch)
        record(f"decode {batch}", None if predicted is None else predicted[1], _time(runs, setting.rounds), batch)
    for length in setting.prompts:
        runs = {"stretto": partial(_prefill, engine, length)}
        if plain is not None:
            runs["generate"] = partial(_prefill_by_generate, plain, length)
        predicted = _predict(setting, ranks, length, 1)
        record(f"prefill {length}", None if predicted is None else predicted[0], _time(runs, setting.rounds), length)
    engine.close()
    return rows


def _make(setting: InferenceSetting, device: torch.device) -> Any:
    """The model with random weights, the same on all ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**PUBLIC_MODELS[setting.model])
    if setting.layers is not None:
        config.num_hidden_layers = setting.layers
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def _time(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """The best seconds of each run, all in turn; and why a peer has failed."""
    found: dict[str, list[float]] = {}
    errors = {}
    for number in range(rounds + 1):  # the first compiles, and captures
        for name, run in runs.items():
            if name in errors:
                continue
            try:
                seconds = run()
            except FAILURES as error:
                if name == "stretto":
                    raise
                errors[name] = f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
                continue
            if number:
                found.setdefault(name, []).append(seconds)
    return {name: min(values) for name, values in found.items()} | (
        {"error": "; ".join(errors.values())} if errors else {}
    )


def _decode(engine: Engine, setting: InferenceSetting, batch: int) -> float:
    """Seconds of a step that decodes the batch, while the cache grows from the context on."""
    steps = setting.new_tokens
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(engine.vocab, (batch, setting.context), generator=generator).tolist()
    requests = [engine.submit(prompt, steps + 1, stop=()) for prompt in prompts]
    while not all(request.tokens for request in requests):
        engine.step()
    before = min(len(request.tokens) for request in requests)
    begun = _now()
    while any(len(request.tokens) < steps for request in requests):
        engine.step()
    seconds = (_now() - begun) / (steps - before)
    while engine.step():
        pass
    return seconds


def _prefill(engine: Engine, length: int) -> float:
    """Seconds from a prompt to its first token."""
    prompt = torch.randint(engine.vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    begun = _now()
    engine.generate([prompt], 1, stop=())
    return _now() - begun


def _generate(model: Any, setting: InferenceSetting, batch: int) -> float:
    """Seconds of a token of the batch, by the difference of two lengths."""
    half = setting.new_tokens // 2
    ids = _ids(model, batch, setting.context)
    times = []
    for count in (2 * half, half):  # the longer first: the cache that it makes serves both
        begun = _now()
        _call_generate(model, ids, count)
        times.append(_now() - begun)
    return (times[0] - times[1]) / half


def _prefill_by_generate(model: Any, length: int) -> float:
    ids = _ids(model, 1, length)
    begun = _now()
    _call_generate(model, ids, 1)
    return _now() - begun


def _call_generate(model: Any, ids: Tensor, count: int) -> None:
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            cache_implementation="static",  # which transformers compiles for on GPUs
        )


def _ids(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def _predict(setting: InferenceSetting, ranks: int, prompt: int, batch: int) -> tuple[PassSeconds, PassSeconds] | None:
    """The planner's (first token, token) on this machine; None where it knows too little of it."""
    config = dict(PUBLIC_MODELS[setting.model])
    if setting.layers is not None:
        config["num_hidden_layers"] = setting.layers
    with suppress(ValueError):
        context = setting.context + setting.new_tokens // 2
        plans = plan_inference(
            config, _machine(), prompts=[prompt], contexts=[context], batch=batch, gpus=ranks, dtype="bf16"
        )
        plan = next(plan for plan in plans if plan.grid["x"] == ranks)
        return plan.first_token, plan.token
    return None


def _machine() -> Cluster:
    """This machine; a preset that has its GPU knows its links, too."""
    found = Cluster.detect()
    presets = (Cluster.preset(name) for name in Cluster.presets())
    return next((each for each in presets if each.gpu.name == found.gpu.name), found)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
