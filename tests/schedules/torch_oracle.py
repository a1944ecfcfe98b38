# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.pipelining's schedules, made and read without a process group or a model."""

from types import SimpleNamespace

from torch.distributed.pipelining import schedules as of_torch

from stretto.schedules import Action, PipelineOperation

CLASSES = {
    "gpipe": of_torch.ScheduleGPipe,
    "1f1b": of_torch.Schedule1F1B,
    "interleaved": of_torch.ScheduleInterleaved1F1B,
    "zb-h1": of_torch.ScheduleInterleavedZeroBubble,
    "zb-v": of_torch.ScheduleZBVZeroBubble,
    "dualpipe-v": of_torch.ScheduleDualPipeV,
}


def fake_stages(pipe, virtual_stages):
    """Make the attributes that torch's schedules read of the stages of the first rank."""
    return [
        SimpleNamespace(
            num_stages=pipe * virtual_stages,
            group_size=pipe,
            group_rank=0,
            stage_index=stage * pipe,
            submod=None,
            is_first=False,
            is_last=False,
            has_backward=True,
        )
        for stage in range(virtual_stages)
    ]


def build_with_torch(name, pipe, micro_batches, virtual_stages=1):
    """Return torch's own order of actions, for each rank, as actions of Stretto."""
    stages = fake_stages(pipe, virtual_stages)
    made = CLASSES[name](stages if virtual_stages > 1 or name == "zb-h1" else stages[0], micro_batches)
    order = made.pipeline_order if hasattr(made, "pipeline_order") else made._get_pipeline_order()
    ranks = [list(flatten(order[rank])) for rank in range(pipe)]
    if name == "1f1b" and ranks[-1][0].micro_batch == 1:
        # torch's list for 1F1B counts the last rank's forward passes from 1; what torch runs is counted from 0.
        ranks[-1] = [each._replace(micro_batch=each.micro_batch - (each.operation == "F")) for each in ranks[-1]]
    return tuple(map(tuple, ranks))


def flatten(actions):
    for action in actions:
        if action is None or action.computation_type == of_torch.REDUCE_GRAD:
            continue
        parts = action.sub_actions or (action,)
        for number, part in enumerate(parts):
            operation = PipelineOperation(part.computation_type.value)
            yield Action(part.stage_index, operation, part.microbatch_index, len(parts) == 2 and number == 0)


def make_runtime(pipe, virtual_stages, micro_batches):
    """The part of torch that loads, writes and simulates schedules of any order."""
    return of_torch._PipelineScheduleRuntime(fake_stages(pipe, virtual_stages), micro_batches)
