"""The process of a browser window: the recordings list, or the one recording that is served."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from zerotop.commands.common.user_settings import load_settings
from zerotop.commands.job.open_recording import open_recording
from zerotop.commands.job.recording_library import UserLibrary
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.app.start_app import StartApp
from zerotop.ui.drawing.glyphs import BLOCKS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the server ends, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the server ended before the call
        sys.exit(1)


def main() -> None:
    """Run the app. Arguments: the server's pid, and a recording. Print nothing: standard output goes to the browser."""
    parent, *recordings = sys.argv[1:]
    end_with_parent(int(parent))
    # A browser draws every character, whatever the locale says.
    if not recordings:
        StartApp(UserLibrary(), settings=load_settings(), glyphs=BLOCKS).run()
        return
    opened = open_recording(Path(recordings[0]))
    ZerotopApp(opened.source, opened.controller, title=opened.title, settings=load_settings(), glyphs=BLOCKS).run()


if __name__ == "__main__":
    main()
