# SPDX-License-Identifier: Apache-2.0
"""What `stretto train` runs for `model.kind = "dlrm"`: options, checks, the task with its optimizers, evaluation."""
