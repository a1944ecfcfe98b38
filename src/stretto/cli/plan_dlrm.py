# SPDX-License-Identifier: Apache-2.0
"""`stretto plan` of a DLRM's configuration: which table is whole, cut or replicated, and where."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.recommendation.training.config import DLRMTrainConfig


def plan_dlrm(
    config: "DLRMTrainConfig", cluster: str | None, gpus: int | None, *, explain: bool, as_json: bool
) -> None:
    """Print the plan of a DLRM's tables on so many GPUs of a cluster; default: the configuration's ranks, on an H200's.

    explain: also what the search has changed from whole tables, and why. ValueError if the batch is not to be shared
    out among the GPUs, or the tables do not fit.
    """
    from stretto.cluster import Cluster
    from stretto.recommendation import place_tables
    from stretto.recommendation.table_planner import TableRates, plan_tables
    from stretto.recommendation.training.config import sizes_of, table_options

    ranks = config.ranks if gpus is None else gpus
    if ranks < 1 or config.train.batch % ranks:
        raise ValueError(f"--gpus is {ranks}, but must be at least 1 and divide train.batch, {config.train.batch}")
    options: dict[str, Any] = {}
    if cluster is not None:
        machine = Cluster.find(cluster)
        memory = machine.gpu.memory
        options = {"rates": TableRates.of_cluster(machine), "ranks_per_node": machine.gpus_per_node}
        options["memory"] = None if memory is None else _TABLES_PART * memory
    sizes = sizes_of(config.model.to_dlrm())
    plan = plan_tables(sizes, ranks, **table_options(config.train), **options)
    if as_json:
        print(json.dumps(plan.as_json()), flush=True)
        return
    whole = max(place_tables(sizes, ranks).work_shares()) * ranks - 1
    cut = max(plan.placement.work_shares()) * ranks - 1
    print((plan if explain else replace(plan, reasons=())).explain())
    print(f"look-ups of the busiest rank: {cut:.0%} above even, with whole tables {whole:.0%} (train.sharding='auto')")


_TABLES_PART = 0.8  # of a GPU's memory; the rest is for MLPs, activations and exchanges
