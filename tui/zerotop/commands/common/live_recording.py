"""A recording whose job may be running on this machine."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from zerotop.recording.reader import Recording
from zerotop.recording.storage import Folder
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording.directory import COLLECTED

# Interval between checks of the job's processes, which take a few system calls each.
_POLL_S = 0.5


class RunningRecording(Recording):
    """A recording that is live while its job runs, even without a sampler, because a new sampler can be started."""

    def __init__(self, path: Path, info: dict[str, Any], folder: Folder | None = None) -> None:
        self._checked_s = 0.0
        self._was_running = False
        super().__init__(path, info, folder)

    @property
    def is_live(self) -> bool:
        """Whether the recording is being written, or its job runs and has no recorded end."""
        return super().is_live or (not self.is_over and self.path.is_dir() and self._is_job_running())

    def _is_job_running(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._checked_s >= _POLL_S:
            is_running = _is_collected_now if COLLECTED in self.info else job_control.is_job_alive
            self._checked_s, self._was_running = now_s, is_running(str(self.path))
        return self._was_running


def _is_collected_now(folder: str) -> bool:
    """Whether a collector holds its lock on the folder: nodes go on while the connection to their server is lost."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
