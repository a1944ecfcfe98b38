# SPDX-License-Identifier: Apache-2.0
"""Random run files, cluster files, models and schedules are taken or refused with a message; nothing else is raised."""

import contextlib
import itertools
import json
import random
import time
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from stretto.cluster import Cluster
from stretto.collectives import verify
from stretto.collectives.xml import ScheduleFileError, from_xml
from stretto.collectives.xml import to_xml as schedule_to_xml
from stretto.huggingface.families import DECODERS
from stretto.models import GPTConfig
from stretto.parallel import validate
from stretto.parallel.roles.plan import KINDS
from stretto.planner import plan, read_architecture
from stretto.recommendation import DLRMConfig
from stretto.report.joint import read_call
from stretto.train.config import load_config
from stretto.train.observe.chakra import step_trace
from stretto.train.observe.timeline import read_timeline
from stretto.train.preflight import preflight
from tests.collectives.executor import programs
from tests.collectives.executor.simulation import simulate
from tests.fuzzing import ODD_NUMBERS, ODD_TOML, ODD_VALUES, cpu_limit, damage, fuzz, mutate, mutate_schedule, to_toml

FOLDER = Path(__file__).parents[1] / "src" / "stretto" / "configs"
CONFIGS = [tomllib.loads(path.read_text()) for path in sorted(FOLDER.glob("*.toml"))]
REFUSALS = (ValueError, OSError)  # what commands print as a message


def cases(sample: int, all_: int) -> pytest.MarkDecorator:
    """A few cases in make test, and as many as `all_` in make test-exhaustive."""
    return pytest.mark.parametrize("count", [sample, pytest.param(all_, marks=pytest.mark.exhaustive)])


def write_file(path: Path, rng: random.Random, text: str) -> Path:
    content = text.encode(errors="surrogatepass")
    path.write_bytes(damage(rng, content) if rng.random() < 0.25 else content)
    return path


@pytest.mark.long
@cases(60, 2000)
def test_run_files_start_or_are_refused(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 400)

    def start(rng):
        values = json.loads(json.dumps(rng.choice(CONFIGS))) | {"device": "cpu", "out": "run"}
        if "kind" not in values["model"]:
            values["data"] = {"path": "text.txt", "tokenizer": "bytes", "format": "text"}
            values["train"]["dtype"] = "fp32"
        values = mutate(rng, values, ODD_VALUES + ODD_TOML)
        preflight(load_config(write_file(tmp_path / "run.toml", rng, to_toml(values))))

    assert 0 < fuzz(start, count, *REFUSALS) < count


@cases(60, 2000)
def test_cluster_files_are_read_written_and_planned_for_or_refused(count, tmp_path):
    presets = [tomllib.loads(_text_of(name, tmp_path)) for name in Cluster.presets()]

    def read(rng):
        values = mutate(rng, rng.choice(presets), ODD_VALUES + ODD_TOML)
        cluster = Cluster.find(str(write_file(tmp_path / "machine.toml", rng, to_toml(values))))
        assert cluster.describe()
        cluster.save(tmp_path / "saved.toml")
        assert Cluster.load(tmp_path / "saved.toml") == cluster
        if rng.random() < 0.3:
            plan("gpt2-small", cluster, gpus=rng.choice((1, 2, 4)), batch=8, seq_len=128)

    assert 0 < fuzz(read, count, *REFUSALS) < count


def _text_of(preset: str, folder: Path) -> str:
    Cluster.preset(preset).save(folder / "preset.toml")
    return (folder / "preset.toml").read_text()


HUGGING_FACE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 128, "vocab_size": 97, "tie_word_embeddings": True, "attention_bias": False,
    "mlp_bias": False, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "n_inner": None,
    "attention_dropout": 0.0, "attn_pdrop": 0.0, "id2label": {"0": "a", "1": "b"}, "num_labels": 2, "head_dim": None,
}  # fmt: skip


@cases(60, 800)
def test_model_configurations_are_planned_or_refused(count, tmp_path):
    def from_hugging_face(rng):
        kind = rng.choice(list(DECODERS))
        ending = rng.choice(("ForCausalLM", "LMHeadModel", "Model", "ForSequenceClassification", ""))
        named = {"model_type": kind} | ({"architectures": [DECODERS[kind].prefix + ending]} if ending else {})
        config = mutate(rng, HUGGING_FACE | named, (*ODD_VALUES, None))
        if rng.random() < 0.5:
            return config
        return write_file(tmp_path / "config.json", rng, json.dumps(config))

    def from_table(rng):
        table = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 97, "dropout": 0.1, "positions": "rotary"}
        table |= {"activation": "swiglu", "bias": True, "kv_heads": 2} if rng.random() < 0.5 else {"name": "gpt2-small"}
        return write_file(tmp_path / "model.toml", rng, to_toml(mutate(rng, {"model": table}, ODD_VALUES + ODD_TOML)))

    def from_numbers(rng):
        numbers = [number for number in ODD_NUMBERS if isinstance(number, int)]
        sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 97, "max_seq_len": 128}
        sizes |= {name: rng.choice(numbers) for name in rng.sample(list(sizes), rng.randint(0, 2))}
        tables = [rng.choice(numbers) if rng.random() < 0.3 else 8 for _ in range(rng.randint(0, 3))]
        dim = rng.choice((4, rng.choice(numbers)))
        DLRMConfig(rows=tables, dim=dim, bottom=(8, dim), top=(8, rng.choice((1, 2))), pooling=tables[1:] or (1,))
        return GPTConfig(**sizes, positions=rng.choice(("learned", "rotary")), dropout=rng.choice((0.0, 0.5, 1.0)))

    def search(rng):
        make = rng.choice((from_hugging_face, from_hugging_face, from_table, from_numbers))
        batch, seq_len = rng.choice((8, 8, rng.choice(ODD_NUMBERS))), rng.choice((128, 128, rng.choice(ODD_NUMBERS)))
        gpus, cost = rng.choice((1, 2, 4, 16)), rng.choice(("full", "paper"))
        plans = plan(
            make(rng), rng.choice(("perlmutter", "dgx-h200")), gpus=gpus, batch=batch, seq_len=seq_len, cost=cost
        )
        assert all(each.step_time >= 0 and each.peak_memory > 0 for each in plans)

    assert 0 < fuzz(search, count, *REFUSALS) < count


def random_module(rng: random.Random) -> nn.Module:
    """A small model on the meta device: linears, embeddings, norms, dropout, nested and shared modules, attributes."""
    sizes, parts = (8, 8, 16, 6, 1), []
    for _ in range(rng.randint(0, 5)):
        width, other = rng.choice(sizes), rng.choice(sizes)
        match rng.randrange(8):
            case 0 | 1:
                parts.append(nn.Linear(width, other, bias=rng.random() < 0.5))
            case 2:
                parts.append(nn.Embedding(other, width))
            case 3:
                parts.append(rng.choice((nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d))(width))
            case 4:
                parts.append(rng.choice((nn.Dropout(0.1), nn.CrossEntropyLoss(), nn.GELU(), nn.Identity())))
            case 5 if parts:
                parts.append(rng.choice(parts))
            case 6:
                parts.append(random_module(rng))
            case 7:
                parts.append(
                    rng.choice((nn.Conv1d(width, other, 1), nn.MultiheadAttention(8, 2), nn.LSTM(width, other)))
                )
    model = rng.choice((nn.Sequential, lambda *inner: nn.ModuleList(inner)))(*parts)
    if rng.random() < 0.3:
        setattr(model, rng.choice(("heads", "p_drop", "width")), rng.choice((2, 8, 0.5, True, None, "x", -3, 10**30)))
    if rng.random() < 0.1:
        model.scale = nn.Parameter(torch.ones(rng.choice(sizes)))
    return model


@cases(100, 800)
def test_random_modules_and_roles_can_be_parallelized_or_are_refused(count):
    def role(rng):
        kind = rng.choice((*KINDS, "colwise", "rowwise", "norm"))
        odd = rng.choice(
            (kind, {"role": kind}, "", "colwize", 1, None, {}, {"role": kind, "unit": rng.choice(ODD_VALUES)})
        )
        with_units = {"role": kind, "segments": rng.choice((1, 2, 3)), "unit": rng.choice((1, 2, 4))}
        return rng.choice((kind, kind, with_units, odd))

    def check(rng):
        with torch.device("meta"):
            model = random_module(rng)
        names = [name for name, _ in model.named_modules()]
        patterns = [name for name in names if name and rng.random() < 0.9]
        patterns += [rng.choice(("*", "*.*", "", ".", "0.*", "[", "nothing", 3))] * (rng.random() < 0.15)
        attributes = {
            f"{rng.choice((*names, '*'))}.{rng.choice(('heads', 'in_features', 'width', 'p', ''))}".lstrip(
                "."
            ): rng.choice(("x", "y", None, "w", 1))
            for _ in range(rng.choice((0, 0, 1, 2)))
        }
        sizes = {axis: rng.choice((1, 1, 2, 4)) for axis in rng.sample(("data", "x", "y", "z"), rng.randint(0, 4))}
        if rng.random() < 0.1:
            sizes[rng.choice(("x", "w", ""))] = rng.choice(ODD_VALUES)
        validate(model, sizes, roles={pattern: role(rng) for pattern in patterns}, local_attributes=attributes)

    assert 0 < fuzz(check, count, ValueError) < count


@cases(60, 500)
def test_schedules_are_refused_or_judged_and_verified_ones_compute_what_they_promise(count):
    schedules = [
        programs.compile_named(name, ranks, instances=instances)
        for name in programs.PROGRAMS
        for ranks, instances in ((2, 1), (3, 2))
    ]
    texts = [schedule_to_xml(schedule) for schedule in schedules]
    verdicts = []

    # A schedule that sends another chunk than it should: few random changes are read and yet are wrong.
    assert not verify(from_xml(texts[0].replace('srcoff="0"', 'srcoff="1"', 1).encode())).ok

    def judge(rng):
        schedule = from_xml(mutate_schedule(rng, rng.choice(texts)))
        found = verify(schedule)
        verdicts.append(found.ok)
        assert found.ok or found.errors
        collective = schedule.collective
        if not found.ok or collective.ranks * collective.chunks_per_loop > 1000:
            return
        inputs = programs.make_inputs(schedule, 12 * max(1, collective.chunks_per_loop), torch.int64, rng.randrange(99))
        expected = programs.expected_outputs(schedule, inputs, schedule.reduction or "sum")
        for in_place in [True] * schedule.in_place + [False] * schedule.out_of_place:
            for seed in (None, rng.randrange(2**32), rng.randrange(2**32)):
                outputs = simulate(schedule, inputs, in_place=in_place, seed=seed)
                for rank, (output, right) in enumerate(zip(outputs, expected, strict=True)):
                    assert right is None or torch.equal(output, right), (in_place, seed, rank)

    fuzz(judge, count, ScheduleFileError)
    assert True in verdicts


DEEP = "a" + ".a" * 2000


EVENTS = (
    ("user_annotation", "stretto group x", -9, 5, 1, {}),
    ("user_annotation", "gloo:all_reduce", -7, 1, 3, {}),
    ("user_annotation", "stretto step 4", 0, 100, 1, {}),
    ("gpu_user_annotation", "stretto step 4", 0, 100, 1, {}),
    ("cpu_op", "aten::mm", 1, 4, 1, {"External id": 1, "Sequence number": 2}),
    ("user_annotation", "stretto experts", 1, 9, 1, {}),
    ("cpu_op", "c10d::allreduce_", 20, 2, 1, {"External id": 9, "Input Dims": [[[4, 4]]], "Input type": ["float"]}),
    ("user_annotation", "gloo:all_reduce", 25, 9, 3, {}),
    ("user_annotation", "stretto waited 0.000001 0.000002", 60, 0, 1, {}),
    ("user_annotation", "all_gather_matmul", 70, 9, 1, {}),
    ("cuda_runtime", "cudaLaunchKernel", 71, 1, 1, {"correlation": 5}),
    ("kernel", "ncclDevKernel_AllReduce", 75, 9, 7, {"correlation": 5, "stream": 7, "Collective name": "allreduce"}),
    ("gpu_memcpy", "Memcpy PtoP", 76, 3, 8, {"correlation": 5, "stream": 8}),
)


@cases(60, 3000)
def test_traces_are_read_or_refused(count, tmp_path):
    keys = ("cat", "name", "ts", "dur", "tid", "args")

    def read(rng):
        on_a_gpu = [dict(zip(keys, event, strict=True)) for event in EVENTS]
        on_a_cpu = [event for event in on_a_gpu if event["cat"] in ("cpu_op", "user_annotation")]
        about = {"groups": {"1": "x"}, "rank": 0, "grid": {"data": 1, "x": 2}, "layers": 2}
        trace = {"stretto": about, "traceEvents": rng.choice((on_a_gpu, on_a_cpu)), "distributedInfo": {"rank": 1}}
        file = write_file(
            tmp_path / "trace.json", rng, json.dumps(mutate(rng, json.loads(json.dumps(trace)), ODD_VALUES))
        )
        for reader in (lambda: step_trace(read_timeline(file)), lambda: read_call(file, "all_gather_matmul")):
            with contextlib.suppress(ValueError):
                reader()
                read.taken += 1

    read.taken = 0
    fuzz(read, count)
    assert read.taken > count / 4


@pytest.mark.parametrize("line", [f"{DEEP} = 1", f"x = [{{ {DEEP} = 1 }}]", f"[sources]\n{DEEP} = 'x'"])
def test_keys_of_thousands_of_parts_are_refused_by_all_that_read_toml(line, tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text(line)
    for read in (load_config, Cluster.load, lambda path: read_architecture(path, 128)):
        with pytest.raises(ValueError, match=r"deep\.toml: is nested too deeply"):
            read(path)
    path.write_text(to_toml(CONFIGS[0]))
    with pytest.raises(ValueError, match="is nested too deeply"):
        load_config(path, [f"{DEEP}=1"])


def test_a_case_is_ended_by_what_it_computes_and_not_by_what_it_waits():
    with cpu_limit(0.5):
        time.sleep(0.6)
    with pytest.raises(AssertionError, match=r"hangs: not done after 0\.1 s of CPU time"), cpu_limit(0.1):
        all(number >= 0 for number in itertools.count())
