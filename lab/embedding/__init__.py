# SPDX-License-Identifier: Apache-2.0
"""Studies of the embedding look-up, and the pictures of its benches."""
