# SPDX-License-Identifier: Apache-2.0
"""`python -m lab faults`: makes faults happen at random moments of training, and judges how the run bears them.

`settings` and `plan` draw the faults and need no torch. `run` starts a process of `watch` for each job, in a mount
namespace of its own; that one starts `__main__`, a training run whose ranks are those of `inject`. `judge` decides from
the records which faults were reported correctly, and what was lost or left behind.
"""
