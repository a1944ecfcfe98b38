"""Runs a schedule by copy engines: they send the messages, and kernels reduce and store what arrives."""
