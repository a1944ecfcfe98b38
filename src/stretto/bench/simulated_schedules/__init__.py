# SPDX-License-Identifier: Apache-2.0
"""`stretto bench simulated-collectives` and `simulated-msccl`: schedules compared with measured and published ones."""
