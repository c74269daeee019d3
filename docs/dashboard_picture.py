"""Draw docs/dashboard.png: what the queries of the dashboard for Grafana answer, from a real Prometheus.

It is not a picture of Grafana. The metrics are those that zerotop has at each second of the demo's recording.

Usage: .venv/bin/python docs/dashboard_picture.py
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests" / "support"), str(HERE.parent / "tests" / "real")]
import recordings  # noqa: E402
from free_ports import find_free_port  # noqa: E402
from zerotop.analysis.views.recording_source import RecordingSource  # noqa: E402
from zerotop.commands.publishing.job_metrics import read_job_metrics  # noqa: E402

NAME = "story"
STEP_S = 1
RATE = "10s"
COLOURS = ["#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#f2495c", "#b877d9", "#8ab8ff", "#37872d", "#fade2a"]
UNITS = {"s": (1, " s"), "bytes": (1 << 30, " GiB"), "percentunit": (0.01, " %"), "percent": (1, " %")}


class Moment:
    """A recording as if it ended at a moment."""

    def __init__(self, source: RecordingSource, cursor_ns: int) -> None:
        self._source, self._cursor_ns = source, cursor_ns
        self.job_steps = source.job_steps[source.job_steps["end_unix_ns"] <= cursor_ns]
        self.job_tokens = source.job_tokens[: len(self.job_steps)]
        self.last_step = int(self.job_steps["step"][-1]) if len(self.job_steps) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def view_at(self, cursor_ns: None) -> Any:
        """Return the view of the moment."""
        return self._source.view_at(self._cursor_ns)

    def findings_at(self, cursor_ns: None) -> Any:
        """Return the findings that were known."""
        return self._source.findings_at(self._cursor_ns)


def write_metrics(path: Path) -> tuple[float, float]:
    """Write the metrics of each second in the format OpenMetrics; return the first and the last unix time."""
    source = recordings.open_searched(NAME)
    families: dict[str, list[str]] = defaultdict(list)
    times = np.arange(source.begin_ns, source.end_ns, STEP_S * 10**9)
    for cursor_ns in times.tolist():
        for metric in read_job_metrics(Moment(source, cursor_ns)):  # type: ignore[arg-type]
            name = metric.name.removesuffix("_total")
            for sample in metric.samples:
                labels = ",".join(f"{key}={json.dumps(value)}" for key, value in sample.labels.items())
                suffix = "_total" if metric.is_counter else ""
                kind = "counter" if metric.is_counter else "gauge"
                lines = families[f"# TYPE {name} {kind}"]
                lines.append(f"{name}{suffix}{{{labels}}} {sample.value} {cursor_ns / 1e9:.3f}")
    path.write_text("".join(f"{head}\n" + "\n".join(lines) + "\n" for head, lines in families.items()) + "# EOF\n")
    return times[0] / 1e9, times[-1] / 1e9


def ask(port: int, query: str, begin_s: float, end_s: float) -> list[Any]:
    """Return the series that answer a query."""
    query = query.replace("$__rate_interval", RATE).replace("$job", ".*")
    words = urllib.parse.urlencode({"query": query, "start": begin_s, "end": end_s, "step": STEP_S})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query_range?{words}", timeout=10) as answer:
        return list(json.load(answer)["data"]["result"])


def draw(panels: list[dict[str, Any]], port: int, begin_s: float, end_s: float) -> None:
    """Draw the panels where the dashboard has them."""
    from matplotlib import pyplot

    matplotlib.rcParams.update({"font.size": 8, "text.color": "#ccccdc", "axes.edgecolor": "#2c3235"})
    figure = pyplot.figure(figsize=(14, 13), facecolor="#111217")
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    for panel in panels:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - place["y"] / height * 0.96 - 0.03
        tall = place["h"] / height * 0.96
        axes = figure.add_axes((left + 0.035, top - tall + 0.02, place["w"] / 24 - 0.045, tall - 0.045), facecolor="#181b1f")
        axes.set_title(panel["title"], loc="left", fontsize=9, fontweight="bold")
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        scale, unit = UNITS.get(defaults.get("unit", ""), (1, ""))
        found = [(target, one) for target in panel["targets"] for one in ask(port, target["expr"], begin_s, end_s)]
        for number, (target, one) in enumerate(found):
            at, values = np.array(one["values"], float).T
            labels = one["metric"]
            legend = re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], "")[:8], target.get("legendFormat", ""))  # noqa: B023
            if panel["type"] == "stat":
                shown = f"{values[-1] / scale:,.4g}{unit}"
                share = (number + 1) / (len(found) + 1)
                axes.text(share, 0.5, shown, ha="center", va="center", fontsize=20, color=COLOURS[0])
                axes.text(share, 0.1, legend, ha="center", fontsize=7)
            else:
                axes.plot(at - begin_s, values / scale, color=COLOURS[number % len(COLOURS)], lw=1.2, label=legend)
        if not found:
            axes.text(0.5, 0.5, "No data: DCGM's exporter was not there", ha="center", va="center", transform=axes.transAxes)
        if panel["type"] == "stat" or not found:
            axes.set_xticks([])
            axes.set_yticks([])
        else:
            axes.tick_params(colors="#8e8e99", length=0)
            axes.grid(color="#2c3235", lw=0.5)
            axes.yaxis.set_major_formatter(f"{{x:g}}{unit}")
            axes.xaxis.set_major_formatter("{x:g} s")
            axes.set_xlim(0, math.ceil(end_s - begin_s))
            axes.legend(
                fontsize=6, ncols=3, framealpha=0.8, facecolor="#181b1f", edgecolor="none", labelcolor="#ccccdc", loc="best"
            )
    words = "The queries of docs/grafana-dashboard.json, answered by Prometheus and drawn by matplotlib: this is not Grafana"
    figure.text(0.035, 0.985, words, fontsize=9, color="#8e8e99")
    figure.savefig(HERE / "dashboard.png", dpi=90, facecolor=figure.get_facecolor())


def main() -> None:
    """Import the metrics, start Prometheus, and draw."""
    panels = json.loads((HERE / "grafana-dashboard.json").read_text())["panels"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin_s, end_s = write_metrics(folder / "metrics")
        importing = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "metrics"), str(folder / "data")]
        subprocess.run(importing, check=True, stdout=subprocess.DEVNULL)
        (folder / "prometheus.yml").write_text("")
        port = find_free_port()
        where = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        more = [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=50y"]
        server = subprocess.Popen(["prometheus", *where, *more], stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                try:
                    if ask(port, "up or vector(1)", begin_s, end_s):
                        break
                except OSError:
                    time.sleep(0.2)
            draw(panels, port, begin_s, end_s)
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
