# SPDX-License-Identifier: Apache-2.0
"""`python -m lab simulated-collectives` and `simulated-msccl`: schedules compared with measured and published ones."""
