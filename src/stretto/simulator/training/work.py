# SPDX-License-Identifier: Apache-2.0
"""What all parts of a model compute and send for one micro-batch: its kinds of blocks, embeddings and head."""

from dataclasses import replace

from stretto.execution import SCATTERS_IN_FLIGHT
from stretto.planner.communication import bandwidths
from stretto.planner.compute import Device, compute
from stretto.planner.cost import StepCommunication
from stretto.planner.workload import StepConfig, StepWorkload
from stretto.simulator.training.block_work import BlockBuilder
from stretto.simulator.training.blocks import BlockRecorder
from stretto.simulator.training.ends import embedding_work, head_work


class StepWork:
    """The parts of a step on one grid, with one micro-batch. Raises ValueError like the planner.

    optimizer: seconds of its step, without pipeline stages.
    """

    def __init__(self, workload: StepWorkload, config: StepConfig, device: Device) -> None:
        self.workload, self.config, self.device, self.cluster = workload, config, device, device.cluster
        self.rates = bandwidths(device.cluster, config.grid)
        work = compute(workload, config, device)
        step = StepCommunication(workload, config, device.cluster, work, self.rates)
        builder = BlockBuilder(workload, config, device, step)
        self.optimizer, self.count, self.tokens = work.optimizer, step.micro_batches, builder.tokens
        self.prefetch = builder.prefetch
        model, is_whole = workload.model, config.grid.pipe == 1
        self.scatters_in_flight = 1 if model.is_sharded_by_blocks else SCATTERS_IN_FLIGHT
        recorders = {}
        for kind in model.kinds:
            has_moe = kind.model.moe_blocks > 0
            inner = workload.stage(1, is_first=False, is_last=False, moe_blocks=int(has_moe))
            recorders[has_moe] = BlockRecorder(builder.block(kind.model, inner), config.options)
        self.blocks = [recorders[has_moe] for has_moe in model.has_moe]
        first, last = (workload.stage(1, is_first=is_first, is_last=not is_first) for is_first in (True, False))
        self.embedding = embedding_work(builder, workload if is_whole else first)
        if is_whole:  # the planner counts no casts at the ends of pipelines
            forward = sum(each.work.forward_seconds for each in self.blocks)
            backward = sum(each.work.backward_seconds for each in self.blocks)
            self.embedding = replace(
                self.embedding,
                casts_forward=max(0.0, work.forward / self.count - forward),
                casts_backward=max(0.0, work.backward / self.count - backward),
            )
        self.head = head_work(builder, workload if is_whole else last)
