# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: each rank of the axis context has a part of every sequence.

cutting             which part: of tensors that a caller has, too
sequence_parts      cuts a model's arguments, and has its attention exchange keys and values
linear_attention    passes the states of layers that carry one along the sequence
"""
