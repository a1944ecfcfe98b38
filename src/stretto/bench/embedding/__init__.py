"""`stretto bench embedding`: embedding look-ups fused with their all-to-all, beside library operators."""
