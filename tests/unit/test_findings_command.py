"""``zerotop findings``, the exported table, and loading detectors."""

import importlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import polars
import pytest

import recordings
from zerotop import cli
from zerotop.analysis import findings as package
from zerotop.recording.reader import Recording


def test_the_list_has_all_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recordings.unpack_to_folder("story", tmp_path)
    assert cli.main(["findings", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 11 (detected at 1:05)  double_spike  (warning)" in lines
    at = lines.index("step 11 (detected at 1:05)  double_spike  (warning)")
    assert lines[at + 1] == "    GPUs idle 64 % of each iteration while the CPU runs the optimizer"
    assert lines[at + 2].startswith("    In steps 11 to 13 the optimizer takes 1.80 s of 2.67 s, in 4 processes x 59")
    assert "    Cost: about 5.14 s, 22 % of the training time." in lines[at:]
    assert any(line.startswith("    -> Keep the optimizer on the GPU: ") for line in lines[at:])
    assert '       "offload_optimizer": {"device": "none"}' in lines[at:]
    assert max(len(line) for line in lines) <= 100


def test_a_finding_has_its_cost_in_hours_and_money(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recordings.unpack_to_folder("story", tmp_path)
    info = path / "session.json"
    info.write_text(json.dumps({**json.loads(info.read_text()), "price_per_hour": "$300"}))
    assert cli.main(["findings", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    # 10.6 s of four GPUs are 0.0118 hours; of the whole job, 10.6 / 3600 of $300.
    assert "Cost: about 11 s in skipped steps, 44 % of the training time, 0.01 GPU hours ($0.88)." in text


def test_json_has_the_same_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recordings.unpack_to_folder("z2-oom", tmp_path)
    assert cli.main(["findings", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    recording = Recording.open(path)
    findings = package.detect_findings(recording, recording.end_ns)
    assert [(one["name"], one["known_ns"], one["headline"]) for one in rows] == [
        (finding.name, finding.known_ns, finding.headline) for finding in findings
    ]
    assert rows[-1]["severity"] == "error"
    assert rows[-1]["evidence"]["requested_bytes"] == 99_572_776_960


def test_with_fix_only_lines_to_paste_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recordings.unpack_to_folder("story", tmp_path)
    assert cli.main(["findings", str(path), "--fix"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# Iterations take 2.68 s, not 882 ms, since fp16 stopped skipping"
    place = lines.index("# GPUs idle 64 % of each iteration while the CPU runs the optimizer")
    assert lines[place + 1] == '"offload_optimizer": {"device": "none"}'
    fixes = [line for line in lines if not line.startswith("# ")]
    assert len(fixes) == len(set(fixes)) == len(lines) - len(fixes)


def test_a_line_to_look_at_is_nothing_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recordings.unpack_to_folder("hand-rank0", tmp_path)
    assert cli.main(["findings", str(path)]) == 0
    assert re.search(r"^ +\w+\.py:\d+$", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["findings", str(path), "--fix"]) == 0
    printed = capsys.readouterr().out
    assert not re.search(r"^[^#].*\.py:\d+$", printed, re.MULTILINE)
    assert re.search(r"^# A 244 ms pause .*\n# See plants3\.py:66$", printed, re.MULTILINE)


def test_a_recording_without_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recordings.unpack_to_folder("cpu-clean", tmp_path)
    for table in path.glob("*rank*"):
        table.unlink()
    assert cli.main(["findings", str(path)]) == 0
    assert capsys.readouterr().out == "No findings: no finished step was recorded.\n"


def test_a_missing_recording_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["findings", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("zerotop: ")


def test_the_exported_table(tmp_path: Path) -> None:
    path, output = recordings.unpack_to_folder("story", tmp_path), tmp_path / "findings.csv"
    assert cli.main(["export", str(path), "--table", "findings", "-o", str(output)]) == 0
    frame = polars.read_csv(output)
    recording = Recording.open(path)
    findings = package.detect_findings(recording, recording.end_ns)
    assert frame["finding"].to_list() == [finding.name for finding in findings]
    assert frame["headline"].to_list() == [finding.headline for finding in findings]
    assert json.loads(frame["evidence"][-1]).keys() == findings[-1].evidence.keys()


def test_a_detector_is_loaded_by_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(package.load_detectors())
    assert {"double_spike", "validation_jump", "first_real_step", "out_of_memory"} <= before
    (tmp_path / "made_up_detector.py").write_text("def detect(facts):\n    return []\n")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    assert set(package.load_detectors()) == before | {"made_up_detector"}
    shutil.rmtree(tmp_path)


def test_a_record_whose_time_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recordings.unpack_to_folder("gpu-others", tmp_path)
    (path,) = folder.glob("allocator-rank0-*")
    content = path.read_bytes()
    head = content[: content.index(b"\n") + 1]
    fields = [tuple(field) for field in json.loads(head)["dtype"]]
    records = np.frombuffer(content, np.dtype(fields), offset=len(head)).copy()
    records["time_ns"][len(records) // 2] = 2**62
    path.write_bytes(head + records.tobytes())
    assert cli.main(["findings", str(folder)]) == 0
    assert capsys.readouterr().err == "zerotop: 1 damaged record was skipped.\n"
