# SPDX-License-Identifier: Apache-2.0
"""Tests of torch's suite that fail with the backend stretto, each with the reason."""

NAME = "the suite asks for the name of the backend, which is stretto"
LOGGER = "DDP's logger calls every backend custom that torch does not know"
NAMED_BY_ALL = "ranks other than 0 look for gloo's words; stretto names the missing rank on all ranks"
RELOADED = "torch's DDP with a static graph reduces nothing in its first step after torch.load, with any backend"
OTHER_WORDS = "the suite looks for NCCL's words; a schedule's call that a rank leaves out raises at the group's end too"
UNEVEN_LISTS = "gloo, which runs all-to-alls of lists of CPU tensors, refuses parts of several sizes"


def expected_failures(backend: str, ranks: int) -> dict[str, str]:
    """The tests that fail where stretto takes this backend's place, by name; the same with schedules and without."""
    failures = {"test_get_backend": NAME, "test_ddp_logging_data_cpu": LOGGER}
    if backend == "gloo" and ranks > 2:
        failures["test_monitored_barrier_gloo"] = NAMED_BY_ALL
        failures["test_monitored_barrier_failure_order"] = NAMED_BY_ALL
    if backend == "nccl":
        failures["test_DistributedDataParallel"] = RELOADED
        failures["test_ddp_profiling_execution_trace"] = NAME
        failures["test_monitored_barrier_allreduce_hang"] = OTHER_WORDS
        failures["test_monitored_barrier_allreduce_hang_wait_all_ranks"] = OTHER_WORDS
    if backend == "mpi":
        for case in ("", "_complex", "_full_group", "_group"):
            failures[f"test_all_to_all{case}"] = UNEVEN_LISTS
    return failures
