# SPDX-License-Identifier: Apache-2.0
"""Settings of `stretto bench network`."""

from dataclasses import dataclass
from typing import Annotated

from stretto.bench.settings import Option, Step, list_sizes, require_known

PROXIES = ("native", "python")


@dataclass(frozen=True)
class NetworkSetting:
    """Sizes of puts, and by which proxies. Raises ValueError for others."""

    proxies: Annotated[tuple[str, ...], Option("native, python, with commas.")] = PROXIES
    smallest: Annotated[int, Option("Bytes of a put.")] = 64 << 10
    largest: Annotated[int, Option("Bytes of a put.")] = 4 << 20
    step: Step = 4
    megabytes: Annotated[int, Option("Sent each way for each rate, in MB.", least=1, most=1 << 16)] = 256
    idle_seconds: Annotated[
        int, Option("Over which an idle proxy's share of a core is measured.", least=1, most=60)
    ] = 3

    def __post_init__(self) -> None:
        require_known("proxy", self.proxies, PROXIES)
        list_sizes(self.smallest, self.largest, self.step)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of puts."""
        return list_sizes(self.smallest, self.largest, self.step)
