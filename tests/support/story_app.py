"""For tests of the screens: a job that can be stopped, a clock set by the test, and an app over a recording."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from textual.pilot import Pilot

from played_source import PlayedSource
from screens import read_rows
from zerotop.analysis.findings import Finding
from zerotop.recording.reader import Recording
from zerotop.ui.app.app import ZerotopApp
from zerotop.ui.base.interfaces import Leaving
from zerotop.ui.drawing.glyphs import BLOCKS, Glyphs


class FakeJob:
    """A ``ui.base.interfaces.Controller`` that keeps the requests it receives."""

    attach_command = "zerotop attach brisk-otter"
    stop_description = "Stops it gracefully; again forces it."

    def __init__(self) -> None:
        self.stops = 0
        self.not_stopped = ""
        self.sampler = True
        self.outside = False
        self.restarts = 0
        self.looks: list[tuple[int, bool]] = []
        self.trouble: OSError | None = None

    def stop_job(self) -> str:
        if self.trouble:
            raise self.trouble
        self.stops += 1
        return self.not_stopped

    def request_trace(self, steps: int, stacks: bool) -> int:
        if self.trouble:
            raise self.trouble
        self.looks.append((steps, stacks))
        return len(self.looks)

    def is_sampler_alive(self) -> bool:
        return self.sampler

    def want_detail(self, hosts: Collection[str]) -> None:
        pass

    def restart_sampler(self) -> None:
        if self.trouble:
            raise self.trouble
        self.restarts += 1
        self.sampler = True

    def can_enter(self) -> bool:
        return self.outside

    def enter_ranks(self) -> str:
        if self.trouble:
            raise self.trouble
        self.outside = False
        return "Probe injected into 2 ranks."


class Watch:
    """An app over a recording whose clock is set by the test. Without seconds the recording is over."""

    def __init__(
        self,
        recording: Recording | str,
        seconds: float | None,
        *,
        glyphs: Glyphs = BLOCKS,
        findings: Sequence[Finding] | None = None,
    ) -> None:
        self.seconds = seconds
        self.clock = 1000.0
        self.job = FakeJob()
        self.source = PlayedSource(recording, self._read_clock, findings)
        self.app = ZerotopApp(
            self.source,
            None if seconds is None else self.job,
            title="brisk-otter",
            glyphs=glyphs,
            clock=lambda: self.clock,
        )

    def _read_clock(self) -> float:
        return inf if self.seconds is None else self.seconds

    def text(self) -> str:
        """The screen without its colours."""
        return "\n".join(read_rows(self.app))

    async def wait_for_tick(self, pilot: Pilot[Leaving]) -> None:
        """Run one tick of the monitor's timer and wait until its frame is on the screen."""
        self.app._scheduler._rest_until_s = 0.0  # however soon it comes after the one before
        self.app.run_tick()
        await pilot.pause()
