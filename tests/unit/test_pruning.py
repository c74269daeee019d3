"""``zerotop recordings --prune``: what it deletes, what it never deletes, and what it says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from zerotop.cli import main
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import directory, events
from zerotop_probe.recording.writer import EventWriter, Identity

DAY_S = 86400


@pytest.fixture
def recording_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's recordings: ended ones that are 1, 10 and 40 days old, and an old one whose job runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, days in (("new", 1), ("older", 10), ("oldest", 40), ("running", 50)):
        clock = {"monotonic_ns": 0, "unix_ns": time.time_ns() - days * DAY_S * 10**9}
        path = Path(directory.create_recording(["python"], path=str(tmp_path / "zerotop" / "sessions" / name), clock=clock))
        (path / "output-node-x-1.log").write_bytes(bytes(1_000_000))
        if name == "running":
            own = ProcessHandle.from_pid(os.getpid())
            assert own is not None
            writer = EventWriter(str(path), Identity.for_this_process("control"))
            writer.write(time.monotonic_ns(), events.JobStarted, pid=own.pid, start=own.start)
            writer.close()
        for file in [*path.iterdir(), path]:
            os.utime(file, (time.time() - days * DAY_S,) * 2)
    return tmp_path / "zerotop" / "sessions"


def list_names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def prune_recordings(*options: str) -> int:
    return main(["recordings", "--prune", *options])


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--older-than", "30d"], {"new", "older", "running"}),
        (["--older-than", "1w"], {"new", "running"}),
        (["--total-size", "3.1MB"], {"new", "older", "running"}),
        (["--total-size", "10k"], {"running"}),
        (["--ended"], {"running"}),
        (["--older-than", "60d"], {"new", "older", "oldest", "running"}),
    ],
)
def test_pruning_deletes_what_the_dry_run_lists(
    recording_root: Path, options: list[str], left: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    everything = list_names(recording_root)
    assert prune_recordings(*options, "--dry-run") == 0
    output = capsys.readouterr().out
    assert list_names(recording_root) == everything
    assert {name for name in everything if f"{name} " in output} == everything - left
    assert prune_recordings(*options, "--yes") == 0
    assert list_names(recording_root) == left


def test_pruning_asks_for_confirmation(
    recording_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = list_names(recording_root)
    assert prune_recordings("--ended") == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, left in (("", everything), ("n", everything), ("y", {"running"})):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert prune_recordings("--ended") == 0
        assert list_names(recording_root) == left


def test_needs_a_reason(recording_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune_recordings("--yes") == 2
    assert main(["recordings", "--older-than", "30d"]) == 2
    assert prune_recordings("--older-than", "soon") == 2
    assert len(list_names(recording_root)) == 4
    assert "is not an age" in capsys.readouterr().err


def test_pruning_keeps_symbolic_links(recording_root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (recording_root / "oldest").rename(tmp_path / "elsewhere" / "oldest")
    (recording_root / "oldest").symlink_to(tmp_path / "elsewhere" / "oldest")
    assert prune_recordings("--ended", "--yes") == 0
    assert list_names(recording_root) == {"running", "oldest"}
    assert (tmp_path / "elsewhere" / "oldest" / "session.json").is_file()
