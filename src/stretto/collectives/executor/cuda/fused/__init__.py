# SPDX-License-Identifier: Apache-2.0
"""Runs a schedule as one fused kernel, generated for it as straight-line CUDA C++.

- program.py: lowers the schedule to what one thread executes;
- codegen.py: writes that as CUDA C++;
- kernel.py: loads it and launches it for calls of any size.
"""
