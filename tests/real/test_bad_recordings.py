"""Recordings that are missing, of another kind, damaged, cut off anywhere, or on a disk that cannot be written to."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import recordings
from agents import read_table_file, wait_for
from machine import make_read_only, small_disk
from programs import run_zerotop
from zerotop.analysis.reports.export_tables import TABLES
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.recording.headers import RecordingError
from zerotop.recording.reader import Recording

GROWING = Path(__file__).parent.parent / "support" / "growing_recording.py"


@pytest.fixture(scope="module")
def small_recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short recording with something in every file, whose writer was killed."""
    recording = tmp_path_factory.mktemp("small") / "recording"
    command = [sys.executable, str(GROWING), str(recording), "--ranks", "1", "--hertz", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as writer:
        wait_for(lambda: rows_of_each(recording).get("probe") and all(rows_of_each(recording).values()))
        assert writer.poll() is None
        writer.kill()
    return recording


def rows_of_each(recording: Path) -> dict[str, int]:
    """Return the number of records of each table."""
    begun = [path for path in recording.glob("*.rec") if path.stat().st_size]
    return {path.name.partition("-")[0]: len(read_table_file(path)) for path in begun}


def make_newer(recording: Path) -> None:
    path = recording / "session.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"zerotop": [2, 0]}))


def replace_by_file(recording: Path) -> None:
    shutil.rmtree(recording)
    recording.write_text("hello")


def remove_files(recording: Path) -> None:
    shutil.rmtree(recording)
    recording.mkdir()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (shutil.rmtree, "There is no recording"),
    "a file": (replace_by_file, "is not a recording"),
    "empty": (remove_files, "holds no recording: it has no session.json"),
    "of a newer format": (make_newer, "has recording format 2, this zerotop reads up to 1: use a newer zerotop"),
    "no JSON": (
        lambda path: (path / "session.json").write_text("{"),
        "is damaged, or not of zerotop",
    ),
    "other JSON": (
        lambda path: (path / "session.json").write_text("[1]"),
        "is damaged, or not of zerotop",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", ["replay", "export", "attach"])
def test_a_recording_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, small_recording: Path, capfd: pytest.CaptureFixture[str], command: str, kind: str
) -> None:
    recording = Path(shutil.copytree(small_recording, tmp_path / "recording"))
    damage, sentence = BROKEN[kind]
    damage(recording)
    assert main([command, str(recording)]) == 1
    said, errors = capfd.readouterr()
    assert said == ""
    assert sentence in errors
    assert errors.count("\n") == 1


def test_recordings_lists_what_it_cannot_read_with_the_reason(
    tmp_path: Path, small_recording: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "zerotop" / "sessions"
    make_newer(Path(shutil.copytree(small_recording, folder / "of-tomorrow")))
    (folder / "not-a-recording").mkdir()
    assert main(["recordings"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert line.startswith("of-tomorrow  unreadable  ?")
    assert line.endswith("session.json has recording format 2, this zerotop reads up to 1: use a newer zerotop.")


def build_views(recording: Path) -> None:
    """Build the views of a recording as the screens do, without drawing them."""
    source = RecordingSource(Recording.open(recording))
    for cursor in (None, source.begin_ns, source.begin_ns + 1_500_000_000):
        source.view_at(cursor)


def print_of(recording: Path, table: str) -> None:
    """Run the commands on a recording."""
    assert main(["export", str(recording), "--table", "steps"]) == 0
    assert main(["export", str(recording), "--table", table if table in TABLES else "gpus"]) == 0
    assert main(["recordings"]) == 0


def test_cut_off_anywhere(
    tmp_path: Path, small_recording: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """session.json at every byte; every other file at every byte of its last record or line, and here and there before."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    recording = Path(shutil.copytree(small_recording, tmp_path / "zerotop" / "sessions" / "cut"))
    for path in sorted(recording.iterdir()):
        data = path.read_bytes()
        whole = path.name == "session.json"
        for length in {*range(0, len(data), 1 if whole else 173), *range(max(0, len(data) - 48), len(data))}:
            path.write_bytes(data[:length])
            if whole and length < len(data) - 1:
                with pytest.raises(RecordingError, match="is damaged"):
                    Recording.open(recording)
                if length % 16 == 0:
                    assert main(["export", str(recording)]) == 1
                    assert "is damaged" in capfd.readouterr().err
            else:
                build_views(recording)
                if length % 16 == 0:
                    print_of(recording, path.name.split("-")[0])
        path.write_bytes(data)
        capfd.readouterr()


def test_cut_off_everywhere_at_once(
    tmp_path: Path, small_recording: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    chance = random.Random(1)
    recording = Path(shutil.copytree(small_recording, tmp_path / "zerotop" / "sessions" / "cut"))
    for _ in range(40):
        for path in small_recording.iterdir():
            data = path.read_bytes()
            if path.name != "session.json":
                (recording / path.name).write_bytes(data[: chance.randrange(len(data) + 1)])
        build_views(recording)
        print_of(recording, "events")
        capfd.readouterr()


def test_a_recording_on_a_read_only_disk_is_read(tmp_path: Path) -> None:
    """One that is over: the small one's writer may have been there until just now."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        folder = disk / "zerotop" / "sessions"
        folder.mkdir(parents=True)
        recording = recordings.unpack_to_folder("cpu-clean", folder)
        make_read_only(disk)
        assert run_zerotop(disk, "export", str(recording)).stdout.startswith(b"rank,step,")
        assert run_zerotop(disk, "recordings").stdout.startswith(b"cpu-clean  exit 0")
