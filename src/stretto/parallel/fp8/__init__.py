# SPDX-License-Identifier: Apache-2.0
"""float8 training: which layers compute in fp8 (`selection`), their weights as they are gathered (`weights`), and
their products (`matrix` for linears, `experts` for experts)."""
