# SPDX-License-Identifier: Apache-2.0
"""Embedding look-ups whose vectors travel through NVSHMEM's puts, to ranks whose memory this GPU cannot map."""
