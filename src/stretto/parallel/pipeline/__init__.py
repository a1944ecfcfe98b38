# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: models cut into stages, and what runs their steps.

pipeline: `Pipeline`, which users call; in actions the forward and backward passes of a rank, in micro_batches how a
batch is cut and its loss weighed. cutting: how a model is cut. stages: how a stage runs the model's own forward; in
activations what it sends.

transports: selects the transport of a group's messages. messages: the interface and common code of transports; in
message_format the header, in failure_reports how a failure's cause is found. gloo_transport, shared_memory_transport,
symmetric_memory_transport and nccl_transport: the transports.
"""
