"""Importing modules without garbage collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def freeze_imports() -> Iterator[None]:
    """Pause garbage collection during imports, which create no garbage: it takes an eighth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
