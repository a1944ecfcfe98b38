# SPDX-License-Identifier: Apache-2.0
"""The old name of `stretto.train.checkpoint.weights`, for one release."""

from stretto.deprecated import alias

__getattr__ = alias(
    __name__,
    {
        "export_safetensors": "stretto.train.checkpoint.weights.export_safetensors",
        "import_safetensors": "stretto.train.checkpoint.weights.import_safetensors",
    },
)
