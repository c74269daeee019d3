"""Notifications of a job: a warning or worse, ranks that hang, and the end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

from zerotop.analysis.findings import Finding, Severity
from zerotop.analysis.reports.finding_json import build_finding_json
from zerotop.analysis.views.finding_search import list_findings
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.publishing.delivery import Delivery, choose_delivery

PAUSE_S = 60.0
"""The least time between two notifications; the end of the job is told at once."""

_HANG = "hung_ranks"
_END_WAIT_S = 40.0


class Notifier:
    """Chooses what is told of a recording and when; the delivery runs beside it."""

    def __init__(
        self,
        target: str,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        delivery: Delivery | None = None,
    ) -> None:
        """``target``: command or address. ``tell`` takes a sentence about a delivery that failed."""
        self._delivery = delivery or choose_delivery(target, tell)
        self._clock = clock
        self._sent_s = -math.inf
        self._known: set[tuple[str, int]] = set()
        self._waiting: list[Finding] = []

    def update(self, source: RecordingSource) -> None:
        """Send the worst new finding, unless a notification was sent a moment ago."""
        self._note(source.findings_at(None))
        if self._waiting and self._clock() - self._sent_s >= PAUSE_S and self._delivery.is_free:
            worst, others = self._take_worst()
            kind = "hang" if worst.name == _HANG else "finding"
            self._send(_build_message(source, kind, worst, others))

    def finish(self, source: RecordingSource) -> None:
        """Send the end, with the findings that were held back, and wait until it has been delivered or failed."""
        self._note(list_findings(source.recording))
        worst, others = self._take_worst() if self._waiting else (None, [])
        self._send(_build_message(source, "end", worst, others))
        self._delivery.wait(_END_WAIT_S)

    def _note(self, findings: tuple[Finding, ...]) -> None:
        for finding in findings:
            # The same on several ranks, and later with newer numbers, is one piece of news.
            event = finding.name, finding.begin_ns if finding.step is None else finding.step
            if finding.severity is not Severity.INFO and event not in self._known:
                self._known.add(event)
                self._waiting.append(finding)

    def _take_worst(self) -> tuple[Finding, list[Finding]]:
        worst = min(self._waiting, key=lambda finding: finding.severity is not Severity.ERROR)
        others = [finding for finding in self._waiting if finding is not worst]
        self._waiting = []
        return worst, others

    def _send(self, message: dict[str, Any]) -> None:
        self._sent_s = self._clock()
        self._delivery.send(json.dumps(message, allow_nan=False).encode())


def _build_message(source: RecordingSource, kind: str, finding: Finding | None, held_back: list[Finding]) -> dict[str, Any]:
    """Return the notification; ``text`` is a line for people, which chat programs show."""
    info, view = source.recording.info, source.view_at(None)
    job, progress = view.job, view.progress
    sentence = (job.exit_text or "The job ended.") if kind == "end" else ""
    end = {"state": job.state.value, "exit_code": job.exit_code, "sentence": sentence} if sentence else None
    news = [sentence, f"{finding.headline}." if finding else ""]
    step = f", step {finding.step}" if finding is not None and finding.step is not None else ""
    return {
        "text": f"zerotop: {job.name} on {info.get('host') or 'an unknown host'}{step}: {' '.join(filter(None, news))}",
        "event": kind,
        "recording": job.name,
        "path": str(source.recording.path),
        "host": info.get("host"),
        "command": list(job.command),
        "unix_s": time.time(),
        "steps": progress.finished_steps,
        "iteration_s": progress.iteration_s if math.isfinite(progress.iteration_s) else None,
        "finding": None if finding is None else build_finding_json(finding, None, None),
        "end": end,
        "held_back": len(held_back),
        "held_back_headlines": [other.headline for other in held_back],
    }
