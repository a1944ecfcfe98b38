# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: messages between the ranks of a pipe axis.

carriers: which carrier takes a group's messages. messages: the interface of carriers, and what they share; in
message_format the header, in failure_reports how a failure's cause is found. gloo_carrier, shared_memory_carrier,
symmetric_memory_carrier and nccl_carrier: the carriers.
"""
