# SPDX-License-Identifier: Apache-2.0
"""`stretto bench simulated-collectives` and `simulated-msccl`: schedules beside measured and published ones."""
