# SPDX-License-Identifier: Apache-2.0
"""Puts between nodes: a FIFO of descriptors, and a proxy that reads it and carries the bytes.

Modules, in a put's way: `descriptors` (what kernels and the host post), `proxy` (the thread that reads it, in C++),
`endpoint` (a group's proxy and regions), `interfaces` (where it listens). docs/between-nodes.md has the picture.
"""
