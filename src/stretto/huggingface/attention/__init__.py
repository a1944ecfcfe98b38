# SPDX-License-Identifier: Apache-2.0
"""Kinds of transformers' attention: `linear_attention` carries a state along the sequence, and `paged_attention`
decodes from a cache in pages. (`stretto.huggingface.context` cuts sequences.)"""
