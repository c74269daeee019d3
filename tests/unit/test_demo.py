"""The demo before it trains: devices, stale build locks and progress lines."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agents import build_python_command
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.cli import main
from zerotop.commands.common import progress
from zerotop.commands.job import training_machine
from zerotop.recording.reader import Recording
from zerotop_probe.outside.sampling.ranks import build_locks
from zerotop_probe.recording import directory, tables
from zerotop_probe.recording.writer import Identity, RecordWriter

# Takes a lock as torch.utils.file_baton does.
HOLDER = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(600)"


def lock_in(folder: Path, name: str) -> Path:
    (folder / name).mkdir(parents=True)
    return folder / name / "lock"


def test_a_lock_is_stale_when_its_holder_is_dead(tmp_path: Path) -> None:
    lock = lock_in(tmp_path, "py311_cpu/cpu_adam")
    with subprocess.Popen([*build_python_command(HOLDER), str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert build_locks.find_stale_locks(tmp_path) == []
        holder.kill()
        holder.wait()
    assert build_locks.remove_stale_locks(tmp_path) == [lock]
    assert not lock.exists()
    assert build_locks.find_stale_locks(tmp_path / "no such folder") == []


def test_the_demo_says_in_one_line_that_it_removes_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cpu_adam", "fused_adam", "utils"):
        lock_in(tmp_path, name).touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def stop_before_training(count: int) -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(training_machine, "build_environment", stop_before_training)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        main(["demo"])
    assert capsys.readouterr().out == f"Removed 3 locks of killed builds in {tmp_path}\n"


def test_doctor_names_a_stale_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "my builds"))
    assert main(["doctor"]) == 0
    assert "ok       operator builds" in capsys.readouterr().out
    lock = lock_in(tmp_path / "my builds", "cpu_adam")
    lock.touch()
    assert main(["doctor"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "operator builds" in line]
    assert line.startswith("missing ")
    assert line.endswith(f"; rm '{lock}'")


def test_locks_of_other_folders_are_not_those_of_this_job(tmp_path: Path) -> None:
    """A job with a TORCH_EXTENSIONS_DIR of its own may have it within the cache."""
    for folder in ("py311_cpu/cpu_adam", "a job's own/cpu_adam"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "lock").touch()
    assert build_locks.find_stale_locks(tmp_path) == [tmp_path / "py311_cpu/cpu_adam/lock"]


def test_another_machine_may_be_building_on_a_shared_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = lock_in(tmp_path, "cpu_adam")
    lock.touch()
    monkeypatch.setattr(build_locks, "_SHARED_FILESYSTEMS", ("",))  # whatever this one is
    assert build_locks.find_stale_locks(tmp_path) == []
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    assert build_locks.find_stale_locks(tmp_path) == [lock]


def test_torch_builds_where_its_variables_say() -> None:
    home = {"HOME": "/home/me"}
    assert build_locks.find_extensions_folder(home | {"TORCH_EXTENSIONS_DIR": "/there"}) == Path("/there")
    assert build_locks.find_extensions_folder(home | {"XDG_CACHE_HOME": "/cache"}) == Path("/cache/torch_extensions")
    assert build_locks.find_extensions_folder({}) == Path.home() / ".cache" / "torch_extensions"


@pytest.mark.parametrize(
    ("text", "devices"),
    [("0,1", ["0", "1"]), ("", []), ("-1", []), ("1,-1,0", ["1"]), (" GPU-1a , 2", ["GPU-1a", "2"]), ("0,,1", ["0"])],
)
def test_visible_devices(text: str, devices: list[str]) -> None:
    assert training_machine.parse_visible_devices(text) == devices


def test_torch_without_cuda_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(training_machine, "count_visible_gpus", lambda: 2)
    for line, usable in (("cuda: Optional[str] = None", 0), ("cuda: Optional[str] = '12.8'", 2), ("cuda = '11.8'", 2)):
        (torch / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = None\n")
        assert training_machine.count_usable_gpus() == usable
    assert capsys.readouterr().out == (
        "This machine has 2 GPUs, but the installed torch was built without CUDA: training runs on the CPU\n"
    )


def test_progress_lines(tmp_path: Path) -> None:
    folder = directory.create_recording(["python", "train.py"], path=str(tmp_path / "recording"))
    source = RecordingSource(Recording.open(Path(folder)))
    seconds = 0.0
    news = progress.ProgressReporter(lambda: seconds)
    said = []
    for seconds in range(0, 80, 2):
        said.append(news.format_news(source))
        if seconds == 70:
            spans = RecordWriter(folder, tables.SPANS, Identity.for_this_process("rank", 0))
            now = time.monotonic_ns()
            spans.write(now - 10**9, now, -1, 0, 0, -1, -1, tables.PHASE_CODE["step"], tables.BOUNDARY, 0, 0, 0)
            spans.close()
            source.refresh()
    lines = [line.partition("s  ")[2] for line in said if line]
    assert lines[:3] == ["Waiting for the training to begin."] * 3
    assert lines[3].startswith("1 step  ")
    assert len(lines) == 4
