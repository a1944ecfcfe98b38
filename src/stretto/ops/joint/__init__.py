# SPDX-License-Identifier: Apache-2.0
"""Any verified schedule of a collective as the exchange of a GEMM: `schedule=` of the dense operators.

schedule    a schedule's instructions and a product's tiles over the same chunks, derived (`join`)
verifier    proves the tables that will run
registry    schedules by the names that configurations have
kernel      one kernel for all: its first programs move rows, and all multiply; its launch
"""
