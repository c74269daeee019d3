"""Entry point of ``python -m zerotop``."""

import sys

from zerotop.cli import main

if __name__ == "__main__":
    sys.exit(main())
