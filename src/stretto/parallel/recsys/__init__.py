# SPDX-License-Identifier: Apache-2.0
"""Distributed embedding tables of recommendation models."""
