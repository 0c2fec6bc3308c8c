"""`python -m sordino.cli`."""

import sys

from sordino.cli import main

if __name__ == "__main__":
    sys.exit(main())
