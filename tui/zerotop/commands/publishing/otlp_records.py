"""What is common to all that is sent to OpenTelemetry: who sends it, findings as log records, and failures as sentences."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from zerotop.analysis.findings import Finding, Severity

_MOST_SAID = 200
_SEVERITIES = {
    Severity.INFO: SeverityNumber.INFO,
    Severity.WARNING: SeverityNumber.WARN,
    Severity.ERROR: SeverityNumber.ERROR,
}


def make_resource(recording: str) -> Resource:
    """Return the resource that the environment describes, with the recording's name."""
    found = Resource.create()
    is_named = not str(found.attributes[SERVICE_NAME]).startswith("unknown_service")
    return found.merge(Resource({"zerotop.job": recording} | ({} if is_named else {SERVICE_NAME: "zerotop"})))


def build_finding_record(finding: Finding) -> LogRecord:
    """Return a finding as a log record of the time at which it became known."""
    attributes = {
        "finding": finding.name,
        "step": finding.step,
        "ranks": list(finding.ranks),
        "details": str(finding.details),
        "advice": str(finding.advice),
        "fix": str(finding.fix),
    }
    return LogRecord(
        timestamp=finding.known_ns,
        observed_timestamp=time.time_ns(),
        severity_number=_SEVERITIES[finding.severity],
        severity_text=finding.severity.value,
        body=str(finding.headline),
        attributes={key: value for key, value in attributes.items() if value not in (None, "", [])},
        event_name="zerotop.finding",
    )


def report_failures(tell: Callable[[str], None]) -> None:
    """Pass the first thing that the SDK logs to ``tell``, and let nothing else of it be printed."""

    class FirstFailure(logging.Handler):
        is_told = False

        def emit(self, record: logging.LogRecord) -> None:
            if not self.is_told:
                self.is_told = True
                tell(record.getMessage().splitlines()[0][:_MOST_SAID])

    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers = [FirstFailure(logging.WARNING)]
