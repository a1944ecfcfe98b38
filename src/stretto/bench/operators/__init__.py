# SPDX-License-Identifier: Apache-2.0
"""`stretto bench ops`: overlapped operators compared with the GEMM alone, GEMM and NCCL, and torch's async-TP."""
