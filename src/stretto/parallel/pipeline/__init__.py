# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: messages between the ranks of a pipe axis.

messages: the interface of carriers, and what they share. gloo_carrier: messages over a gloo group.
"""
