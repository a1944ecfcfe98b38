"""Collectives as programs over chunks: traced, compiled, proved safe, stored and run."""
