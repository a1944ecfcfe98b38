# SPDX-License-Identifier: Apache-2.0
"""Any verified schedule of a collective as the exchange of a GEMM: `schedule=` of the dense operators.

`stretto.collectives.joint` derives and proves what runs here.

    registry    schedules by the names that configurations have
    kernel      one kernel for all: its first programs move rows, and all multiply; its launch, and copy engines'
"""
