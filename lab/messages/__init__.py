# SPDX-License-Identifier: Apache-2.0
"""`python -m lab messages`: messages between pipeline stages by transport, and all-reduces by back end."""
