# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-collectives`: simulated schedules compared with measured ones."""
