"""``zerotop run --report`` and ``--price-per-hour`` on a real job, and the price on the screens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import recordings
from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.ui.base.bars.header import draw_header
from zerotop.ui.drawing.glyphs import choose_glyphs
from zerotop.ui.drawing.rows import row_text

JOB = "import sys, time; print('working'); time.sleep(0.3); sys.exit(int(sys.argv[1]))"


def run_job(folder: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zerotop", "run", "--headless", "--recording", str(folder / "recording"), *options]
    return subprocess.run(
        [*command, "--", sys.executable, "-c", JOB, str(code)], capture_output=True, text=True, cwd=folder, check=False
    )


def test_a_report_is_written_when_the_job_ends(tmp_path: Path) -> None:
    ended = run_job(tmp_path, "--report", "report.html", "--price-per-hour", "30 EUR", code=3)
    assert ended.returncode == 3
    assert ended.stdout == "working\n"
    assert "report.html: " in ended.stderr
    assert "zerotop: The job cost 0.0" in ended.stderr
    page = (tmp_path / "report.html").read_text()
    assert "The job failed with exit code 3, after " in page
    assert "before the first step." in page
    assert "EUR at 30.00 EUR an hour." in page
    assert json.loads((tmp_path / "recording" / "session.json").read_text())["price_per_hour"] == "30 EUR"


def test_a_place_where_no_report_can_be_written_is_refused_before_the_job(tmp_path: Path) -> None:
    for place, reason in (
        (str(tmp_path), "is a folder"),
        ("missing/report.html", "there is no folder"),
        ("report.pdf", "not PDF"),
    ):
        refused = run_job(tmp_path, "--report", place)
        assert refused.returncode == 2
        assert reason in refused.stderr
        assert refused.stdout == ""
        assert not (tmp_path / "recording").exists()


def test_the_header_shows_what_the_job_has_cost_so_far() -> None:
    recording = recordings.open_recording("story")
    source = RecordingSource(recording, price=HourlyPrice.parse("$30"))
    glyphs = choose_glyphs({}, "utf-8")

    def draw_job_line(cursor_ns: int | None) -> str:
        return row_text(draw_header(source.view_at(cursor_ns), (), 120, 2, glyphs)[1])

    assert "cost $0.63" in draw_job_line(None)
    assert "cost $0.50" in draw_job_line(recording.begin_ns + 60 * 10**9)
    assert "cost" not in row_text(draw_header(RecordingSource(recording).view_at(None), (), 120, 2, glyphs)[1])
