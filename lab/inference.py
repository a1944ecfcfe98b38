# SPDX-License-Identifier: Apache-2.0
"""`python -m lab inference`: time per token of a batch, and of prompts, by an engine and by its peers.

Peers, on one GPU: transformers' `generate` with a static cache, compiled; its continuous batching (`generate_batch`);
gpt-fast's recipe (`lab.gpt_fast`), whose cache is empty but read as a whole. On several GPUs they are the same engine
with a product, an all-reduce, and a kernel for residual and norm in place of Stretto's operators: by NCCL, and by
torch's all-reduces on symmetric memory. All run in turn in each round.

--invariant: an engine with invariant=True runs in turn with the plain one. Predicted cost for Llama-3-8B's shape on one
H200, from times of its kernels: decoding 1 and 8, 1 to 4%; decoding 64 with 1,024 tokens each, 10% (attention, a third
of the time, takes 32% more); a prompt of 2048, 13% (products at 640 to 720 TFLOP/s in place of 780).
"""

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lab.gpt_fast import PlainDecoder
from lab.harness import Bench, Measured, column, keep_rows
from stretto.bench.harness import FAILURES, print_row, run_ranks
from stretto.bench.settings import Layers, Needs, Option, Ranks, Rounds, require_known
from stretto.cluster import Cluster
from stretto.huggingface.public_models import PUBLIC_MODELS
from stretto.inference import Engine, fused_blocks
from stretto.ops.operator import all_reduce, find_group
from stretto.ops.row_sums.norm import Norm, NormOperands, add_norm
from stretto.parallel import Grid, parallelize
from stretto.parallel.capture import WARM_UP
from stretto.planner.inference import InferencePlan, PassSeconds, plan_inference
from stretto.planner.memory import max_allocated
from stretto.quantities import MAX_LENGTH, require_least
from stretto.suggestions import name_known

PEERS = ("generate", "batch", "gpt-fast", "nccl", "symmetric-memory")
"""Of one GPU, and the last two of several."""
_ONE_SHOT_BYTES = 256 << 10  # up to which torch's one-shot all-reduce is the peer, as in vLLM


@dataclass(frozen=True)
class InferenceSetting:
    """Settings of `python -m lab inference`.

    The model has random weights. A batch decodes with `context` tokens in each request's cache at first; prompts run by
    themselves. Raises ValueError for an unknown model, and for numbers that are not positive.
    """

    model: Annotated[str, Option("A public model, with random weights.")] = "llama-3-8b"
    layers: Layers = None
    batches: Annotated[tuple[int, ...], Option("Requests that decode at a time, with commas.")] = (1, 8, 64)
    context: Annotated[int, Option("Tokens in the cache of a request that decodes.", least=1, most=MAX_LENGTH)] = 1024
    prompts: Annotated[tuple[int, ...], Option("Tokens of the prompts of prefills, with commas.")] = (2048,)
    together: Annotated[int, Option("Also prefill so many prompts of each length at a time.", least=1, most=4096)] = 1
    new_tokens: Annotated[int, Option("Steps that decode, of which the mean counts.", least=8, most=4096)] = 64
    skip: Annotated[tuple[str, ...], Option(f"Peers to leave out: {', '.join(PEERS)}.")] = ()
    invariant: Annotated[bool, Option("Also measure an engine with invariant=True, and its cost.", "--invariant")] = (
        False
    )
    full_cache: Annotated[
        bool,
        Option("On GPUs, give the engine all cache that the plan says fits, and tell from its peak memory what would."),
    ] = False
    rounds: Rounds = 3
    ranks: Ranks = None

    def __post_init__(self) -> None:
        if self.model not in PUBLIC_MODELS:
            raise ValueError(f"there is no public model {self.model!r}{name_known(self.model, PUBLIC_MODELS)}")
        require_known("peer", self.skip, PEERS)
        require_least(1, batches=min(self.batches, default=0), prompts=min(self.prompts, default=1))
        if self.full_cache and (self.invariant or {*PEERS} - {*self.skip}):
            raise ValueError(
                f"--full-cache leaves no memory for peers and for --invariant: --skip {','.join(PEERS)} would do"
            )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A batch that decodes, or a prompt: milliseconds of a step."""

    what: str = column("what")
    stretto: float = column("Stretto (ms)", "{:.3f}")
    invariant: float | None = column("invariant (ms)", "{:.3f}", None)
    cost: float | None = column("cost of invariance", "{:.0%}", None)
    generate: float | None = column("generate, static cache, compiled (ms)", "{:.3f}", None)
    batch: float | None = column("generate_batch (ms)", "{:.3f}", None)
    gpt_fast: float | None = column("gpt-fast's recipe (ms)", "{:.3f}", None)
    nccl: float | None = column("sums by NCCL (ms)", "{:.3f}", None)
    symmetric_memory: float | None = column("by torch's symmetric memory (ms)", "{:.3f}", None)
    gain: float | None = column("times NCCL's speed", "{:.2f}", None)
    limit: float | None = column("bytes and FLOPs (ms)", "{:.3f}", None)
    of_limit: float | None = column("of the limit", "{:.0%}", None)
    predicted: float | None = column("plan --inference (ms)", "{:.3f}", None)
    tokens: float = column("tokens/s", "{:,.0f}")
    cache: int | None = column("cache, as planned (tokens)", "{:,}", None)
    cache_that_fits: int | None = column("that would fit, by the peak so far", "{:,}", None)
    error: str | None = column("error", default=None)


def run_inference(setting: InferenceSetting, out: Path) -> Measured:
    """Measure all batches and prompts; the JSON is written anew after every row."""
    ranks = setting.ranks or 1
    rows = run_ranks(ranks, measure_all, ranks, out, setting, trains=False)
    return Measured(rows, _about(setting, ranks), title=f"{setting.model}, {ranks} ranks")


def _about(setting: InferenceSetting, ranks: int) -> dict[str, Any]:
    return {"ranks": ranks, "model": setting.model, "layers": setting.layers}


def measure_all(ranks: int, out: Path, setting: InferenceSetting) -> list[dict[str, Any]]:
    grid = Grid(x=ranks, device=None if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    peers = {*PEERS[:3]}.difference(setting.skip) if ranks == 1 else set()
    plain = _make(setting, grid.device) if peers else None
    most = max(*setting.batches, setting.together)
    longest = setting.together * (max(setting.prompts) + 32)
    cached = max(sum(setting.context + new + 32 for new in _new_tokens(setting, most)), longest) + 32
    if setting.full_cache:
        planned = _plan(setting, ranks, max(setting.prompts), most)
        if planned is None:
            raise ValueError("--full-cache fills a GPU's memory, but this machine has no GPU that the planner knows")
        cached = planned.cache_tokens
    engines = {
        name: Engine(
            parallelize(_make(setting, grid.device), grid, invariant=name == "invariant"),
            most,
            cached,
            chunk=_chunk(setting),
        )
        for name in ("stretto", *(["invariant"] if setting.invariant else []))
    }
    sums = [] if ranks == 1 else [how for how in PEERS[3:] if how not in setting.skip]
    if grid.device.type == "cpu":
        sums = [how for how in sums if how == "nccl"]  # gloo there
    of_sums = {how: SumsByLibrary(how, _chunk(setting) + most) for how in sums}
    for how, library in of_sums.items():
        with library:
            model = parallelize(_make(setting, grid.device), grid)
            engines[how] = Engine(model, most, cached, chunk=_chunk(setting), divide_from=None)

    def run(name: str, function: Callable[..., float], *arguments: Any) -> float:
        with of_sums.get(name) or nullcontext():
            return function(engines[name], *arguments)

    def record(what: str, predicted: PassSeconds | None, seconds: dict[str, Any], tokens: int) -> None:
        row = {"what": what, "tokens": tokens / seconds["stretto"]}
        row |= {name.replace("-", "_"): value * 1e3 if name != "error" else value for name, value in seconds.items()}
        if "invariant" in seconds:
            row["cost"] = seconds["invariant"] / seconds["stretto"] - 1
        if "nccl" in seconds:
            row["gain"] = seconds["nccl"] / seconds["stretto"]
        if predicted is not None:
            row |= {"limit": predicted.limit * 1e3, "predicted": predicted.total * 1e3}
            row["of_limit"] = predicted.limit / seconds["stretto"]
        if setting.full_cache:
            of_token = sum(each.keys.nbytes + each.values.nbytes for each in engines["stretto"]._runner.layers) / cached
            left = max_allocated(_machine().require("gpu.memory")) - torch.cuda.max_memory_allocated()
            row |= {"cache": cached, "cache_that_fits": cached + int(left / of_token)}
        rows.append(row)
        print_row(row)
        if dist.get_rank() == 0:
            keep_rows(out, "inference", Row, _about(setting, ranks), rows)

    for batch in setting.batches:
        runs: dict[str, Callable[[], float]] = {name: partial(run, name, _decode, setting, batch) for name in engines}
        if plain is not None:
            others: dict[str, Callable[..., float]] = {
                "generate": _generate, "batch": _generate_batch, "gpt-fast": _GptFast()
            }  # fmt: skip
            runs |= {name: partial(others[name], plain, setting, batch) for name in others if name in peers}
        predicted = _plan(setting, ranks, setting.prompts[0], batch)
        record(f"decode {batch}", None if predicted is None else predicted.token, _time(runs, setting.rounds), batch)
    for count, length in product(sorted({1, setting.together}), setting.prompts):
        runs = {name: partial(run, name, _prefill, count, length) for name in engines}
        if plain is not None:
            prefills = {"generate": _prefill_by_generate, "gpt-fast": _prefill_by_gpt_fast}
            runs |= {name: partial(prefills[name], plain, count, length) for name in prefills if name in peers}
        predicted = _plan(setting, ranks, length, 1)
        seconds = _time(runs, max(setting.rounds, WARM_UP + 1))  # replays count
        what = f"prefill {length}" if count == 1 else f"prefill {count} x {length}"
        record(what, None if predicted is None else _repeat(predicted.first_token, count), seconds, count * length)
    for engine in engines.values():
        engine.close()
    return rows


class SumsByLibrary(AbstractContextManager[None]):
    """Within it, fused blocks call the product, an all-reduce and a kernel for the rest, one after another; sums of
    embeddings are all-reduces, too.

    how: "nccl" (the group's own library), or "symmetric-memory", which takes up to `rows` tokens.
    """

    def __init__(self, how: str, rows: int) -> None:
        self._rows = rows
        self._buffer: Tensor | None = None
        self._patch = mock.patch.multiple(fused_blocks, matmul_all_reduce_norm=self.call, sum_rows=self.sum)
        self._is_symmetric = how == "symmetric-memory"

    def __enter__(self) -> None:
        self._patch.__enter__()

    def __exit__(self, *_: object) -> None:
        self._patch.__exit__(None, None, None)

    def call(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        group: dist.ProcessGroup,
        *,
        eps: float,
        norm: str,
        bias: Tensor | None,
        norm_bias: Tensor | None,
        offset: float,
        invariant: bool,
    ) -> tuple[Tensor, Tensor]:
        """Compute `ops.matmul_all_reduce_norm` by another library's sum."""
        assert not invariant
        rows = x.flatten(0, -2)
        if self._is_symmetric:
            part = self._find_part(len(rows), len(weight), rows, group)
            total = _add_up(torch.mm(rows, weight.t(), out=part), group)
        else:
            total = all_reduce(rows @ weight.t(), group.group_name)
        operands = NormOperands(bias, residual.flatten(0, -2), norm_weight, norm_bias)
        normed, added = add_norm(total, operands, Norm(norm, eps, offset))
        return normed.view_as(residual), added.view_as(residual)

    def sum(self, x: Tensor, name: str) -> Tensor:
        """Compute `sum_rows` by another library's sum."""
        if not self._is_symmetric:
            return all_reduce(x, name)
        group = find_group(name)
        part = self._find_part(len(x), x.shape[1], x, group).copy_(x)
        total = _add_up(part, group)
        return total.clone() if total.data_ptr() == part.data_ptr() else total  # products write there, too

    def _find_part(self, rows: int, width: int, like: Tensor, group: dist.ProcessGroup) -> Tensor:
        """So many rows of the symmetric buffer; width: of the model's hidden states."""
        if self._buffer is None:
            import torch.distributed._symmetric_memory as symmetric

            self._buffer = symmetric.empty(self._rows, width, dtype=like.dtype, device=like.device)
            symmetric.rendezvous(self._buffer, group)
        return self._buffer[:rows]


def _add_up(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    if part.numel() * part.element_size() <= _ONE_SHOT_BYTES:
        return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group.group_name)
    return torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", group.group_name)


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


def _chunk(setting: InferenceSetting) -> int:
    """Tokens of an engine's step."""
    return max(2048, *setting.prompts)


def _new_tokens(setting: InferenceSetting, batch: int) -> list[int]:
    """The tokens of each request of a batch: none ends before all have decoded `new_tokens` steps together.

    Steps of fewer requests would run other graphs, which are not captured yet.
    """
    chunk = _chunk(setting)
    joining = 2 + -(-batch * setting.context // max(chunk // 2, chunk - batch))  # steps until the last one decodes
    return [setting.new_tokens + 2 + joining - number * setting.context // chunk for number in range(batch)]


def _decode(engine: Engine, setting: InferenceSetting, batch: int) -> float:
    """Seconds of a step that decodes the batch, while the cache grows from the context on."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(engine.vocab, (batch, setting.context), generator=generator).tolist()
    lengths = _new_tokens(setting, batch)
    requests = [engine.submit(prompt, length, stop=()) for prompt, length in zip(prompts, lengths, strict=True)]
    while not all(request.tokens for request in requests):
        engine.step()
    begun = _now()
    for _ in range(setting.new_tokens):
        engine.step()
    seconds = (_now() - begun) / setting.new_tokens
    while engine.step():
        pass
    return seconds


def _prefill(engine: Engine, count: int, length: int) -> float:
    """Seconds from so many prompts to the first token of each."""
    prompts = torch.randint(engine.vocab, (count, length), generator=torch.Generator().manual_seed(length)).tolist()
    begun = _now()
    engine.generate(prompts, 1, stop=())
    return _now() - begun


def _repeat(one: PassSeconds, count: int) -> PassSeconds:
    """Passes one after another."""
    return PassSeconds(*(getattr(one, field.name) * count for field in fields(one)))


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


def _prefill_by_generate(model: Any, count: int, length: int) -> float:
    ids = _ids(model, count, length)
    begun = _now()
    _call_generate(model, ids, 1)
    return _now() - begun


def _generate_batch(model: Any, setting: InferenceSetting, batch: int) -> float:
    """Seconds of a token of the batch by continuous batching: of the request that joined last."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    count, page = setting.new_tokens, 256
    pages = batch * -(-(setting.context + count) // page) + 1
    sizes = ContinuousBatchingConfig(num_blocks=pages, max_batch_tokens=max(2048, batch))
    how = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
    prompts = _ids(model, batch, setting.context).tolist()
    made = model.generate_batch(prompts, how, continuous_batching_config=sizes, record_timestamps=True)
    times = max((each.timestamps for each in made.values()), key=lambda each: each[0])
    if len(made) != batch or len(times) != count:
        raise RuntimeError("generate_batch ended before it had made all tokens")
    return float(times[-1] - times[0]) / (count - 1)


class _GptFast:
    """Seconds of a token of the batch by gpt-fast's recipe, which is compiled at the first call."""

    def __init__(self) -> None:
        self._decode: Callable[[Tensor, Tensor], Tensor] | None = None

    @torch.no_grad()
    def __call__(self, model: Any, setting: InferenceSetting, batch: int) -> float:
        if self._decode is None:
            decoder = PlainDecoder(model, batch, setting.context + setting.new_tokens)
            self._decode = torch.compile(decoder, mode="reduce-overhead", fullgraph=True, dynamic=False)
        ids = _ids(model, batch, 1)
        positions = torch.full((1,), setting.context, device=ids.device)
        begun = _now()
        for _ in range(setting.new_tokens):
            ids = self._decode(ids, positions).clone()
            positions += 1
        return (_now() - begun) / setting.new_tokens


@torch.no_grad()
def _prefill_by_gpt_fast(model: Any, count: int, length: int) -> float:
    """Seconds from so many prompts to their first tokens; gpt-fast does not compile it by default."""
    decoder, ids = PlainDecoder(model, count, length), _ids(model, count, length)
    positions = torch.arange(length, device=ids.device)
    begun = _now()
    decoder(ids, positions)
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


def _plan(setting: InferenceSetting, ranks: int, prompt: int, batch: int) -> InferencePlan | None:
    """What the planner says of this machine; None where it knows too little of it."""
    config = dict(PUBLIC_MODELS[setting.model])
    if setting.layers is not None:
        config["num_hidden_layers"] = setting.layers
    with suppress(ValueError):
        context = setting.context + setting.new_tokens // 2
        plans = plan_inference(
            config, _machine(), prompts=[prompt], contexts=[context], batch=batch, gpus=ranks, dtype="bf16"
        )
        return next(plan for plan in plans if plan.grid["x"] == ranks)
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


BENCH = Bench(
    "inference",
    "Tokens a second and time to the first token of an engine, compared with transformers' generate.",
    InferenceSetting,
    run_inference,
    Row,
    title="An engine beside its peers",
    needs=Needs.RANKS,
    about=lambda setting: {},
)
