# SPDX-License-Identifier: Apache-2.0
"""Embedding look-ups that send vectors by NVSHMEM puts to ranks whose memory this GPU cannot map.

Experimental: see the docstring of `stretto`.
"""
