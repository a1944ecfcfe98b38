"""Embedding look-ups fused with the exchange of what they give."""

from stretto.ops.embedding.operator import embedding_all_to_all

__all__ = ["embedding_all_to_all"]
