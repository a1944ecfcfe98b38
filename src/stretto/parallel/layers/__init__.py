# SPDX-License-Identifier: Apache-2.0
"""The modules that `parallelize` puts in place of a model's own."""
