"""``--otlp``: a local collector that decodes what the SDK sends; one that is not there is a sentence."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import recordings
from programs import run_zerotop
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.commands.publishing.otlp import OtlpSender

_KINDS: dict[str, Any] = {
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
    "/v1/traces": ExportTraceServiceRequest,
}
WORK = ["python", "-c", "print('working')"]


class Collector(BaseHTTPRequestHandler):
    got: dict[str, list[Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.setdefault(self.path, []).append(_KINDS[self.path].FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    Collector.got = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision")
    yield Collector.got
    server.shutdown()
    thread.join()
    server.server_close()


def send(name: str, tell: Any = pytest.fail) -> RecordingSource:
    source = recordings.open_searched(name)
    OtlpSender(tell).finish(source)
    return source


def read_attributes(values: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in values}


def test_metrics_have_units_and_the_names_of_the_conventions(collected: dict[str, list[Any]]) -> None:
    view = send("story").view_at(None)
    (resource,) = collected["/v1/metrics"][-1].resource_metrics
    about = read_attributes(resource.resource.attributes)
    assert (about["service.name"], about["zerotop.job"], about["team"]) == ("zerotop", "story", "vision")
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert metrics["zerotop.steps"].sum.is_monotonic
    assert metrics["zerotop.steps"].sum.data_points[0].as_double == 14
    assert (metrics["zerotop.phase"].unit, metrics["zerotop.iteration"].unit) == ("s", "s")
    usage = metrics["hw.gpu.memory.usage"]
    assert (usage.unit, usage.sum.is_monotonic) == ("By", False)
    points = {read_attributes(point.attributes)["hw.id"]: point.as_int for point in usage.sum.data_points}
    assert sorted(points.values()) == sorted(gpu.used_bytes for gpu in view.gpus)
    assert all(uuid.startswith("GPU-") for uuid in points)
    assert 0 <= metrics["hw.gpu.utilization"].gauge.data_points[0].as_double <= 1
    ranks = metrics["zerotop.rank_resident"].gauge.data_points
    assert {read_attributes(point.attributes)["hw.id"] for point in ranks} == set(points)


def test_findings_are_log_records_at_their_time(collected: dict[str, list[Any]]) -> None:
    source = send("story")
    sent = [
        record
        for request in collected["/v1/logs"]
        for resource in request.resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]
    found = source.findings_at(None)
    assert [record.body.string_value for record in sent] == [finding.headline for finding in found]
    assert [record.time_unix_nano for record in sent] == [finding.known_ns for finding in found]
    assert {record.severity_text for record in sent} == {"warning", "info"}
    assert all(record.event_name == "zerotop.finding" for record in sent)


def test_the_service_keeps_the_name_of_the_environment(
    collected: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    send("cpu-clean")
    (resource,) = collected["/v1/metrics"][-1].resource_metrics
    assert read_attributes(resource.resource.attributes)["service.name"] == "training"


def test_a_collector_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    ended = run_zerotop(tmp_path, "run", "--headless", "--otlp", "--", *WORK)
    assert (ended.returncode, ended.stdout) == (0, b"working\n")
    assert ended.stderr.count(b"What --otlp sends was not delivered") == 1
    assert b"Traceback" not in ended.stderr


def test_a_recording_is_sent_as_a_trace_of_its_steps(
    collected: dict[str, list[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(recordings.find_packed_file("story"))
    assert main(["export", path, "--format", "otlp"]) == 0
    assert "story: 57 spans and " in capfd.readouterr().err  # 4 ranks x 14 steps, and the job
    spans = [
        span
        for request in collected["/v1/traces"]
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (job,) = (span for span in spans if span.name == "job")
    steps = [span for span in spans if span.name == "step"]
    assert {span.parent_span_id for span in steps} == {job.span_id}
    run = RecordedRun(recordings.open_recording("story"))
    last = next(process.recorded_steps[-1] for process in run.source.rank_steps if process.source.rank == 3)
    (sent,) = (span for span in steps if span.end_time_unix_nano == last["end_unix_ns"])
    about = read_attributes(sent.attributes)
    assert (about["rank"], about["step"], about["step_s"]) == (3, 13, last["step_s"])
    logs = [one for request in collected["/v1/logs"] for one in request.resource_logs[0].scope_logs[0].log_records]
    assert len(logs) == len(run.findings)


def test_an_export_that_is_not_taken_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(recordings.find_packed_file("cpu-clean"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    assert main(["export", path, "--format", "otlp"]) == 1
    assert "zerotop: The OpenTelemetry collector did not take the recording: " in capfd.readouterr().err
    assert main(["export", path, "--format", "otlp", "-o", "x"]) == 2
    monkeypatch.setitem(sys.modules, "zerotop.commands.publishing.otlp_recording", None)
    assert main(["export", path, "--format", "otlp"]) == 1
    assert "pip install 'zerotop[otlp]'" in capfd.readouterr().err


def test_settings_that_cannot_work_are_refused_before_the_job(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert main(["run", "--headless", "--otlp", "--", *WORK]) == 2
    assert "OTEL_EXPORTER_OTLP_PROTOCOL asks for grpc" in capfd.readouterr().err
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["run", "--headless", "--otlp", "--", *WORK]) == 2
    assert "pip install 'zerotop[otlp]'" in capfd.readouterr().err
