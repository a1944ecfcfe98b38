# SPDX-License-Identifier: Apache-2.0
"""The torch.distributed backend "stretto": runs collectives by installed schedules, else by gloo or NCCL.

What a call of `dist.all_reduce(tensor, group=group)` passes through, in order:

    1. torch, c10d         the group's Backend object, which `factory.py` made when the group was made
    2. native/backend.hpp  `StrettoBackend::allreduce`
         native/fast_calls.hpp   on GPUs launches calls of a kind that was made before; for all others, Python is asked:
    3. dispatcher.py       `Dispatcher.__call__` decides what runs the call, counts it, and logs it at debug level
         calls.py            describes the call (`BackendCall`), and checks whether any schedule could run it
         debug_check.py      with STRETTO_DEBUG=1: compares the call on all ranks first
    4a. a schedule: installed by the user, or on GPUs the fastest known one
         runner.py           the interface `Runner`, one for each device type
         host_runner.py      CPU: a worker thread of the group (agreement.py: all ranks call the same), shared memory
         cuda_runner.py      GPU: kernels on the group's or the caller's stream, by modules of `stretto.collectives`:
           executor/cuda/communicator.py     memory that the group's GPUs share; finds the fastest known schedule
           selection.py                      the table that says which it is, by collective, dtype and size
           executor/cuda/fused/kernel.py     runs a schedule as one fused kernel; instead of it:
           executor/cuda/copy_engine/executor.py   for large arrays, if the table selects them: copy engines
           executor/cuda/interpreter.py            for an installed schedule that is too long for one kernel
           executor/cuda/nvrtc.py            compiles the CUDA C++ of all of these, and launches it
         two_level.py        without an installed one, if `set_two_level` was called: between nodes and inside them
         calls.py            `run_staged`: strided tensors and lists to the flat buffers of the executor, and back
         nccl_warmup.py      has NCCL connect too, for messages that may follow
    4b. no schedule: the dispatcher returns None, and `StrettoBackend` calls gloo or NCCL
         host_fallback.py    only where ranks share GPUs, in tests: stages NCCL's calls on the host
    5. native.py           makes the Work object of a schedule (native/work.hpp); gloo or NCCL make their own

`api.py` is what users call: `install`, `install_folder`, `uninstall`, `run_collective`, `set_two_level`,
`monitored_barrier`, `call_counts`.
`stretto.registration` registers the backend's name.
"""
