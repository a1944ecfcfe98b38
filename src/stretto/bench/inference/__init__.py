# SPDX-License-Identifier: Apache-2.0
"""`stretto bench inference`: an engine's steps, beside transformers' `generate` and the GPU's data sheet."""
