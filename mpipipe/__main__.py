"""``python -m mpipipe``."""

from __future__ import annotations

import sys

from mpipipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
