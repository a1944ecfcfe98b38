# SPDX-License-Identifier: Apache-2.0
"""CPU time (user and system, with child processes) of commands that only answer or refuse, in new processes.

    python -m tests.cli.answers [LABEL=SRC ...] [--repeats 3] [--markdown]

A column for each checkout's `src` (default: this one's), measured in turn; the smallest of the repeats counts, since
whatever else the machine does only adds. The budget is 0.4 s.
tests/cli/test_answers.py has the same commands, and checks which modules they import.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

BUDGET = 0.4  # seconds
DONE, FAILED, REFUSED = 0, 1, 2


class Answer(NamedTuple):
    """A command line, with its exit status and words that its output has."""

    command: str
    status: int
    words: str

    @property
    def arguments(self) -> list[str]:
        return self.command.split()


STEP = "--model gpt2-small --cluster dgx-h100 --gpus 4 --batch 8 --seq-len 256"
INFERENCE = "--model llama-3-8b --cluster dgx-h200 --context 1024 --batch 64"
RING = "--topology ring:16 --bandwidth 50GiB/s --latency 500ns"
ANSWERS = (
    Answer("--help", DONE, "Usage"),
    Answer("--version", DONE, "stretto"),
    Answer("trian", REFUSED, "train"),
    Answer("train --help", DONE, "CONFIG.toml"),
    Answer("train", REFUSED, "CONFIG.toml"),
    Answer("train missing.toml", REFUSED, "missing.toml"),
    Answer("train broken.toml", REFUSED, "broken.toml"),
    Answer("train run.toml --sett ranks=2", REFUSED, "No such option: --sett; did you mean --set?"),
    Answer("train run.toml --set train.stesp=3", REFUSED, "did you mean train.steps"),
    Answer("train run.toml --set train.dtype=fp7", REFUSED, "fp7"),
    Answer("train run.toml --set train.recompute=every:2", REFUSED, "the model has 1 block; every:1 would do"),
    Answer("train run.toml --set train.recompute=most", REFUSED, "train.recompute is 'most', but must be one of"),
    Answer("train run.toml --set ranks=4", REFUSED, "the grid data=1 x=1 y=1 z=1 has 1"),
    Answer("train run.toml --set grid.x=8 --set ranks=8", REFUSED, "heads"),
    Answer("train run.toml --set model.hidden=18", REFUSED, "4 heads do not divide"),
    Answer("train run.toml --set data.path=txet.txt", REFUSED, "text.txt"),
    Answer("train run.toml --set out=/dev/null/run", REFUSED, "/dev/null is not a folder"),
    Answer("train run.toml --set train.resume=nowhere", REFUSED, "there is no checkpoint at nowhere"),
    Answer("train run.toml --set train.resume=broken-checkpoint", REFUSED, "is damaged"),
    Answer("train run.toml --set cluster=perlmuter", REFUSED, "did you mean 'perlmutter'"),
    Answer("train run.toml --set model.layers=4000 --set model.hidden=1048576", REFUSED, "but this machine has"),
    Answer(
        "train run.toml --set train.optimizer_state=host --set train.host_memory=10", REFUSED, "parameters would fit"
    ),
    Answer("train run.toml --set model.path=nowhere", REFUSED, "leave out one of the two"),
    Answer("train folder.toml --set model.path=nowhere", REFUSED, "there is no such folder"),
    Answer("train folder.toml", REFUSED, "has no weights"),
    Answer("train dlrm.toml --set data.path=nowhere.txt", REFUSED, "nowhere.txt"),
    Answer("train dlrm.toml --set model.nmae=small", REFUSED, "did you mean model.name"),
    Answer("init", DONE, "A mixture of experts on 4 processes"),
    Answer("init lama", REFUSED, "did you mean 'llama'? There are"),
    Answer("init qwen3-8B", REFUSED, "did you mean 'qwen3-8b'? There are"),
    Answer("init moe run.toml", REFUSED, "run.toml exists already"),
    Answer("demo --out /dev/null/demo", REFUSED, "/dev/null is not a folder"),
    Answer("demo --otu here", REFUSED, "did you mean --out?"),
    Answer("plan", REFUSED, "--model, --batch, --seq-len, --cluster are missing"),
    Answer("plan missing.toml --cluster perlmutter", REFUSED, "missing.toml"),
    Answer("plan dlrm.toml --gpus 4 --explain", DONE, "slowest rank"),
    Answer("plan dlrm.toml --gpus 3", REFUSED, "divide train.batch, 8"),
    Answer("plan --model gpt3 --cluster perlmutter --batch 8 --seq-len 128", REFUSED, "named 'gpt3'. Known: gpt2"),
    Answer("plan --model qwen-3-8b --cluster perlmutter --batch 8 --seq-len 128", REFUSED, "did you mean 'qwen3-8b'?"),
    Answer("plan --inference --model llama-3-8b --batch 1", REFUSED, "--cluster, --prompt, --context are missing"),
    Answer(f"plan --inference {INFERENCE} --prompt 2k", REFUSED, "--prompt is '2k', but must be numbers of tokens"),
    Answer(f"plan --inference {INFERENCE} --prompt 512,2048 --seq-len 9", REFUSED, "--seq-len is no option of"),
    Answer(f"plan --inference {INFERENCE} --prompt 512 --micro-batch -1", REFUSED, "--micro-batch is no option of"),
    Answer(f"plan --inference {INFERENCE} --prompt 512 --gpus 0", REFUSED, "gpus is 0, but must be at least 1"),
    Answer(f"plan --inference {INFERENCE} --prompt 512 --dtype fp7", REFUSED, "dtype is 'fp7'"),
    Answer(f"plan {STEP} --json --top 3", REFUSED, "--top is no option of --json"),
    Answer("plan dlrm.toml --gpus 4 --sparsity -1", REFUSED, "--sparsity is no option of a DLRM's plan"),
    Answer(f"plan --inference {INFERENCE} --prompt 512,2048 --tpot 20ms", DONE, "tokens/s/GPU"),
    Answer("plan --model gpt-5b --cluster alps --batch 8 --seq-len 128 --tpot 1ms", REFUSED, "--tpot is no option of"),
    Answer("plan --model gpt-5b --cluster perlmuter --batch 8 --seq-len 128", REFUSED, "did you mean 'perlmutter'"),
    Answer("plan --model gpt-5b --cluster perlmutter --batch 8 --seq-len 128 --dtype fp7", REFUSED, "fp7"),
    Answer("plan --model gpt-5b --cluster perlmutter --batch 8 --seq-len 128 --memory all", REFUSED, "can be auto"),
    Answer("plan --model gpt-5b --cluster perlmutter --batch 8 --seq-len 128 --pipe all", REFUSED, "--pipe is 'all'"),
    Answer(f"plan {STEP} --two-level yes", REFUSED, "--two-level is 'yes', but must be auto, true or false"),
    Answer(
        "plan --model gpt-5b --cluster perlmutter --batch 8 --seq-len 128 --optimizer-state disk",
        REFUSED,
        "fp32, device, host",
    ),
    Answer("plan --model gpt-5b --cluster perlmutter --gpus 4 --batch 8 --seq-len 2048", DONE, "memory fits"),
    Answer(f"plan {STEP} --cost simulated --json", DONE, "the fastest simulated step"),
    Answer(f"plan {STEP} --cost whole", REFUSED, "must be full, paper or simulated"),
    Answer("collective list", DONE, "ring-all-reduce"),
    Answer("collective compile rong-all-reduce --ranks 4", REFUSED, "did you mean 'ring-all-reduce'"),
    Answer("collective compile hierarchical-all-reduce", REFUSED, "needs 'nodes' and 'gpus'"),
    Answer("collective compile ring-all-reduce --ranks 4 --protocol LL3", REFUSED, "LL3"),
    Answer("collective compile missing.py:f --ranks 4", REFUSED, "missing.py"),
    Answer("collective verify missing.xml", REFUSED, "missing.xml: No such file"),
    Answer("collective verify rinf.xml", REFUSED, "did you mean ring.xml"),
    Answer("collective verify ring-all-reduce --ranks 4", DONE, "verified"),
    Answer("collective verify broken.xml", REFUSED, "not XML"),
    Answer("collective verify ring.xml --limits nccl", REFUSED, "nccl"),
    Answer("collective verify ring.xml", DONE, "verified"),
    Answer("collective show ring.xml --only 6", REFUSED, "the schedule has ranks 0 to 5"),
    Answer("collective show ring.xml --slots -1", REFUSED, "leave out what only a program takes: --slots"),
    Answer("collective verify ring.xml --in-place", REFUSED, "only a program takes: --in-place or --out-of-place"),
    Answer("collective show ring-all-reduce --ranks 6 --max-file-bytes 9", REFUSED, "is for schedules' files"),
    Answer("collective show ring.xml -o ring.pdf", REFUSED, ".png"),
    Answer("collective show missing.xml", REFUSED, "missing.xml"),
    Answer("collective show rong-all-reduce --ranks 6", REFUSED, "did you mean 'ring-all-reduce'"),
    Answer("collective run ring-all-reduce --ranks 4 --set chanels=2", REFUSED, "did you mean 'channels'"),
    Answer("collective run ring-all-reduce --ranks 4 --bytes 1X", REFUSED, "is no size"),
    Answer("collective run ring-all-reduce --ranks 4 --dtype fp8", REFUSED, "the dtypes are"),
    Answer("collective simulate ring.xml --cluster perlmutter --bytes 1M", REFUSED, "6 GPUs fill no whole nodes"),
    Answer(
        "collective simulate ring.xml --cluster dgx-h200 --bytes 1M --latency 1us", REFUSED, "a cluster has its own"
    ),
    Answer("collective simulate ring.xml --cluster dgx-h20 --bytes 1M", REFUSED, "unknown cluster 'dgx-h20'"),
    Answer("collective simulate ring.xml --cluster dgx-h200 --bytes 1X", REFUSED, "is no size"),
    Answer("collective simulate ring.xml --cluster dgx-h200 --bytes 1M --executor fussed", REFUSED, "mean 'fused'"),
    Answer("collective simulate ring.xml --bytes 1M", REFUSED, "give --cluster or --topology: neither is given"),
    Answer("collective simulate ring.xml --bytes 1M --topology ring:6", REFUSED, "needs --bandwidth and --latency"),
    Answer(
        "collective simulate ring.xml --bytes 1M --topology ring:8 --bandwidth 25GB/s --latency 1us",
        REFUSED,
        "has 6 ranks, the topology ring:8 8 devices",
    ),
    Answer(
        "collective simulate ring.xml --bytes 1M --topology ring:6 --bandwidth 0GB/s --latency 1us",
        REFUSED,
        "bandwidth",
    ),
    Answer("collective simulate ring.xml --cluster dgx-h200 --bytes 1M", DONE, "us, "),
    Answer("collective simulate ring.xml --cluster dgx-h200 --bytes 1M --json", DONE, "time_ns"),
    Answer("collective tune allreduc --cluster dgx-h200 --gpus 8", REFUSED, "did you mean 'allreduce'"),
    Answer(
        "collective tune allgather --cluster dgx-h200 --gpus 4 --bytes 1K --executors fused", DONE, "direct-all-gather"
    ),
    Answer("collective import-msccl missing.py", REFUSED, "missing.py"),
    Answer("collective import-msccl script.py 8", REFUSED, "with your rights"),
    Answer("pipeline show 1f1b --pipe 4 --micro-batches 8", DONE, "makespan 33"),
    Answer("pipeline show 1f1p --pipe 4 --micro-batches 8", REFUSED, "did you mean '1f1b'"),
    Answer("pipeline show zb-v --pipe 4", REFUSED, "zb-v takes --pipe and --micro-batches"),
    Answer("pipeline show dualpipe-v --pipe 4 --micro-batches 7", REFUSED, "8 would do, or pipe 3"),
    Answer("pipeline show 1f1b --pipe 4 --micro-batches 8 --out x.pdf", REFUSED, "a picture must be a .png or .svg"),
    Answer(
        "pipeline show 1f1b --pipe 4 --micro-batches 8 --limit 8",
        REFUSED,
        "of 1f1b, but of message-driven",
    ),
    Answer("pipeline verify pipline.csv", REFUSED, "did you mean pipeline.csv"),
    Answer("pipeline verify pipeline.csv --pipe 3", REFUSED, "has 2 ranks, but --pipe is 3"),
    Answer("pipeline verify pipeline.csv", DONE, "verified"),
    Answer("pipeline verify stuck.csv", FAILED, "NOT verified: deadlock"),
    Answer("pipeline verify broken.csv", REFUSED, "row 2, cell 2 ('1X0')"),
    Answer(f"simulate message {RING} --bytes 1MiB --src 1 --dst 4 --json", DONE, '"event_driven_ns": 60093'),
    Answer(f"simulate message {RING} --bytes 1MiB --src 1 --dst 1", REFUSED, "to itself"),
    Answer(f"simulate message {RING} --bytes 1MiB --src 1 --dst 16", REFUSED, "ring:16, which has ranks 0 to 15"),
    Answer("simulate message --bytes 1MiB --src 0 --dst 1", REFUSED, "--topology or --cluster: neither"),
    Answer(f"simulate collective all_reduce {RING} --bytes 1MiB", DONE, "event-driven"),
    Answer(f"simulate collective all_redcue {RING} --bytes 1MiB", REFUSED, "did you mean 'all_reduce'"),
    Answer(f"simulate collective all_reduce {RING} --bytes 1X", REFUSED, "is no size"),
    Answer(f"simulate step {STEP} --json", DONE, '"fidelity": "closed-form"'),
    Answer(f"simulate step {STEP} --micro-batch 0", REFUSED, "--micro-batch is 0, but must be at least 1"),
    Answer(f"simulate step {STEP} --what-if gpu --stragglers lognormal:0.1", DONE, "GPUs that compute twice as fast"),
    Answer("simulate step --model gpt2-small --cluster dgx-h100", REFUSED, "--batch, --seq-len are missing"),
    Answer(f"simulate step {STEP} --overlap some", REFUSED, "takes all, none, or some of all_reduce"),
    Answer(f"simulate step {STEP} --what-if more", REFUSED, "must be one of nic, gpu, link, or all"),
    Answer(f"simulate step {STEP} --grid x=7", REFUSED, "x=7 does not divide 12 heads"),
    Answer(f"simulate trace nothing/step {RING}", REFUSED, "there is no nothing/step.0.et"),
    Answer(f"simulate trace nothing/step {RING} --replay", REFUSED, "--topology, --bandwidth, --latency is no option"),
    Answer(f"simulate trace step {RING} --algorithm all_reduce=rign", REFUSED, "did you mean 'ring'"),
    Answer("simulate trace step --replay --bandwidth 1GB/s", REFUSED, "--bandwidth is no option of --replay"),
    Answer(f"simulate trace step {RING} --algorithm all_redcue=ring", REFUSED, "did you mean 'all_reduce'"),
    Answer("simulate trace step --replay --algorithm all_reduce=ring", REFUSED, "--algorithm is no option of --replay"),
    Answer("simulate export nothing/trace.json step", REFUSED, "stretto train --trace"),
    Answer(
        f"simulate collective all_reduce {RING} --algorithm two-level-ring --bytes 1MiB", REFUSED, "--ranks-per-node"
    ),
    Answer("bench", REFUSED, "This machine has no GPU. Without GPUs these run: network"),
    Answer("bench tarin", REFUSED, "train"),
    Answer("bench train", REFUSED, "with --ranks N, on N processes of the CPU"),
    Answer("bench train --ranks -1", REFUSED, "--ranks is -1"),
    Answer("bench train --ranks 2 --model gpt3", REFUSED, "gpt3"),
    Answer("bench collectives", REFUSED, "with --ranks N, on N processes of the CPU"),
    Answer("bench collectives --only all-redcue", REFUSED, "all-redcue"),
    Answer("bench ops --ranks 99", REFUSED, "GPU"),
    Answer("bench ops --only gahter", REFUSED, "did you mean 'gather'"),
    Answer("plan --model gpt-5b --cluster perlmutter --batch 8 --seq-len 128 --sparsity 1", REFUSED, "0.9 would do"),
    Answer("bench network --proxies nativ", REFUSED, "nativ"),
    Answer("bench embedding --dtype int8", REFUSED, "--dtype is float32, float16 or bfloat16"),
    Answer("probe --dtype fp7", REFUSED, "--dtype is 'fp7'"),
    Answer("probe --out nowhere/here.toml", REFUSED, "nowhere is not a folder"),
    Answer("probe --ranks 1", REFUSED, "1"),
    Answer("probe --ranks 2 --batch 8", REFUSED, "--batch is no option of probe without --model"),
    Answer("doctor --ranks -1", REFUSED, "--ranks is no option of doctor without"),
    Answer("doctor --kernels --folder .", REFUSED, "--folder is no option of --kernels"),
    Answer("pipeline show 1f1b --pipe 4 --micro-batches 8 --seed 3", REFUSED, "--seed is no option of times without"),
    Answer(f"simulate step {STEP} --seed 3", REFUSED, "--seed is no option of a step without"),
    Answer("probe --ranks 2 --out=", REFUSED, "'--out' is empty"),
    Answer("probe --ranks 2 --model gpt2-small --batch 8 --seq-len 0", REFUSED, "--seq-len is 0"),
    Answer("train run.toml --set out=", REFUSED, "out is '', but must name a folder"),
    Answer("train .", REFUSED, "there is no configuration file .: it is a folder"),
    Answer("probe --ranks 2 --model gpt3 --batch 8", REFUSED, "gpt3"),
    Answer("tune --ranks 0", REFUSED, "--ranks is 0"),
    Answer("tune --list products --ranks 2", REFUSED, "come after its name: stretto tune products"),
    Answer("tune collectives --only allreduc", REFUSED, "did you mean 'allreduce'"),
    Answer("tune operators --dtype fp7", REFUSED, "there is no dtype 'fp7'"),
    Answer("tune attention --heads 0", REFUSED, "heads is 0, but must be at least 1"),
    Answer("tune experts --cases 4096x14336x8", REFUSED, "a case is HIDDENxINTERMEDIATExEXPERTSxTOP_K"),
    Answer("tune embedding --rows 0", REFUSED, "--rows is 0"),
    Answer("tune products --ranks 2 --model gpt2-smal", REFUSED, "did you mean 'gpt2-small'"),
    Answer("doctor --jsno", REFUSED, "did you mean --json?"),
    Answer("doctor --preflight --ranks 0", REFUSED, "--ranks is 0, but must be 1 to the number of GPUs"),
    Answer("doctor --preflight --folder nowhere", REFUSED, "which is not a folder"),
    Answer("doctor --kernels --ranks 1", REFUSED, "ranks is 1, but must be at least 2"),
    Answer("export nowhere --to model.safetensors", REFUSED, "nowhere"),
    Answer("export broken-checkpoint --to model.safetensors", REFUSED, "is damaged"),
    Answer("export nowhere --to folder", REFUSED, "there is no checkpoint at nowhere"),
    Answer("export nowhere --to model.safetensors --dtype int8", REFUSED, "dtype is 'int8', but must be one of"),
    Answer("export nowhere --to model.safetensors --pretrained here", REFUSED, "--pretrained is for folders"),
    Answer("export", REFUSED, "Missing argument 'RUN_OR_CHECKPOINT' and option '--to'"),
    Answer("checkpoint verify nowhere", REFUSED, "there is nothing at nowhere"),
    Answer("checkpoint verify run.toml", REFUSED, "is no checkpoint's folder and no safetensors file"),
    Answer("checkpoint verify broken-checkpoint", FAILED, "damaged: metadata.json"),
    Answer("checkpoint verify small-run", DONE, "whole (format 2, step 3, 1 tensors"),
    Answer("checkpoint list nowhere", REFUSED, "name the folder of a run"),
    Answer("checkpoint list small-run", DONE, "step-00000003"),
    Answer("checkpoint show broken-checkpoint", REFUSED, "is damaged"),
    Answer("checkpoint show loop", REFUSED, "loop"),
    Answer("checkpoint show small-run --tensors", DONE, "model.weight [2] float32"),
    Answer("probe --out .", REFUSED, "--out is '.', which is a folder: name a file"),
    Answer("collective compile ring-all-reduce --ranks 4 -o nowhere/r.xml", REFUSED, "nowhere is not a folder"),
    Answer("collective compile ring-all-reduce --ranks 4 -o /proc/r.xml", REFUSED, "nothing can be written"),
    Answer("collective show ring.xml -o nowhere/r.png", REFUSED, "nowhere is not a folder"),
    Answer("collective import-msccl --yes script.py -o nowhere/r.xml", REFUSED, "nowhere is not a folder"),
    Answer("pipeline show 1f1b --pipe 4 --micro-batches 8 --csv .", REFUSED, "which is a folder"),
    Answer("pipeline show 1f1b --pipe 4 --micro-batches 8 --out nowhere/p.png", REFUSED, "nowhere is not a folder"),
    Answer(f"simulate step {STEP} --trace nowhere/t.json", REFUSED, "nowhere is not a folder"),
    Answer(f"simulate step {STEP} --picture step.pdf", REFUSED, "a picture must be a .png or .svg file"),
    Answer("simulate export run.toml nowhere/step", REFUSED, "nowhere is not a folder"),
    Answer("export small-run --to run.toml/model.safetensors", REFUSED, "run.toml is not a folder"),
    Answer("cluster list", DONE, "perlmutter"),
    Answer("cluster show perlmuter", REFUSED, "did you mean 'perlmutter'"),
    Answer("cluster show missing.toml", REFUSED, "missing.toml"),
    Answer("cluster show broken.toml", REFUSED, "broken.toml"),
)

RUN = """
out = "out"
[model]
layers = 1
hidden = 16
heads = 4
[data]
path = "text.txt"
[train]
steps = 2
batch = 8
seq_len = 8
"""
FOLDER = RUN.replace("layers = 1\nhidden = 16\nheads = 4", "path = 'model'")
DLRM = """
out = "out"
[model]
kind = "dlrm"
name = "kaggle"
max_rows = 10
[data]
format = "criteo"
path = "clicks.txt"
[train]
steps = 2
batch = 8
"""


def walk_commands(group: Any = None, path: str = "") -> dict[str, Any]:
    """All commands and groups by what is typed to run them ("bench train"), those that are lazy made."""
    import typer

    from stretto.cli import app

    found: dict[str, Any] = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        made = command.load() if hasattr(command, "load") else command
        found[each := f"{path} {name}".strip()] = made
        if hasattr(made, "commands"):
            found |= walk_commands(made, each)
    return found


def write_files(folder: Path) -> None:
    """Write the small files that the command lines name."""
    from stretto.collectives import write_schedule
    from stretto.collectives.algorithms import find

    (folder / "text.txt").write_text("a text to train on, long enough for a sequence or two" * 20)
    (folder / "run.toml").write_text(RUN)
    (folder / "folder.toml").write_text(FOLDER)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "dlrm.toml").write_text(DLRM)
    (folder / "broken.toml").write_text("[train\nsteps = 2\n")
    (folder / "broken.xml").write_text("no schedule")
    (folder / "script.py").write_text("raise SystemExit('it has been run')\n")
    (folder / "broken.json").write_text("{}")
    (folder / "pipeline.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    (folder / "stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    (folder / "broken.csv").write_text("0F0,0B0\n1F0,1X0\n")
    (folder / "loop").symlink_to("loop")
    (folder / "broken-checkpoint").mkdir()
    (folder / "broken-checkpoint" / "metadata.json").write_text('{"format": ')
    write_checkpoint(folder / "small-run" / "checkpoints" / "step-00000003")
    write_schedule(find("ring-all-reduce").compile(ranks=6), folder / "ring.xml")


def write_checkpoint(folder: Path) -> None:
    """Write the smallest checkpoint: of one tensor, of which only the checksum is right."""
    from stretto.train.checkpoint.integrity import to_text
    from stretto.train.checkpoint.metadata import CheckpointMetadata

    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"a piece.")
    chunk = {"offsets": [0], "sizes": [2], "file": "__0_0.distcp", "start": 0, "bytes": 8}
    chunk["checksum"] = to_text(zlib.crc32(b"a piece."))
    tensors = {"model.weight": {"shape": [2], "dtype": "float32", "chunks": [chunk]}}
    about = {"format": 2, "step": 3, "torch": "", "optimizer": "sgd", "model": {}, "run": {}, "data": {}}
    (folder / "metadata.json").write_bytes(CheckpointMetadata.model_validate(about | {"tensors": tensors}).to_bytes())


def environment(source: Path) -> dict[str, str]:
    """The environment of a command from `source`: no GPU, wide lines, a cache of its own."""
    return os.environ | {
        "PYTHONPATH": str(source),
        "CUDA_VISIBLE_DEVICES": "",
        "STRETTO_CACHE": os.path.join(tempfile.gettempdir(), "stretto-answers-cache"),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }


def measure(answer: Answer, source: Path, folder: Path) -> tuple[float, int, str]:
    """Run a command in a new process. Returns its seconds of CPU time, its exit status and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "stretto", *answer.arguments],
        cwd=folder,
        env=environment(source),
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.returncode, plain(done.stderr + done.stdout)


def plain(output: str) -> str:
    """A command's output in one line, without the frames of rich's panels."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", output).split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", default=[f"here={Path(__file__).parents[2] / 'src'}"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="commands that contain this")
    options = parser.parse_args()
    checkouts = {
        label: Path(source).resolve() for label, _, source in (one.partition("=") for one in options.checkouts)
    }
    answers = [answer for answer in ANSWERS if options.only in answer.command]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        print("| command |", " | ".join(f"{label}, s" for label in checkouts), "| exit | says |")
        print("|---|", "---:|" * len(checkouts), "---:|---|", sep="")
        over = dict.fromkeys(checkouts, 0)
        for answer in answers:
            columns = []
            for label, source in checkouts.items():
                runs = [measure(answer, source, folder) for _ in range(options.repeats)]
                seconds, status, output = min(runs)
                over[label] += seconds >= BUDGET
                columns.append(f"{seconds:.2f}" if status == answer.status else f"{seconds:.2f} (exit {status})")
            words = output if len(output) <= 110 else output[:110] + " ..."
            shown = words.replace("|", "\\|")
            print(f"| `{answer.command}` |", " | ".join(columns), f"| {status} | {shown} |", flush=True)
    for label, count in over.items():
        print(f"\n{label}: {count} of {len(answers)} take {BUDGET} s or more", end="")
    print()


if __name__ == "__main__":
    main()
