# SPDX-License-Identifier: Apache-2.0
"""Training by `stretto train` with `model.kind = "dlrm"`: options, checks, the task with its optimizers, evaluation."""
