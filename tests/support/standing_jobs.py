"""Real jobs of which a rank stops for the others, see tests/real/loops/hanging.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from free_ports import find_free_port
from zerotop.analysis.findings import Detection, Finding, begin_detection
from zerotop.recording.headers import RecordingError
from zerotop.recording.reader import Recording

SCRIPT = Path(__file__).resolve().parent.parent / "real" / "loops" / "hanging.py"
LINES = {
    line.rpartition("# hang: ")[2]: number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if "# hang: " in line
}
"""The line that each kind of hang stands at."""


class StandingJob:
    """One job, recorded headless. Its launcher does nothing when a rank ends."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], kind: str, *, ranks: int, odd: int, step: int, pause_s: float
    ) -> None:
        """Start it. ``odd``: the rank that stops, in ``step``, for ``pause_s``."""
        folder.mkdir()
        self.recording = folder / "recording"
        self.kind, self.ranks, self.odd, self.step = kind, ranks, odd, step
        self._output = folder / "output"
        self._detection: Detection | None = None
        self._opened: Recording | None = None
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": str(ranks)}
        script = f"{sys.executable} -u {SCRIPT} {kind} {odd} {step} {pause_s}"
        members = " & ".join(f"RANK={rank} LOCAL_RANK={rank} {script}" for rank in range(ranks))
        command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(self.recording), "--"]
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [*command, "bash", "-c", f"{members} & wait"],
                cwd=folder,
                env={**environment, **world},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """The output so far."""
        return self._output.read_text(errors="replace")

    @property
    def stopped_ns(self) -> int | None:
        """The unix time at which the rank stopped, as it printed itself; None before."""
        times = [int(line.split()[1]) for line in self.output.splitlines() if line.startswith("STOPS ")]
        return times[0] if times else None

    def find_named(self, name: str) -> Finding | None:
        """Return the first finding of that name, as a live viewer would have it now; None without any."""
        now_ns = time.time_ns()
        if self._opened is None or self._detection is None:
            try:
                self._opened = Recording.open(self.recording)
            except (RecordingError, OSError):
                return None
            self._detection = begin_detection(self._opened)
        self._opened.refresh()
        self._detection.update(now_ns)
        return next((one for one in self._detection.findings_at(now_ns) if one.name == name), None)

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
