"""Entry point of ``python -m zerotop``."""

from __future__ import annotations

import sys

from zerotop.cli import main

if __name__ == "__main__":
    sys.exit(main())
