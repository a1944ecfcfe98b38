# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule by copy engines: they send the messages, and kernels reduce and store what arrives.

- lowering.py: which messages can be copies, and which operations remain for kernels;
- planner.py, direct.py: the operations of a call of one size, and their order;
- executor.py: issues it, on the streams of `stretto.memory.copy_engine`;
- flags.cu: the kernels that signal to peers and wait for them.
"""
