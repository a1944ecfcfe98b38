# SPDX-License-Identifier: Apache-2.0
"""`stretto bench embedding`: embedding look-ups fused with their all-to-all, compared with library operators."""
