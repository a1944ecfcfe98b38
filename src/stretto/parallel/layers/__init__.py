"""The modules that `parallelize` puts in place of a model's own."""
