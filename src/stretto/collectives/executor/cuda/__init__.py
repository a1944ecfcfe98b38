"""The CUDA executor: a verified schedule as one kernel."""
