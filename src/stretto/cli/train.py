# SPDX-License-Identifier: Apache-2.0
"""`stretto train`: trains a model from a configuration file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stretto.cli.console import Json, print_json, refusing_bad_input
from stretto.quantities import counted

if TYPE_CHECKING:
    from signal import Signals

    from stretto.report import RunRecord


def train(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG.toml", help="The configuration file: model, data, grid and training options."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Replace an option of the file; may be repeated."),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write a timeline of two steps: short for --set train.trace=true.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a GPT or a Hugging Face model on a grid of processes, or a recommendation model (DLRM) on several.

    Everything is checked first: options, data, the model on its grid, the checkpoint. Then the ranks are started
    (torchrun may have done so already), and the run's folder `out` gets config.toml, metrics.jsonl,
    checkpoints/, loss.png and summary.md, and with --trace trace.json and timeline.png. Ctrl-C writes a checkpoint and
    ends.

    Options of the file: docs/configuration.md. For example:

    - stretto init demo
    - stretto train demo.toml --set grid.data=2 --set ranks=8 --set out=runs/mine
    - stretto train runs/mine/config.toml --set train.resume=latest --set train.steps=200
    """
    with refusing_bad_input(as_json=as_json):
        from stretto.train.config import load_config

        # Before torch is imported: mistakes are reported immediately.
        requested = load_config(config, [*(overrides or []), *(["train.trace=true"] if trace else [])])

        from stretto.cluster.local_ranks import require_rendezvous
        from stretto.train.preflight import preflight

        checked = preflight(requested)
        require_rendezvous()

    from stretto.cli.running import exit_by, is_first, run_training
    from stretto.report import read_metrics, write_report
    from stretto.train.observe.progress import print_line

    stopped_by = run_training(checked, as_json=as_json)
    if is_first():
        with refusing_bad_input(as_json=as_json):  # the disk may be full by now
            has_trained = read_metrics(checked.out) != []
            run = write_report(checked.out) if has_trained else None
        if as_json:
            print_json(_result(checked.out, run, stopped_by))
        elif run is None:
            print_line("nothing was left to train" if stopped_by is None else "stopped before the first step")
        else:
            print_line(
                f"loss {run.losses[-1]:.4f} after {counted(run.steps[-1], 'step')}; see {checked.out / 'summary.md'}"
            )
    if stopped_by is not None:
        raise exit_by(stopped_by)


def _result(out: Path, run: "RunRecord | None", stopped_by: "Signals | None") -> dict[str, Any]:
    """Return what --json prints: the run's summary, its last step, and where to continue from."""
    from stretto.train.checkpoint import newest_checkpoint

    trained = {} if run is None else dict(run.summary) | {"step": run.steps[-1], "loss": run.losses[-1]}
    return trained | {
        "out": out,
        "checkpoint": newest_checkpoint(out),
        "stopped_by": None if stopped_by is None else stopped_by.name,
    }
