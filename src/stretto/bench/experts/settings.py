# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench moe-demo`."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, require_least


@dataclass(frozen=True)
class MoeDemoSetting:
    """What `stretto bench moe-demo` trains. Raises ValueError for settings that cannot work."""

    steps: Annotated[int, Option("Steps of each run.")] = 150

    def __post_init__(self) -> None:
        require_least(2, steps=self.steps)
