# SPDX-License-Identifier: Apache-2.0
"""`stretto stress`: random calls of every kernel in every configuration, back to back, with results known to the bit.

`catalogue` lists the configurations, `worker` runs in each rank, `run` starts the ranks and keeps the accounts.
"""
