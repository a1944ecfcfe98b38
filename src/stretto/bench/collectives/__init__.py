# SPDX-License-Identifier: Apache-2.0
"""`stretto bench collectives`: Stretto's collectives compared with NCCL's and torch's."""
