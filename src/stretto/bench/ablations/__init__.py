"""`stretto bench ablations`: pipelining over tiles on and off, and one kernel against a composition of NCCL calls."""
