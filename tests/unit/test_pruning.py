"""``zerotop sessions --prune``: what it deletes, what it never deletes, and what it says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from zerotop.cli import main
from zerotop_probe.outside.procfs import Process
from zerotop_probe.recording import directory, events
from zerotop_probe.recording.writer import EventWriter, Identity

DAY_S = 86400


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the user's sessions: ended ones that are 1, 10 and 40 days old, and an old one whose job runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, days in (("new", 1), ("older", 10), ("oldest", 40), ("running", 50)):
        clock = {"monotonic_ns": 0, "unix_ns": time.time_ns() - days * DAY_S * 10**9}
        path = Path(directory.create_session(["python"], path=str(tmp_path / "zerotop" / "sessions" / name), clock=clock))
        (path / "output-node-x-1.log").write_bytes(bytes(1_000_000))
        if name == "running":
            own = Process.from_pid(os.getpid())
            assert own is not None
            writer = EventWriter(str(path), Identity.for_this_process("control"))
            writer.write(time.monotonic_ns(), events.JOB_STARTED, pid=own.pid, start=own.start)
            writer.close()
        for file in [*path.iterdir(), path]:
            os.utime(file, (time.time() - days * DAY_S,) * 2)
    return tmp_path / "zerotop" / "sessions"


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def prune(*options: str) -> int:
    return main(["sessions", "--prune", *options])


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
def test_deleted(root: Path, options: list[str], left: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    everything = names(root)
    assert prune(*options, "--dry-run") == 0
    said = capsys.readouterr().out
    assert names(root) == everything
    assert {name for name in everything if f"{name} " in said} == everything - left
    assert prune(*options, "--yes") == 0
    assert names(root) == left


def test_asks(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    everything = names(root)
    assert prune("--ended") == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    for answer, left in (("", everything), ("n", everything), ("y", {"running"})):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        assert prune("--ended") == 0
        assert names(root) == left


def test_needs_a_reason(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prune("--yes") == 2
    assert main(["sessions", "--older-than", "30d"]) == 2
    assert prune("--older-than", "soon") == 2
    assert len(names(root)) == 4
    assert "is not an age" in capsys.readouterr().err


def test_links_stay(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "oldest").rename(tmp_path / "elsewhere" / "oldest")
    (root / "oldest").symlink_to(tmp_path / "elsewhere" / "oldest")
    assert prune("--ended", "--yes") == 0
    assert names(root) == {"running", "oldest"}
    assert (tmp_path / "elsewhere" / "oldest" / "session.json").is_file()
