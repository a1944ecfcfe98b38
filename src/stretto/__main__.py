"""`python -m stretto`."""

from stretto.cli import main

if __name__ == "__main__":
    main()
