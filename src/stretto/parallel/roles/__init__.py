"""Roles of a model's submodules: plans, their validation, and what Hugging Face models imply."""
