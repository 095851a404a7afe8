"""Entry point of `python -m pagetide`, which is the command `pagetide`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
