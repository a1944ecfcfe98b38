# SPDX-License-Identifier: Apache-2.0
"""The training command of a job with faults, `python -m tests.faults FOLDER`, as `stretto train` is.

It resumes from the newest checkpoint, if the job has one, and writes the reason of its exit to ended.jsonl.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from stretto.launch import RankFailure
from stretto.launch.run_lock import command_lock
from stretto.train.checkpoint.folders import checkpoints_by_step
from stretto.train.config import job_from_json
from stretto.train.job import launch
from stretto.train.preflight import preflight
from tests.faults.inject import CONFIG_FILE, ENDED_FILE, train_with_faults


def main(folder: Path) -> int:
    """Train. Returns the exit status of `stretto train`: 0, 1 after a failure of a rank, 2 for invalid settings."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    config = job_from_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if checkpoints_by_step(config.out):
        config = config.model_copy(update={"train": config.train.model_copy(update={"resume": "latest"})})
    about: dict[str, Any] = {"status": 0, "message": ""}
    try:
        config = preflight(config)
        with command_lock(config.out):
            if (stopped := launch(train_with_faults, config)) is not None:
                about = {"status": 128 + stopped, "message": f"stopped by {stopped.name}"}
    except RankFailure as failure:
        known = {name: getattr(failure, name, None) for name in ("kind", "rank", "reason")}
        about = {"status": 1, "message": str(failure), **known}
    except ValueError as error:
        about = {"status": 2, "message": str(error)}
    if about["message"]:
        print(about["message"], file=sys.stderr, flush=True)
    with open(folder / ENDED_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.monotonic()} | about) + "\n")
    return int(about["status"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
