# SPDX-License-Identifier: Apache-2.0
"""`python -m lab moe-demo`: a mixture of experts compared with a dense model of the same FLOPs a token.

Both are trained by `stretto train`'s loop on the same data, in the same order, on 4 processes of the CPU: the mixture
as `stretto init moe` has it, with its experts divided among ranks; the dense model with the same options but those of
experts.
"""

import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from lab.training.settings import MoeDemoSetting
from stretto.bench.harness import Column, print_table, run_ranks, write_result
from stretto.bench.pictures import draw_result
from stretto.models.gpt_config import GPTConfig
from stretto.report.run import read_metrics, read_run
from stretto.train.config import TrainConfig, config_to_toml, load_config
from stretto.train.preflight import preflight
from stretto.train.trainer import train

MIXTURE, DENSE = "mixture of experts", "dense"
# Options that turn moe.toml into the dense model of the same active size.
WITHOUT_EXPERTS = [
    f"model.{name}=none"
    for name in (
        *("num_experts", "experts_per_token", "expert_ffn", "router_scores", "expert_weight_scale"),
        *("balance", "bias_rate"),
    )
] + ["grid.expert=1"]
COLUMNS = (
    Column("name", "model"),
    Column("parameters", "parameters", "{:,}"),
    Column("flops_per_token", "FLOPs a token", "{:,}"),
    Column("steps", "steps"),
    Column("loss", "last loss", "{:.3f}"),
    Column("evaluation_loss", "held-out loss", "{:.3f}"),
    Column("highest_load", "highest load", "{:.2f}"),
    Column("last_load", "last load", "{:.2f}"),
)


def bench_moe_demo(setting: MoeDemoSetting, out: Path) -> dict[str, Any]:
    """Train both models, print the table, and write moe-demo.json, its table and its picture to `out`."""
    rows, curves = [], {}
    with tempfile.TemporaryDirectory(prefix="stretto-moe-demo-") as folder:
        for name in (MIXTURE, DENSE):
            config = preflight(configure(name, setting, Path(folder) / name.replace(" ", "-")))
            assert isinstance(config, TrainConfig)
            print(f"{name}: {config.ranks} ranks, {config.grid}", flush=True)
            config.out.mkdir(parents=True, exist_ok=True)
            (config.out / "config.toml").write_text(config_to_toml(config), encoding="utf-8")
            run_ranks(config.ranks, train, config)
            row, curves[name] = _read(config, name)
            rows.append(row)
    print_table("A mixture of experts beside a dense model of its active size", COLUMNS, rows)
    draw_result(write_result(out, "moe-demo", COLUMNS, rows, curves=curves))
    return {"rows": rows}


def configure(name: str, setting: MoeDemoSetting, out: Path) -> TrainConfig:
    """The configuration of one of the two runs."""
    options = [f"out={out}", "device=cpu", f"train.steps={setting.steps}", f"train.warmup_steps={setting.steps // 8}"]
    with as_file(files("stretto") / "configs" / "moe.toml") as file:
        config = load_config(file, [*options, *(WITHOUT_EXPERTS if name == DENSE else [])])
    assert isinstance(config, TrainConfig)
    return config


def _read(config: TrainConfig, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's row of the table, and its curves."""
    lines = read_metrics(config.out)
    shape: GPTConfig = config.model.to_gpt(data_vocab=256, seq_len=config.train.seq_len)
    evaluated = [line for line in lines if "evaluation_loss" in line]
    loads = [line["expert_load"] for line in lines if "expert_load" in line]
    row = {
        "name": name,
        "parameters": read_run(config.out).summary["parameters"],
        "flops_per_token": shape.flops_per_token(config.train.seq_len),
        "steps": len(lines),
        "loss": lines[-1]["loss"],
        "evaluation_loss": evaluated[-1]["evaluation_loss"],
        "highest_load": max(map(max, loads)) if loads else None,
        "last_load": max(loads[-1]) if loads else None,
    }
    curves = {
        "loss": [round(line["loss"], 5) for line in lines],
        "evaluated": [line["step"] for line in evaluated],
        "evaluation_loss": [round(line["evaluation_loss"], 5) for line in evaluated],
        "blocks": list(shape.moe_blocks),
        "load": [[round(value, 4) for value in load] for load in loads],
    }
    return row, curves
