# SPDX-License-Identifier: Apache-2.0
"""`python -m lab NAME`: runs a bench of the lab, from the top of a checkout."""

from lab.commands import app
from stretto.cli.console import print_any_text, reporting_faults

if __name__ == "__main__":
    print_any_text()
    with reporting_faults():
        app(prog_name="python -m lab")
