# SPDX-License-Identifier: Apache-2.0
"""Finds stuck and slow ranks from outside, by each rank's counters (docs/when-ranks-fail.md). Needs no torch.

Modules: `ranks` (reads counters, the kernel's view of a process, and stacks), `monitor` (finds who keeps the others
waiting, and writes the message), `slow_ranks`, `evidence` (the folder of a stall), `stacks` (taken from outside),
`connections`, `watcher` (the process that watches under torchrun and outlives a launcher), `joining` (a rank's part: it
shares its counters), `device_waits` (a rank's part on GPUs: how long NCCL's kernels run).

Your own training loop calls `note` and `advance`: see `stretto.counters`.
"""
