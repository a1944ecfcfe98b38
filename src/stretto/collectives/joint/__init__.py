# SPDX-License-Identifier: Apache-2.0
"""Joint schedules: a collective's schedule and a GEMM's tiles over the same chunks of rows.

`schedule` derives them (`join`), `rewrite` has their other forms, and `verifier` proves them; `stretto.ops.joint` runs
them, and `stretto.simulator` says how long they should take. `routed` derives the messages of an all-to-all whose sizes
only the device knows (`route`), and `routed_verifier` proves them for any sizes.
"""

from stretto.collectives.joint.rewrite import pull
from stretto.collectives.joint.schedule import is_gather, join, require_collective, require_operator
from stretto.collectives.joint.verifier import verify_joint

__all__ = ["is_gather", "join", "pull", "require_collective", "require_operator", "verify_joint"]
