"""A recording whose job may run on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from zerotop.session.reader import Session
from zerotop.session.storage import Folder
from zerotop_probe.outside.job import job_control

# Between looks at the job's processes, a few system calls each.
_POLL_S = 0.5


class RunningSession(Session):
    """Lives as long as its job does, even when nobody records it: a sampler that was killed can be replaced."""

    def __init__(self, path: Path, info: dict[str, Any], folder: Folder | None = None) -> None:
        self._checked_s = 0.0
        self._was_running = False
        super().__init__(path, info, folder)

    @property
    def is_live(self) -> bool:
        """Whether somebody writes it, or its job runs and its end was not recorded."""
        return super().is_live or (not self.is_over and self.path.is_dir() and self._is_job_running())

    def _is_job_running(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._checked_s >= _POLL_S:
            self._checked_s, self._was_running = now_s, job_control.is_job_alive(str(self.path))
        return self._was_running
