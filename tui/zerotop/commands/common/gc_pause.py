"""Importing what is then kept to the end."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def freeze_imports() -> Iterator[None]:
    """Around imports: searching what they make for garbage, of which there is none, is an eighth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
