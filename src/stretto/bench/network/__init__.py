# SPDX-License-Identifier: Apache-2.0
"""`stretto bench network`: puts between nodes through the proxy, beside plain sockets in the same run."""
