# SPDX-License-Identifier: Apache-2.0
"""Simulations of figures published for large clusters: each study is a command of `stretto bench`."""
