"""Training of recommendation models (DLRMs)."""
