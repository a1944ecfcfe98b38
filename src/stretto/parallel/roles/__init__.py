# SPDX-License-Identifier: Apache-2.0
"""Roles of a model's submodules: plans, their validation, and what Hugging Face models imply."""
