"""Metrics for Prometheus: read back by its own parser, in a file, from a port, and in the dashboard."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import recordings
from free_ports import find_free_port
from programs import ZEROTOP, make_environment, run_zerotop
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.commands.publishing.job_metrics import read_job_metrics
from zerotop.commands.publishing.prometheus import PrometheusFile, PrometheusPort

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
JOB = ["run", "--headless"]
WORK = [sys.executable, "-c", "import time; print('working'); time.sleep(3)"]


def parse(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


@pytest.fixture
def story(tmp_path: Path) -> dict[str, Metric]:
    file = PrometheusFile(tmp_path, pytest.fail)
    file.update(recordings.open_searched("story"))
    assert file.path is not None
    return parse(file.path.read_text())


def test_the_values_are_those_of_the_recording(story: dict[str, Metric]) -> None:
    run = RecordedRun(recordings.open_recording("story"))
    assert story["zerotop_steps"].type == "counter"
    assert story["zerotop_steps"].samples[0].name == "zerotop_steps_total"
    assert story["zerotop_steps"].samples[0].value == 14
    assert story["zerotop_job_running"].samples[0].value == 0
    phases = {one.labels["phase"]: one.value for one in story["zerotop_phase_seconds"].samples}
    assert sum(phases.values()) == pytest.approx(float(run.view.iterations.iteration_s.sum()))
    gpus = {one.labels["UUID"]: one for one in story["zerotop_gpu_reserved_peak_bytes"].samples}
    assert len(gpus) == 4
    assert all(uuid.startswith("GPU-") and one.labels["Hostname"] == "vm" for uuid, one in gpus.items())
    assert max(one.value for one in gpus.values()) == max(gpu.reserved_peak_bytes or 0 for gpu in run.view.gpus)
    assert [one.labels["UUID"] in gpus for one in story["zerotop_rank_alive"].samples] == [True] * 4
    found = {one.labels["finding"]: one.value for one in story["zerotop_findings"].samples}
    assert found["double_spike"] == 1


def test_names_have_base_units_and_nothing_of_a_device_is_repeated(story: dict[str, Metric]) -> None:
    for name, family in story.items():
        assert re.fullmatch(r"zerotop_[a-z_]+", name)
        assert not re.search(r"_(ms|ns|us|mb|gib|percent|utilization|power|temperature)(_|$)", name)
        assert family.documentation.endswith(".") or '"' in family.documentation
        assert all(one.labels["job"] == "story" for one in family.samples)
    assert {name for name, family in story.items() if family.type == "counter"} == {
        f"zerotop_{name}" for name in ("steps", "skipped_steps", "tokens", "findings", "phase_seconds")
    }


def test_the_dashboard_asks_for_metrics_and_labels_that_exist(story: dict[str, Metric]) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    names = {one.name: one.labels for family in story.values() for one in family.samples}
    names |= {f"zerotop_gpu_{kind}_bytes": names["zerotop_gpu_reserved_peak_bytes"] for kind in ("allocated", "reserved")}
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        for target in panel["targets"]:
            asked = re.findall(r"zerotop_\w+", target["expr"])
            assert asked
            assert set(asked) <= set(names), target["expr"]
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert legend <= set(names[asked[0]]), target["legendFormat"]
    (variable,) = (one for one in dashboard["templating"]["list"] if one["name"] == "job")
    assert re.findall(r"zerotop_\w+", variable["definition"])[0] in names


def test_recordings_without_steps_gpus_or_ranks_have_what_is_known(tmp_path: Path) -> None:
    for name in ("cpu-dead", "cpu-hang", "x4-attached", "z2-oom"):
        source, file = recordings.open_searched(name), PrometheusFile(tmp_path, pytest.fail)
        file.update(source)
        assert file.path is not None
        families = parse(file.path.read_text())
        assert families["zerotop_job_running"].samples
        assert all(one.value == one.value for family in families.values() for one in family.samples)  # no NaN
        file.finish(source)
        assert not file.path.exists()


def test_a_process_without_a_number_is_not_called_rank_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source = recordings.open_searched("story")
    view = source.view_at(source.begin_ns + 3 * 10**9)  # only the launcher is there
    monkeypatch.setattr(source, "view_at", lambda _: view)
    (alive,) = (metric for metric in read_job_metrics(source) if metric.name == "zerotop_rank_alive")
    assert [one.labels["rank"] for one in alive.samples] == [""]


def test_a_folder_that_is_lost_is_a_sentence(tmp_path: Path) -> None:
    told: list[str] = []
    file = PrometheusFile(tmp_path / "gone", told.append)
    file.update(recordings.open_searched("cpu-clean"))
    assert len(told) == 1
    assert "could not be written to" in told[0]


def test_a_port_answers_and_a_taken_one_is_a_sentence() -> None:
    port = PrometheusPort("127.0.0.1", find_free_port(), pytest.fail)
    port.update(recordings.open_searched("story"))
    with urllib.request.urlopen(f"http://127.0.0.1:{port.port}/metrics", timeout=5) as answer:
        assert parse(answer.read().decode())["zerotop_steps"].samples[0].value == 14
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert PrometheusPort("127.0.0.1", number, told.append).port == 0
    assert told == [f"Prometheus cannot ask on 127.0.0.1:{number}: Address already in use"]


def test_a_job_has_its_file_while_it_runs(tmp_path: Path) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    command = [*ZEROTOP, *JOB, "--recording", str(tmp_path / "mine"), "--prometheus-textfile", str(folder), "--", *WORK]
    job = subprocess.Popen(command, env=make_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline_s, path = time.monotonic() + 30, folder / "zerotop-mine.prom"
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert parse(path.read_text())["zerotop_job_running"].samples[0].value == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    output, said = job.communicate(timeout=60)
    assert (job.returncode, output) == (0, b"working\n")
    assert list(folder.iterdir()) == []
    assert b"metrics" not in said


def test_settings_that_cannot_work_are_refused_before_the_job(tmp_path: Path) -> None:
    assert b"there is no folder" in refuse(tmp_path, "--prometheus-textfile", str(tmp_path / "none"))
    assert b"is not a port" in refuse(tmp_path, "--prometheus-port", "localhost")
    assert b"is not a port" in refuse(tmp_path, "--prometheus-port", "99999")
    if os.geteuid():
        assert b"nothing can be written" in refuse(tmp_path, "--prometheus-textfile", "/")


def refuse(folder: Path, *options: str) -> bytes:
    refused = run_zerotop(folder, *JOB, *options, "--", *WORK)
    assert (refused.returncode, refused.stdout) == (2, b"")
    stderr: bytes = refused.stderr
    return stderr


def test_a_missing_package_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from zerotop.cli import main

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["run", "--headless", "--prometheus-textfile", str(tmp_path), "--", *WORK]) == 2
    assert "pip install 'zerotop[prometheus]'" in capfd.readouterr().err
