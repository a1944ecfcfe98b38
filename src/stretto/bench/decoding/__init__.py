# SPDX-License-Identifier: Apache-2.0
"""`stretto bench decoding`: attention to a paged cache, and products with their sum, residual and norm (`run`);
`stretto bench inference`: steps of an engine, beside transformers' `generate` and the GPU's data sheet (`engine`)."""
