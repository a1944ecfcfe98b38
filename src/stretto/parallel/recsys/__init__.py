"""Distributed embedding tables of recommendation models."""
