# SPDX-License-Identifier: Apache-2.0
"""`stretto bench train`: whole training steps compared with their peers."""
