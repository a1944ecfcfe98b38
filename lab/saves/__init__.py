# SPDX-License-Identifier: Apache-2.0
"""`python -m lab saves`: what a checkpoint adds to a step, at which speed it is copied and written, and kills."""
