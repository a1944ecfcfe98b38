"""The verifier: a schedule is proved right before it runs."""

from stretto.collectives.verifier.races import Race
from stretto.collectives.verifier.verify import WAIVABLE, Verification, verify

__all__ = ["WAIVABLE", "Race", "Verification", "verify"]
