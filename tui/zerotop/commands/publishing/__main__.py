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
    try:
        from zerotop.commands.publishing.publisher import publish

        publish(targets)
    except Exception as error:  # the starter prints sentences, and no tracebacks
        print(f"Nobody is told of this job any more: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
