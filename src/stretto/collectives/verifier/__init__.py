# SPDX-License-Identifier: Apache-2.0
"""The verifier: proves a schedule correct before it runs."""

from stretto.collectives.verifier.races import Race
from stretto.collectives.verifier.verify import WAIVABLE, Verification, verify

__all__ = ["WAIVABLE", "Race", "Verification", "verify"]
