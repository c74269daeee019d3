"""``os._exit``: the end of processes that multiprocessing or a script forks, which calls no function of ``atexit``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from zerotop_probe.inside.guard import on_removal

_NAME = "_exit"


def watch_quick_exit(say_goodbye: Callable[[], object], note_failure: Callable[[int], object]) -> None:
    """Call ``say_goodbye`` before the process ends by ``os._exit(0)``, until the probe is removed.

    Other codes are failures, which ``note_failure`` is told. A forked child inherits the change; both must do nothing where
    nothing is recorded, take no lock, and never raise.
    """
    original = os._exit

    @functools.wraps(original)
    def exit_quickly(status: int) -> None:
        if status == 0:
            say_goodbye()
        elif isinstance(status, int):
            note_failure(status)
        original(status)

    def restore() -> None:
        if getattr(os, _NAME) is exit_quickly:  # else somebody has replaced it since
            setattr(os, _NAME, original)

    setattr(os, _NAME, exit_quickly)
    on_removal(restore)
