# SPDX-License-Identifier: Apache-2.0
"""`python -m lab decoding-faults`: kill or stop a rank of an engine while it decodes (CPU).

Ranks of x decode requests, some drawn at random, and write each token that the engine gives out. At a random moment one
of them is killed (SIGKILL) or stopped (SIGSTOP). A fault passes if every other rank raises within the group's time
limit and a grace and names the one that failed, and all tokens that any rank has given out are those of
an undisturbed run. A stopped rank then continues; it must raise as well, and give out no other tokens either.
"""

import json
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

from lab.harness import Bench, Measured, column
from stretto.bench.settings import Option

GRACE = 6.0  # seconds after the time limit: 2 in which the other ranks answer, and a busy machine
START = 120.0  # seconds until all ranks decode
ATTEMPTS = 5  # to start ranks, which may exceed the time limit on a busy machine before there is a fault
PROMPTS = ([5, 17, 3], [9], list(range(40)))
PRELOADED = [
    "stretto.inference.engine",
    "stretto.parallel.builder",
    "transformers.models.llama.modeling_llama",
    __name__,
]


@dataclass(frozen=True)
class DecodingFaultsSetting:
    """Settings of `python -m lab decoding-faults`. Raises ValueError for settings that cannot work."""

    faults: Annotated[int, Option("Faults; every second one is a stop.", least=1)] = 100
    ranks: Annotated[int, Option("Ranks of x, one of which fails.", least=2)] = 4
    timeout: Annotated[float, Option("Time limit of the engine's groups, in seconds.", least=1)] = 5.0
    tokens: Annotated[int, Option("Tokens of each of three requests.", least=2)] = 32
    seed: Annotated[int, Option("Seed of moments and ranks.", least=0)] = 0


@dataclass(frozen=True)
class Fault:
    """A fault: who fails after how many tokens, seconds until each other rank has raised, and what is wrong."""

    kind: str = column("fault")
    rank: int = column("rank")
    tokens: int = column("tokens until then")
    seconds: float = column("until the last rank raised (s)", "{:.2f}")
    given: int = column("tokens given out")
    passed: bool = column("passed")
    wrong: str = column("what is wrong")
    message: str = field(default="")


def run_campaign(setting: DecodingFaultsSetting) -> Iterator[Measured]:
    """Run the faults one after the other; what is done is written after each tenth."""
    draw = random.Random(setting.seed)
    with tempfile.TemporaryDirectory(prefix="stretto-decoding-") as temporary:
        expected = read_tokens(run_job(Path(temporary) / "undisturbed", setting, None)[0][0])
        faults: list[Fault] = []
        for number in range(setting.faults):
            kind = ("kill", "stop")[number % 2]
            victim, tokens = draw.randrange(setting.ranks), draw.randrange(1, len(PROMPTS) * setting.tokens * 3 // 4)
            moment = draw.random()
            for attempt in range(ATTEMPTS):
                folder = Path(temporary) / f"{number}-{attempt}"
                with suppress(TimeoutError):
                    faults.append(inject(folder, setting, kind, victim, tokens, moment, expected))
                    break
            else:
                raise RuntimeError(f"the ranks of fault {number} have not decoded in {ATTEMPTS} attempts")
            if number % 10 == 9 or number + 1 == setting.faults:
                kinds = {each.kind: each for each in faults}
                lines = tuple(_summarize(name, faults) for name in kinds)
                yield Measured(faults, {"setting": vars(setting)}, lines)


def _summarize(kind: str, faults: list[Fault]) -> str:
    found = [fault for fault in faults if fault.kind == kind]
    worst = max(fault.seconds for fault in found)
    return f"{kind}: {sum(fault.passed for fault in found)} of {len(found)} passed; the longest took {worst:.1f} s"


def inject(
    folder: Path,
    setting: DecodingFaultsSetting,
    kind: str,
    victim: int,
    tokens: int,
    delay: float,
    expected: dict[int, list[int]],
) -> Fault:
    """Run one job with one fault, and judge it. delay: part of 20 ms after the tokens."""
    outputs, seconds = run_job(folder, setting, (kind, victim, tokens, delay))
    wrong = judge(folder, setting, kind, victim, seconds, expected)
    given = sum(len(found) for output in outputs for found in read_tokens(output).values())
    raised = sorted(file.read_text() for file in folder.glob("*.error"))
    message = next((text for text in raised if f"rank {victim}" in text), "".join(raised[:1]))
    return Fault(kind, victim, tokens, seconds, given, not wrong, wrong or "-", message[:400])


def judge(
    folder: Path, setting: DecodingFaultsSetting, kind: str, victim: int, seconds: float, expected: dict[int, list[int]]
) -> str:
    """Say what is wrong with a job that had a fault; "" if nothing is."""
    texts = {rank: (folder / f"{rank}.error") for rank in range(setting.ranks)}
    raised = {rank: file.read_text() for rank, file in texts.items() if file.exists()}
    wrong = []
    if silent := [rank for rank in texts if rank not in raised and (rank != victim or kind == "stop")]:
        wrong.append(f"ranks {silent} have not raised")
    if seconds > setting.timeout + GRACE:
        wrong.append("late")
    if unnamed := [rank for rank, text in raised.items() if rank != victim and f"rank {victim} " not in text]:
        wrong.append(f"ranks {unnamed} do not name rank {victim}")
    for rank in range(setting.ranks):
        file = folder / f"{rank}.jsonl"
        for request, found in read_tokens(file.read_text() if file.exists() else "").items():
            if found != expected[request][: len(found)]:
                wrong.append(f"rank {rank} gave out other tokens")
    return "; ".join(dict.fromkeys(wrong))


def run_job(
    folder: Path, setting: DecodingFaultsSetting, fault: tuple[str, int, int, float] | None
) -> tuple[list[str], float]:
    """Run a job: what each rank has written, and seconds from the fault until all other ranks have ended."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    arguments = (setting.ranks, setting.timeout, setting.tokens, str(folder))
    processes: list[BaseProcess] = [
        context.Process(target=decode, args=(rank, *arguments)) for rank in range(setting.ranks)
    ]
    seconds = 0.0
    try:
        for process in processes:
            process.start()
        if fault is not None:
            kind, victim, tokens, delay = fault
            _await_tokens(folder / f"{victim}.jsonl", tokens, processes[victim])
            time.sleep(0.02 * delay)
            began = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(processes[victim].pid or 0, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            others = [process for rank, process in enumerate(processes) if rank != victim]
            for process in others:
                process.join(max(0.0, began + setting.timeout + 3 * GRACE - time.monotonic()))
            seconds = time.monotonic() - began
            if kind == "stop":
                os.kill(processes[victim].pid or 0, signal.SIGCONT)
                processes[victim].join(setting.timeout + 3 * GRACE)
        else:
            for process in processes:
                process.join(START)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    files = [folder / f"{rank}.jsonl" for rank in range(setting.ranks)]
    return [file.read_text() if file.exists() else "" for file in files], seconds


def _await_tokens(file: Path, tokens: int, process: BaseProcess) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and process.is_alive():
        if file.exists() and sum(len(each) for each in read_tokens(file.read_text()).values()) >= tokens:
            return
        time.sleep(0.02)
    raise TimeoutError(f"{file} has not reached {tokens} tokens")


def read_tokens(text: str) -> dict[int, list[int]]:
    """The tokens of each request, of lines that may be cut short."""
    found: dict[int, list[int]] = {}
    for line in text.splitlines():
        with suppress(ValueError):
            request, tokens = json.loads(line)
            found.setdefault(request, []).extend(tokens)
    return found


def decode(rank: int, ranks: int, timeout: float, new: int, folder: str) -> None:
    """A rank: writes tokens to RANK.jsonl as the engine gives them out, and what it raises to RANK.error."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import stretto
    from stretto.inference import Engine

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    torch.manual_seed(0)
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, **shape)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 1.0)
    try:
        engine = Engine(stretto.parallelize(model, stretto.Grid(x=ranks)), max_batch=4, cache_tokens=2048)
        requests = [
            engine.submit(prompt, new, temperature=float(number), seed=number, stop=())
            for number, prompt in enumerate(PROMPTS)
        ]
        written = [0] * len(requests)
        with open(f"{folder}/{rank}.jsonl", "w", buffering=1) as file:
            while engine.step():
                for number, request in enumerate(requests):
                    if len(request.tokens) > written[number]:
                        file.write(json.dumps([number, request.tokens[written[number] :]]) + "\n")
                        written[number] = len(request.tokens)
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        Path(f"{folder}/{rank}.error").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # a group with a failed peer is not destroyed


BENCH = Bench(
    "decoding-faults",
    "Kill and stop ranks of an engine while it decodes: each is named in time, and no wrong token given out (CPU).",
    DecodingFaultsSetting,
    run_campaign,
    Fault,
    title="Ranks that fail while an engine decodes",
)
