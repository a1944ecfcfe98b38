# SPDX-License-Identifier: Apache-2.0
"""`python -m stretto.cli`."""

from stretto.cli import main

if __name__ == "__main__":
    main()
