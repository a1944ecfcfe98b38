# SPDX-License-Identifier: Apache-2.0
"""The bench of pipeline schedules whose units take unequal times."""
