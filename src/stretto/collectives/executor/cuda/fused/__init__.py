"""Runs a schedule as one fused kernel, generated as straight-line CUDA C++ for it."""
