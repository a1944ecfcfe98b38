# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: models cut into stages, and what runs their steps.

pipeline: `Pipeline`, which users call; in actions the forward and backward passes of a rank, in micro_batches how a
batch is cut and its loss weighed. cutting: how a model is cut. stages: how a stage runs the model's own forward; in
activations what it sends.

carriers: selects the carrier of a group's messages. messages: the interface and common code of carriers; in
message_format the header, in failure_reports how a failure's cause is found. gloo_carrier, shared_memory_carrier,
symmetric_memory_carrier and nccl_carrier: the carriers.
"""
