# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: built, read and written, verified, timed. No torch.

schedule = build_schedule("1f1b", pipe=4, micro_batches=16)
verify(schedule, buffers=1, max_live=4)
timeline = simulate(schedule, StageCosts.uniform(schedule.stages))
timeline.makespan, timeline.idle
"""

from stretto.schedules.csv_format import format_csv, parse_csv, read_csv, write_csv
from stretto.schedules.generators import SCHEDULES, build_schedule
from stretto.schedules.message_driven import MessageDrivenPolicy, ServeFirst, simulate_message_driven
from stretto.schedules.partition import partition
from stretto.schedules.schedule import Action, PipelineOperation, PipelineSchedule, ScheduleError, add_unshard_actions
from stretto.schedules.timing import PipelineTimeline, StageCosts, StageLinks, simulate
from stretto.schedules.verifier import (
    Delivery,
    LiveMicroBatches,
    buffers_needed,
    live_micro_batches,
    peak_activations,
    verify,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Delivery",
    "LiveMicroBatches",
    "MessageDrivenPolicy",
    "PipelineOperation",
    "PipelineSchedule",
    "PipelineTimeline",
    "ScheduleError",
    "ServeFirst",
    "StageCosts",
    "StageLinks",
    "add_unshard_actions",
    "buffers_needed",
    "build_schedule",
    "format_csv",
    "live_micro_batches",
    "parse_csv",
    "partition",
    "peak_activations",
    "read_csv",
    "simulate",
    "simulate_message_driven",
    "verify",
    "write_csv",
]
