"""Collectives, weight gathering over z, and gradient reduction."""
