"""``python -m zerotop_probe.outside.folding RECORDING``: fold the recording of this node once."""

from __future__ import annotations

import os
import sys

from zerotop_probe.outside.folding.folding import fold_recording


def main() -> int:
    """Return 0, also if another process folds the recording; 1 if it could not be folded."""
    os.nice(19)
    try:
        fold_recording(sys.argv[1])
    except BlockingIOError:
        return 0
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
