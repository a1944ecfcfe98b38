# SPDX-License-Identifier: Apache-2.0
"""Program that torchrun starts in the test of elastic nodes: `stretto train`, with steps that take a while."""

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from stretto.cli import main
from stretto.train.data import Sampler


def run(config: str) -> None:
    folder = Path(config).parent
    (folder / f"pid-{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}").write_text(str(os.getpid()))
    indices = Sampler.indices

    def slowly(sampler: Sampler, number: int) -> Any:
        time.sleep(0.3)
        return indices(sampler, number)

    sys.argv = ["stretto", "train", config]
    with mock.patch.object(Sampler, "indices", slowly):
        main()


if __name__ == "__main__":
    run(sys.argv[1])
