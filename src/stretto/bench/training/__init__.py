# SPDX-License-Identifier: Apache-2.0
"""`stretto bench train`, `peers`, `overlap`, `parity` and `dlrm`: whole training steps compared with their peers."""
