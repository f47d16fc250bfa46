"""`python -m samelogits`, the command where the scripts of a Python environment are not on the path."""

import sys

from samelogits.cli import main

if __name__ == "__main__":
    sys.exit(main())
