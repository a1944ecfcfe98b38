"""What the planner expects of a run, to stand beside what is measured."""

from typing import Any

from stretto.cluster import Cluster
from stretto.models import GPTConfig
from stretto.planner import predict
from stretto.train.config import TrainConfig


def predict_run(config: TrainConfig, model: GPTConfig) -> dict[str, Any] | None:
    """Step time and exposed communication by axis in seconds, peak memory in bytes; None without `config.cluster`.

    Raises ValueError for a cluster that is not known, or does not say what a prediction needs.
    """
    if config.cluster is None:
        return None
    run = config.train
    plan = predict(
        model,
        Cluster.find(config.cluster),
        grid=config.grid.sizes(),
        batch=run.batch,
        seq_len=run.seq_len,
        micro_batch=run.micro_batch,
        checkpoint_activations=run.checkpoint_activations,
        keep_gathered=run.keep_gathered,
        shard_sequence=run.shard_sequence,
        dtype=run.dtype,
        optimizer=run.optimizer,
        overlaps=any(is_on for name, is_on in config.overlap if name != "copy_engines"),
        copy_engines=config.overlap.copy_engines,
    )
    return {"step_time": plan.step_time, "exposed": dict(plan.exposed), "peak_memory": plan.peak_memory}


def in_words(predicted: dict[str, Any]) -> str:
    """A line for the log."""
    step, exposed = predicted["step_time"] * 1e3, sum(predicted["exposed"].values()) * 1e3
    return (
        f"predicted: {step:,.3g} ms a step, of which exposed communication {exposed:,.3g} ms; "
        f"{predicted['peak_memory'] / 1e9:,.3g} GB at the peak"
    )
