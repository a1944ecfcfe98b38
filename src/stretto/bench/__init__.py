# SPDX-License-Identifier: Apache-2.0
"""The benches of `stretto bench`, which users run on machines of their own: a folder each, with a peer in the same run.

A folder has the bench's settings (`settings.py`, of which `stretto.cli.settings_command` makes the command's options),
the measurement and its peers. The lab draws the results (`python -m lab redraw`).
"""
