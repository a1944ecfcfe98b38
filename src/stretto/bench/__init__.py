# SPDX-License-Identifier: Apache-2.0
"""The benches behind every figure of the README: a folder each, with its peers in the same run (`stretto bench`).

A folder has the bench's settings (`settings.py`, of which `stretto.cli.bench.command` makes the command's options), the
measurement (`run.py`, or a file a command) and the picture.
"""
