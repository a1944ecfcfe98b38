# SPDX-License-Identifier: Apache-2.0
"""The command `stretto`, and `python -m stretto`."""


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback also while its modules are imported."""
    try:
        from stretto.cli import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
