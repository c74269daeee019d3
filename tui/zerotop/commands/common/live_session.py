"""A recording whose job may run on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from zerotop.session.reader import Session
from zerotop.session.storage import Folder
from zerotop_probe.outside.job import job_control

# Between looks at the job's processes, a few system calls each.
_LOOK_S = 0.5


class RunningSession(Session):
    """Lives as long as its job does, even when nobody records it: a sampler that was killed can be replaced."""

    def __init__(self, path: Path, info: dict[str, Any], folder: Folder | None = None) -> None:
        self._looked_s = 0.0
        self._runs = False
        super().__init__(path, info, folder)

    @property
    def live(self) -> bool:
        """Whether somebody writes it, or its job runs and its end was not recorded."""
        return super().live or (not self.over and self.path.is_dir() and self._job_runs())

    def _job_runs(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s, self._runs = now_s, job_control.job_alive(str(self.path))
        return self._runs
