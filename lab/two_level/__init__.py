# SPDX-License-Identifier: Apache-2.0
"""`python -m lab two-level`: two-level collectives between network namespaces, compared with the performance model."""
