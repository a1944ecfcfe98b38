# SPDX-License-Identifier: Apache-2.0
"""`python -m lab checkouts`: two checkouts of Stretto measured in turn in one run, to see what a change costs."""
