"""A recording whose job may run on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from zerotop.session.reader import Session
from zerotop_probe.outside import control
from zerotop_probe.recording import events

# What begins and what ends a recording; the last says how it is.
_TURNS = (events.JOB_STARTED, events.ATTACHED, events.JOB_ENDED, events.DETACHED)
# Between looks at the job's processes, a few system calls each.
_LOOK_S = 0.5


class RunningSession(Session):
    """Lives as long as its job does, even when nobody records it: a sampler that was killed can be replaced."""

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self._looked_s = 0.0
        self._runs = False
        super().__init__(path, info)

    @property
    def live(self) -> bool:
        """Whether somebody writes it, or its job runs and its end was not recorded."""
        turns = [event.name for event in self.events if event.name in _TURNS]
        ended = bool(turns) and turns[-1] in (events.JOB_ENDED, events.DETACHED)
        return super().live or (not ended and self._job_runs())

    def _job_runs(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._looked_s, self._runs = now_s, control.job_alive(str(self.path))
        return self._runs
