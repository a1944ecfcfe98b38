# SPDX-License-Identifier: Apache-2.0
"""The planner's predictions, and simulated steps, compared with measured step times and memory."""
