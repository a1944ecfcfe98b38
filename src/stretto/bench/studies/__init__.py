# SPDX-License-Identifier: Apache-2.0
"""Published figures of clusters that we do not have, simulated: each study is a command of `stretto bench`."""
