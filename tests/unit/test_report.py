"""``zerotop report``: verdicts, costs of findings, and the page as a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import long_recording
import recordings
import sweep_progress
import zerotop
from memory_recording import PlantedRecording, make_process_sample
from zerotop.analysis.prices import HourlyPrice
from zerotop.analysis.reports.recording_report import RecordingReport, read_recording_report
from zerotop.analysis.reports.verdict import Outcome, describe_memory
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.demo import RECORDING_PATH
from zerotop.recording.reader import Recording, RecordingError
from zerotop.recording.sweeps import write_sweep
from zerotop.report.charts import build_charts
from zerotop.report.recording_page import write_recording_page
from zerotop_probe.recording import directory, tables


@cache
def read_report(name: str) -> RecordingReport:
    return read_recording_report(recordings.open_recording(name), HourlyPrice(30))


class _Reader(HTMLParser):
    """Collects tags, addresses and texts, and checks that elements are closed in order."""

    _VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag not in self._VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data + "\n"


def parse_page(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    assert not reader.open
    return reader


@pytest.mark.parametrize(
    ("name", "outcome", "headline"),
    [
        ("cpu-clean", Outcome.GOOD, "Finished 40 steps in 39 s."),
        ("story", Outcome.WARNING, "Finished 14 steps in 75 s."),
        (
            "z2-oom",
            Outcome.FAILED,
            "Rank 0 ran out of GPU memory in the forward of the evaluation before step 4, after 4 steps",
        ),
        ("cpu-dead", Outcome.FAILED, "was killed by SIGKILL"),
        ("x4-attached", Outcome.OPEN, "Ended after 26 steps in 84 s; the exit code is not known."),
    ],
)
def test_the_verdict_says_first_how_the_job_ended(name: str, outcome: Outcome, headline: str) -> None:
    verdict = read_report(name).verdict
    assert verdict.outcome is outcome
    assert headline in verdict.headline


def test_a_hang_comes_before_the_advice_on_the_signal_that_ended_it() -> None:
    first, _, advice, *_ = read_report("x2-hang-collectives").verdict.sentences
    assert first == "Before, in step 27: No progress for 34 s: rank 1 called barrier where rank 0 called all_reduce."
    assert advice.startswith("What to do: Usually a scheduler's time limit")


def test_the_verdict_names_pace_memory_costs_and_the_price() -> None:
    pace, memory, cost, price = read_report("story").verdict.sentences
    assert pace == (
        "An iteration takes 2.68 s (median without 10 skipped), the slowest 4.53 s in step 10;"
        " 1,305 tokens per second on average."
    )
    assert memory == "GPU memory peaked at 38.25 GiB of 140 GiB (27 %) reserved on GPU 0."
    assert cost == (
        "What cost most: Iterations take 2.68 s, not 882 ms, since fp16 stopped skipping"
        " (about 11 s in skipped steps, 44 % of the training time, 0.01 GPU hours ($0.0881))."
    )
    assert price == "The job cost $0.63 at $30.00 an hour."
    assert read_report("cpu-clean").verdict.sentences[2] == "No finding has a cost in time or memory."


def test_findings_are_ranked_by_what_they_cost() -> None:
    ranked = read_report("cpu-hang").findings
    assert ranked[0].finding.name == "hung_ranks"
    assert ranked[0].seconds == pytest.approx(45, abs=1)  # the iteration in which the job hung
    stalled = next(cost for cost in read_report("cpu-stall").findings if cost.finding.name == "data_stall")
    rows = read_report("cpu-stall").source.job_steps
    waited_s = float(rows["data_s"][rows["step"] >= (stalled.finding.step or 0)].sum())
    assert stalled.seconds == pytest.approx(waited_s, rel=0.25)
    assert stalled.bytes is None


def test_one_event_is_listed_once() -> None:
    names = [cost.finding.name for cost in read_report("cpu-straggler").findings]
    assert "straggler" in names
    assert "iteration_shift" not in names  # the straggler is why iterations are slower
    leak = [cost for cost in read_report("gpu-leak").findings if cost.finding.name == "memory_creep"]
    assert len(leak) == 1
    assert leak[0].bytes
    assert not leak[0].on_host


@pytest.mark.parametrize("name", ["story", "z2-oom", "cpu-hang", "gpu-microscope", "x4-attached", "held-restart"])
def test_pages_are_well_formed_and_need_no_network(name: str) -> None:
    report = read_report(name)
    page = write_recording_page(report)
    parsed = parse_page(page)
    assert parsed.addresses == []
    assert "default-src 'none'" in page
    assert "url(" not in page.replace("&quot;", "")
    assert parsed.text.index(report.verdict.headline) < 120
    assert all(text in parsed.text for cost in report.findings for text in (cost.finding.advice, cost.finding.fix))
    data = json.loads(re.findall(r'id="charts-data">(.*?)</script>', page, re.DOTALL)[0])
    assert {chart["id"] for chart in data["charts"]} >= {"iterations", "cores"}
    assert len(page) < 2 * 10**6


def test_names_from_a_recording_cannot_write_the_page() -> None:
    reordering = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    evil = f"</script><script>alert(1)</script>\x1b[31m\x00{reordering}"

    def insert_markup(event: dict[str, object]) -> object:
        return event | ({"model": evil, "config": {evil: evil}} if event.get("event") == "engine" else {})

    recording = recordings.rewrite_events("gpu-clean", insert_markup)
    recording.name = evil
    page = write_recording_page(read_recording_report(recording))
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert "\x00" not in page
    assert not set(reordering) & set(page)
    assert "\\u202e\\u2066" in page
    (charts,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page)
    assert not set(reordering) & set(json.dumps(json.loads(charts), ensure_ascii=False))
    parse_page(page)


def test_long_recordings_are_drawn_in_pieces_without_losing_a_spike(tmp_path: Path) -> None:
    def slow_down(seconds: np.ndarray, rank: int) -> None:
        seconds[3000, 1] = 9.0

    path = long_recording.write_recording(tmp_path / "long", 4000, long_recording.Trouble(paces=slow_down))
    report = read_recording_report(Recording.open(path))
    chart = next(chart for chart in build_charts(report)["charts"] if chart["id"] == "iterations")
    assert len(chart["x"]) == len(chart["steps"]) == 1501
    longest = next(series for series in chart["series"] if series["name"] == "longest")
    assert max(longest["values"]) == pytest.approx(9.2, abs=0.1)
    assert len(write_recording_page(report)) < 10**6


def test_a_recording_without_steps_has_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory.create_recording(["python", "train.py"], path=str(tmp_path / "empty"))
    assert main(["report", str(tmp_path / "empty"), "-o", str(tmp_path / "empty.html")]) == 0
    text = parse_page((tmp_path / "empty.html").read_text()).text
    assert "before the first step" in text
    assert "there is no iteration time" in text
    assert main(["report", str(tmp_path / "empty"), "--chart", "iterations", "-o", str(tmp_path / "empty.png")]) == 1
    assert "has nothing to draw" in capfd.readouterr().err


def test_a_job_without_ranks_has_a_peak(tmp_path: Path) -> None:
    """As a program that only infers, which is sampled but reports nothing."""
    recording = PlantedRecording(tmp_path)
    recording.write_records(tables.PROCESSES, recording.node, [make_process_sample(at, 9, 1.5, rank=-1) for at in (1, 2)])
    (sentence,) = describe_memory(RecordingSource(recording.open_recording()).view_at(None))
    assert sentence == "Host memory peaked at 1.50 GiB; no GPU was recorded."


def test_a_gpu_whose_allocator_was_not_read_was_recorded() -> None:
    view = RecordingSource(recordings.open_recording("x2-fsdp2")).view_at(None)
    unread = [replace(gpu, reserved_peak_bytes=None, process_bytes=None) for gpu in view.gpus]
    (sentence,) = describe_memory(replace(view, gpus=tuple(unread)))
    assert sentence.endswith("; no rank recorded PyTorch's allocator on a GPU.")
    unread[0] = replace(unread[0], process_bytes=9 << 28)
    (sentence,) = describe_memory(replace(view, gpus=tuple(unread)))
    assert sentence.endswith(f"; the job used GPU {unread[0].index}, but no rank recorded PyTorch's allocator there.")


def test_a_chart_as_png(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    story = str(recordings.find_packed_file("story"))
    for name in ("iterations", "gpu-memory"):
        assert main(["report", story, "--chart", name, "-o", str(tmp_path / f"{name}.png")]) == 0
        assert (tmp_path / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main(["report", story, "--chart", "nothing", "-o", str(tmp_path / "chart.png")]) == 2
    assert "Choose one of: iterations, tokens, gpu-memory" in capfd.readouterr().err
    assert main(["report", story, "--chart", "cores", "-o", "x.html", "--format", "html"]) == 2


def test_prices_that_are_none_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "story", "--price-per-hour", "cheap"]) == 2
    assert "cheap is not a price per hour such as 30" in capfd.readouterr().err


def test_a_recording_in_a_notebook_has_tables_and_a_page() -> None:
    recording = zerotop.open_recording(str(recordings.find_packed_file("gpu-clean")), price_per_hour=30)
    shown = recording._repr_html_()
    assert shown.startswith("<iframe ")
    assert "at $30.00 an hour" in shown
    assert parse_page(shown).text == ""  # one frame, whose page is an attribute
    steps = recording.table()["step"].to_list()
    assert sorted(set(steps)) == list(range(max(steps) + 1))
    with pytest.raises(ValueError, match="Choose one of: steps"):
        recording.table("nothing")
    with pytest.raises(RecordingError, match="nowhere"):
        zerotop.open_recording("nowhere")


@pytest.fixture
def make_sweep_folder(tmp_path: Path) -> Callable[[int], Path]:
    """Write the folder of a sweep of 16 points, so many of which have run."""

    def write_folder(done: int) -> Path:
        path = tmp_path / f"sweep-{done}"
        path.mkdir()
        write_sweep(replace(sweep_progress.make_sweep(done), path=path))
        return path

    return write_folder


def test_a_sweep_has_a_page_with_its_verdict_charts_and_points(
    make_sweep_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    page = tmp_path / "sweep.html"
    assert main(["report", str(make_sweep_folder(16)), "-o", str(page)]) == 0
    text = page.read_text()
    parsed = parse_page(text)
    assert parsed.addresses == []
    assert parsed.text.index("15 of 16 points trained; 1 ran out of memory.") < 120
    fastest = "The fastest is allocator expandable_segments:True, seq-length 4096: 25,430 tokens per second"
    assert f"{fastest} (22,887 to 26,701 in single iterations)." in parsed.text
    assert "is flat at 9.30 GiB up to 1,900 tokens a micro-batch. Beyond, it is 3.0 MiB a token on top of" in parsed.text
    assert "at $30.00 an hour." in parsed.text
    assert f"Point 7: {sweep_progress.REASON}" in parsed.text
    charts = json.loads(re.findall(r'id="charts-data">(.*?)</script>', text, re.DOTALL)[0])["charts"]
    assert [chart["title"] for chart in charts] == [
        "Peak allocated",
        "Peak reserved",
        "Iterations per second",
        "Tokens per second",
    ]
    assert charts[0]["x"] == sweep_progress.LENGTHS
    default, expandable = charts[1]["series"]
    assert (default["values"][-1], default["failed"]) == (None, [4096])
    assert expandable["values"][0] == pytest.approx(9.3 * 1.03, rel=1e-3)


def test_a_chart_of_a_sweep_as_png(
    make_sweep_folder: Callable[[int], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep, picture = str(make_sweep_folder(16)), tmp_path / "chart.png"
    pictures = set()
    for name in ((), ("--chart", "reserved-peak-bytes"), ("--chart", "tokens-per-s")):
        assert main(["report", sweep, "--format", "png", *name, "--force", "-o", str(picture)]) == 0
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        pictures.add(picture.read_bytes())
    assert len(pictures) == 3
    assert main(["report", sweep, "--chart", "iterations", "-o", str(picture)]) == 2
    assert "Choose one of: allocated-peak-bytes, reserved-peak-bytes, iterations-per-s" in capfd.readouterr().err


def test_a_search_s_page_says_first_what_fits(tmp_path: Path) -> None:
    """Its axis has only the values that were tried."""
    page = tmp_path / "fit.html"
    folder = Path(__file__).parents[2] / "docs" / "sweeps"
    assert main(["report", str(folder / "fit"), "-o", str(page)]) == 0
    text = parse_page(page.read_text()).text
    assert "ran out of memory. offload none: seq-length 4,608 fits and 4,864 does not." in " ".join(text.split())
    assert "offload optimizer: seq-length 6,400 fits and 6,656 does not." in text
    chart = json.loads(re.findall(r'id="charts-data">(.*?)</script>', page.read_text(), re.DOTALL)[0])["charts"][0]
    assert chart["x"] == [3328, 4096, 4608, 4864, 5120, 6400, 6656, 6912, 14080]
    assert main(["report", str(folder / "stages"), "-o", str(page)]) == 1  # nothing is replaced without a word
    assert parse_page(page.read_text()).text == text
    assert main(["report", str(folder / "stages"), "--force", "-o", str(page)]) == 0
    assert "9 of 16 points trained; 7 were left out." in parse_page(page.read_text()).text


def test_a_sweep_that_has_not_finished_or_begun_says_so(
    make_sweep_folder: Callable[[int], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "sweep.html"
    assert main(["report", str(make_sweep_folder(5)), "-o", str(page), "--price-per-hour", "60EUR"]) == 0
    assert "5 of 16 points trained; 11 have not run yet." in parse_page(page.read_text()).text
    assert "60.00 EUR an hour" in page.read_text()
    assert main(["report", str(make_sweep_folder(0)), "--force", "-o", str(page)]) == 0
    assert "None of 16 points has run yet." in parse_page(page.read_text()).text
    assert main(["report", str(tmp_path / "sweep-0"), "--format", "png"]) == 1
    assert "sweep-0 has nothing to draw: no point was measured" in capfd.readouterr().err
    (tmp_path / "sweep-5" / "sweep.json").write_text("{")
    assert main(["report", str(tmp_path / "sweep-5"), "-o", str(page)]) == 1
    assert "sweep.json is damaged" in capfd.readouterr().err


def test_a_page_is_not_named_like_another_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report.pdf"
    assert main(["report", str(RECORDING_PATH), "-o", str(output)]) == 2
    assert "A report is HTML or PNG, not PDF: name another file, or add --format html" in capsys.readouterr().err
    assert not output.exists()
    assert main(["report", str(RECORDING_PATH), "--format", "html", "-o", str(output)]) == 0
    assert output.read_bytes().startswith(b"<!DOCTYPE html>")
