"""The process that ``companion`` starts."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

_NICENESS = 10


def main() -> int:
    """Tell the targets that standard input names. Return 0."""
    targets = json.load(sys.stdin)
    with suppress(OSError):
        os.nice(_NICENESS)  # the job comes first, before the imports too
    from zerotop.commands.publishing.publisher import publish

    publish(targets)
    return 0
