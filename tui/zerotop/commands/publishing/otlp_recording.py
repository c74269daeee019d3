"""A whole recording for OpenTelemetry: a trace with a span for each step, and findings as log records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, LogRecordExportResult, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import set_span_in_context

from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.commands.common.errors import Problem
from zerotop.commands.publishing.otlp_records import build_finding_record, make_resource, report_failures
from zerotop.recording.reader import Recording
from zerotop.recording.samples import Rows

_BATCH = 512
_SECONDS = ("iteration_s", "data_s", "forward_s", "backward_s", "step_s", "eval_s", "checkpoint_s")
_COUNTS = ("rank", "step", "micro_steps", "rows", "tokens")


def send_recording(recording: Recording) -> tuple[int, int]:
    """Send a recording to the collector that the environment names; return how many spans and log records it took.

    Folded steps have no time of their own and are left out. Raise Problem as soon as a batch is not delivered.
    """
    said: list[str] = []
    report_failures(said.append)
    run = RecordedRun(recording, memory=False)
    spans = _send_spans(run, said)
    return spans, _send_findings(run, said)


def _send_spans(run: RecordedRun, said: Sequence[str]) -> int:
    kept = InMemorySpanExporter()
    # All are sent, whatever share the environment asks for: this is no sampling of requests.
    provider = TracerProvider(ALWAYS_ON, make_resource(run.recording.name), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer, exporter = provider.get_tracer("zerotop"), OTLPSpanExporter()
    job = run.view.job
    root = tracer.start_span(
        "job",
        start_time=run.source.begin_ns,
        attributes=_drop_unknown({"command": list(job.command), "exit_code": job.exit_code, "model": job.engine.model}),
    )
    context, steps, count = set_span_in_context(root), _iter_steps(run), 0
    while batch := list(islice(steps, _BATCH)):
        for attributes, begin_ns, end_ns in batch:
            span = tracer.start_span("step", context, start_time=begin_ns, attributes=attributes)
            span.end(end_ns)
        count += _deliver(kept.get_finished_spans(), exporter.export, SpanExportResult.SUCCESS, said)
        kept.clear()
    root.end(run.source.end_ns)
    return count + _deliver(kept.get_finished_spans(), exporter.export, SpanExportResult.SUCCESS, said)


def _iter_steps(run: RecordedRun) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield attributes, begin and end of each step of each rank."""
    for process in run.source.rank_steps:
        rows: Rows = process.recorded_steps
        for row in rows[rows["steps"] == 1]:
            counts = {name: int(row[name]) for name in _COUNTS if row[name] >= 0}
            seconds = {name: float(row[name]) for name in _SECONDS}
            yield _drop_unknown(counts | seconds), int(row["begin_unix_ns"]), int(row["end_unix_ns"])


def _send_findings(run: RecordedRun, said: Sequence[str]) -> int:
    kept = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call]
    provider = LoggerProvider(make_resource(run.recording.name), shutdown_on_exit=False)
    provider.add_log_record_processor(SimpleLogRecordProcessor(kept))
    logger = provider.get_logger("zerotop")
    for finding in run.findings:
        logger.emit(build_finding_record(finding))
    return _deliver(kept.get_finished_logs(), OTLPLogExporter().export, LogRecordExportResult.SUCCESS, said)


def _deliver(batch: Sequence[Any], export: Callable[[Sequence[Any]], Any], success: Any, said: Sequence[str]) -> int:
    if batch and export(batch) is not success:
        raise Problem(
            f"The OpenTelemetry collector did not take the recording: {said[0] if said else 'no reason was given'}"
        )
    return len(batch)


def _drop_unknown(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not (value is None or value != value)}  # NaN
