"""Metrics for Prometheus, by its own library: a file for node_exporter, or a port."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.publishing.job_metrics import JobMetric, read_job_metrics
from zerotop_probe.outside.causes import describe_cause

_PERIOD_S = 5.0
_FILE_MODE = 0o644  # node_exporter is another user


class MetricsCollector(Collector):
    """The metrics that were read last, in the form of the library. Counters never go back."""

    def __init__(self) -> None:
        self._families: list[Metric] = []
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; another thread may ask."""
        yield from self._families

    def read(self, source: RecordingSource) -> None:
        """Read the metrics at the end of the recording."""
        self._families = [self._build_family(metric) for metric in read_job_metrics(source) if metric.samples]

    def _build_family(self, metric: JobMetric) -> Metric:
        kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels)
        for sample in metric.samples:
            labels = tuple(sample.labels[name] for name in metric.labels)
            value = sample.value
            if metric.is_counter:  # sums of steps that are folded may differ in the last digits
                value = self._highest[metric.name, labels] = max(value, self._highest.get((metric.name, labels), 0.0))
            family.add_metric(labels, value)
        return family


class PrometheusFile:
    """A file in the folder of node_exporter's textfile collector, until the job has ended."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder, self._tell = folder, tell
        self._due_s = 0.0
        self._collector, self._registry = _make_registry()
        self.path: Path | None = None

    def update(self, source: RecordingSource) -> None:
        """Write the file, every few seconds."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + _PERIOD_S
        self._collector.read(source)
        self.path = self._folder / f"zerotop-{source.recording.name}.prom"
        try:
            write_to_textfile(str(self.path), self._registry)
            self.path.chmod(_FILE_MODE)
        except OSError as error:
            self._tell(f"The metrics could not be written to {self.path}: {describe_cause(error)}")

    def finish(self, source: RecordingSource) -> None:
        """Remove the file: node_exporter would report a job that has ended for ever."""
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink()


class PrometheusPort:
    """A server that answers Prometheus, until the job has ended."""

    def __init__(self, host: str, port: int, tell: Callable[[str], None]) -> None:
        self._due_s = 0.0
        self._collector, registry = _make_registry()
        self.port = 0
        """The port that is listened on; 0 if none."""
        try:
            server, _ = start_http_server(port, host, registry)
            self.port = server.server_port
        except OSError as error:
            tell(f"Prometheus cannot ask on {host}:{port}: {describe_cause(error)}")

    def update(self, source: RecordingSource) -> None:
        """Read the metrics, every few seconds."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _PERIOD_S
            self._collector.read(source)

    def finish(self, source: RecordingSource) -> None:
        """Nothing is left to do: the server ends with the process."""


def _make_registry() -> tuple[MetricsCollector, CollectorRegistry]:
    collector, registry = MetricsCollector(), CollectorRegistry()
    registry.register(collector)
    return collector, registry
