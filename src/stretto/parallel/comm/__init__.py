# SPDX-License-Identifier: Apache-2.0
"""Collectives, weight gathering over z, and gradient reduction."""
