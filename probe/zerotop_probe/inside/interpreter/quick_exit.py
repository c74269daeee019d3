"""``os._exit``: the end of processes that multiprocessing or a script forks, which calls no function of ``atexit``."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from zerotop_probe.inside.guard import on_removal

_NAME = "_exit"
# The part of a status that others see as the exit code.
_CODE_BITS = 0xFF


def watch_quick_exit(say_goodbye: Callable[[], object], note_failure: Callable[[int], object]) -> None:
    """Call ``say_goodbye`` before the process ends by ``os._exit(0)``, until the probe is removed.

    Other codes are failures, which ``note_failure`` is told. A forked child inherits the change; both must do nothing where
    nothing is recorded, and take no lock. The process ends even if a signal handler of the job raises meanwhile.
    """
    original = os._exit

    @functools.wraps(original)
    def exit_quickly(status: int) -> None:
        try:
            if isinstance(status, int):
                say_goodbye() if status & _CODE_BITS == 0 else note_failure(status)
        finally:
            original(status)

    exit_quickly.__module__ = os.__name__  # where pickle finds it: the original is also in a module of its own

    def restore() -> None:
        if getattr(os, _NAME) is exit_quickly:  # else somebody has replaced it since
            setattr(os, _NAME, original)

    setattr(os, _NAME, exit_quickly)
    on_removal(restore)
