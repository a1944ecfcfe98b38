# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on a grid.

module            the experts of a mixture: which tokens go where
products          their products and exchanges, as autograd functions
shared_experts    what a block computes beside its experts, put under their exchange
replicas          copies of hot experts for a step
"""
