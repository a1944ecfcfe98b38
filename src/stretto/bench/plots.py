# SPDX-License-Identifier: Apache-2.0
"""Colours of all benches' pictures, and the line that names the devices and the date of a measurement."""

from collections.abc import Mapping
from typing import Any

OURS, PEER, OTHER_PEER, EXPOSED = "#2a6f97", "#8a8a8a", "#b08968", "#e07a5f"


def describe_origin(data: Mapping[str, Any]) -> str:
    """The devices and the date of a result, as `harness.write_result` has written them."""
    return f"{data['machine']['devices']}, {data['date']}"
