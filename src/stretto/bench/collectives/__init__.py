"""`stretto bench collectives`: Stretto's collectives beside NCCL and torch's symmetric-memory operators."""
