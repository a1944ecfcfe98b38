"""`stretto bench two-level`: two-level collectives between network namespaces, beside the performance model."""
