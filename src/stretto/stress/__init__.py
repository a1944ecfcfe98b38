# SPDX-License-Identifier: Apache-2.0
"""`stretto doctor --kernels`: random calls of kernels back to back, with results known to the bit.

`catalogue` names the configurations, `worker` runs in each rank, `run` starts the ranks and keeps the accounts.
tests/stress has configurations of all other kernels, and the command that runs them for hours.
"""
