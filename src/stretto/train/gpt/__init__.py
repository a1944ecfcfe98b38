"""Training of GPTs."""
