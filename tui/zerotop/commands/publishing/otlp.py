"""Metrics and findings for OpenTelemetry, by its SDK, which reads its own environment variables."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from zerotop.analysis.findings import Finding
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.publishing.job_metrics import HOST_LABEL, JOB_LABEL, UUID_LABEL, list_gpu_uuids, read_job_metrics
from zerotop.commands.publishing.otlp_records import build_finding_record, make_resource, report_failures

_PERIOD_S, _END_S = 5.0, 10.0
_UNITS = {"_seconds": "s", "_bytes": "By", "_ratio": "1"}
_ATTRIBUTES = {HOST_LABEL: "host.name", UUID_LABEL: "hw.id"}  # of the semantic conventions; others keep their names


class OtlpSender:
    """Sends the metrics of a job and ``hw.gpu.*`` at the SDK's interval, and each finding once, as a log record."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._due_s = 0.0
        self._meters: MeterProvider | None = None
        self._logs: LoggerProvider | None = None
        self._observations: dict[str, list[Observation]] = {}
        self._instruments: set[str] = set()
        self._told: set[tuple[object, ...]] = set()
        report_failures(lambda said: tell(f"What --otlp sends was not delivered, at least once: {said}"))

    def update(self, source: RecordingSource) -> None:
        """Read the metrics, every few seconds, and pass new findings on."""
        if self._meters is None:
            self._start(source)
        self._send_findings(source.findings_at(None))
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _PERIOD_S
            self._read(source)

    def finish(self, source: RecordingSource) -> None:
        """Send the last values, for a few seconds at most."""
        self._due_s = 0.0
        self.update(source)
        # A collector that does not answer keeps the SDK trying again.
        ending = threading.Thread(target=self._shut_down, daemon=True)
        ending.start()
        ending.join(_END_S)

    def _start(self, source: RecordingSource) -> None:
        resource = make_resource(source.recording.name)
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._meters = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._logs = LoggerProvider(resource, shutdown_on_exit=False)
        self._logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))

    def _read(self, source: RecordingSource) -> None:
        for metric in read_job_metrics(source):
            unit = next((unit for suffix, unit in _UNITS.items() if metric.name.endswith(suffix)), "1")
            name = metric.name.replace("zerotop_", "zerotop.", 1)
            for suffix in _UNITS:
                name = name.removesuffix(suffix)
            observations = [
                Observation(
                    sample.value,
                    {_ATTRIBUTES.get(key, key): text for key, text in sample.labels.items() if text and key != JOB_LABEL},
                )
                for sample in metric.samples
            ]
            self._observe(name, observations, unit, metric.help, "counter" if metric.is_counter else "gauge")
        self._read_gpus(source)

    def _read_gpus(self, source: RecordingSource) -> None:
        """Observe what the semantic conventions for hardware have of a GPU."""
        uuids, gpus = list_gpu_uuids(source.recording), source.view_at(None).gpus
        facts = [
            {
                "hw.id": uuids.get((gpu.host, gpu.index)) or f"{gpu.host}/{gpu.index}",
                "hw.name": gpu.name,
                "hw.vendor": "NVIDIA",
                "host.name": gpu.host,
            }
            for gpu in gpus
        ]
        used = [Observation(gpu.used_bytes, about) for gpu, about in zip(gpus, facts, strict=True)]
        limits = [Observation(gpu.total_bytes, about) for gpu, about in zip(gpus, facts, strict=True)]
        busy = [
            Observation(gpu.utilization_percent / 100, about)
            for gpu, about in zip(gpus, facts, strict=True)
            if gpu.utilization_percent >= 0  # not where it is unknown
        ]
        self._observe("hw.gpu.memory.usage", used, "By", "GPU memory used.", "up_down_counter")
        self._observe("hw.gpu.memory.limit", limits, "By", "Size of the GPU memory.", "up_down_counter")
        self._observe("hw.gpu.utilization", busy, "1", "Fraction of time spent in a specific task.", "gauge")

    def _observe(self, name: str, observations: list[Observation], unit: str, text: str, kind: str) -> None:
        self._observations[name] = observations
        if observations and name not in self._instruments and self._meters is not None:
            self._instruments.add(name)
            create = getattr(self._meters.get_meter("zerotop"), f"create_observable_{kind}")
            create(name, [self._make_callback(name)], unit=unit, description=text)

    def _make_callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda options: self._observations[name]

    def _send_findings(self, findings: tuple[Finding, ...]) -> None:
        assert self._logs is not None
        for finding in findings:
            if finding.event in self._told:
                continue
            self._told.add(finding.event)
            self._logs.get_logger("zerotop").emit(build_finding_record(finding))

    def _shut_down(self) -> None:
        if self._meters is not None and self._logs is not None:
            self._logs.shutdown()
            self._meters.shutdown()
