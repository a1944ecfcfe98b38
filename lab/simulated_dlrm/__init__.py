# SPDX-License-Identifier: Apache-2.0
"""A DLRM's training step with look-up and all-to-all separate or fused, on any network."""
