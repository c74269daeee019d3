"""Each query of the dashboard for Grafana, answered by a real Prometheus from metrics that were really exported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import growing_recording
import recordings
from free_ports import find_free_port
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.commands.publishing.prometheus import PrometheusFile
from zerotop.recording.reader import Recording

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
PROGRAM = shutil.which("prometheus")
pytestmark = [pytest.mark.real, pytest.mark.timeout(180), pytest.mark.skipif(not PROGRAM, reason="there is no prometheus")]
_CONFIGURATION = """\
global: {{ scrape_interval: 1s }}
scrape_configs:
  - job_name: zerotop
    honor_labels: true
    metrics_path: /{path}
    static_configs: [ {{ targets: ["127.0.0.1:{port}"] }} ]
"""


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def guess_type(self, path: Any) -> str:
        return "text/plain; version=0.0.4"


@contextmanager
def serve_files(folder: Path) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def list_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 10
    return [query.replace("$__rate_interval", "10s").replace("$job", ".*") for query in queries]


def ask(port: int, query: str) -> list[Any]:
    address = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(address, timeout=10) as answer:
        return list(json.load(answer)["data"]["result"])


def test_prometheus_answers_each_query_of_the_dashboard(tmp_path: Path) -> None:
    """A live job and a recorded one; the utilization of GPUs has the names and labels of DCGM's exporter."""
    (tmp_path / "files").mkdir()
    growing = tmp_path / "growing"
    command = [sys.executable, growing_recording.__file__, str(growing), "--ranks", "2"]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    recorded = PrometheusFile(tmp_path, pytest.fail)
    recorded.update(recordings.open_searched("story"))
    live = PrometheusFile(tmp_path, pytest.fail)
    with serve_files(tmp_path / "files") as files_port:
        port = find_free_port()
        (tmp_path / "prometheus.yml").write_text(_CONFIGURATION.format(path="metrics", port=files_port))
        server = subprocess.Popen(
            [
                str(PROGRAM),
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )
        try:
            unanswered = list_queries()
            deadline = time.monotonic() + 60
            while unanswered and time.monotonic() < deadline:
                live.update(RecordingSource(Recording.open(growing)))
                write_metrics(tmp_path / "files" / "metrics", recorded, live)
                time.sleep(1)
                try:
                    unanswered = [query for query in unanswered if not ask(port, query)]
                except OSError:  # it has yet to listen
                    continue
        finally:
            for process in (server, writer):
                process.kill()
                process.wait()
            writer.stdout.close()
    assert unanswered == []


def write_metrics(path: Path, recorded: PrometheusFile, live: PrometheusFile) -> None:
    """Write what a node's exporters have, each description once."""
    assert recorded.path is not None
    assert live.path is not None
    lines = dict.fromkeys(line for file in (recorded, live) for line in file.path.read_text().splitlines())  # type: ignore[union-attr]
    gpus = [line.partition('UUID="')[2].partition('"')[0] for line in lines if line.startswith("zerotop_rank_alive")]
    lines |= dict.fromkeys(f'DCGM_FI_DEV_GPU_UTIL{{UUID="{uuid}",gpu="0",Hostname="vm"}} 97' for uuid in gpus)
    path.with_suffix(".new").write_text("\n".join(lines) + "\n")
    path.with_suffix(".new").replace(path)
