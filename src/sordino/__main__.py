"""The program `sordino`, and `python -m sordino`. Imports are inside: Ctrl-C during them gets one line, too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line.

    Returns:
      The exit status.
    """
    try:
        from sordino.cli import main as command
    except KeyboardInterrupt:
        print("sordino: stopped.", file=sys.stderr)
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
