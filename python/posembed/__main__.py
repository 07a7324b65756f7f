"""Command line: python -m posembed."""

import sys

from posembed.commands import main

if __name__ == "__main__":
    sys.exit(main())
