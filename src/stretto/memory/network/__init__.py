# SPDX-License-Identifier: Apache-2.0
"""Puts between nodes: a FIFO of descriptors, a proxy that reads it, and transports that carry the bytes.

Modules, in a put's way: `descriptors` (what kernels and the host post), `proxy` and `native` (the thread that reads it,
in Python and in C++), `frames` (what travels), `sockets` and `transport` (what carries it, between machines and within
one), `endpoint` (a group's proxy and regions), `interfaces` (where it listens). docs/between-nodes.md has the picture.
"""
