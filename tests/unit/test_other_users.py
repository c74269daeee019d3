"""Folders and files of other users: nobody else's file makes zerotop signal a process, and nothing is read through links."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerotop.cli import main
from zerotop.commands.job.microscope_request import request_trace
from zerotop_probe.outside.attaching import payload
from zerotop_probe.outside.job import job_control
from zerotop_probe.outside.procfs import ProcessHandle
from zerotop_probe.recording import directory, events
from zerotop_probe.recording.plain_files import is_trusted_owner, open_plain_file
from zerotop_probe.recording.writer import EventWriter, Identity

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


def as_nobody(act: Callable[[], object]) -> int:
    """Act as another user in a child process; return its exit code."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def sleeping_process() -> Iterator[ProcessHandle]:
    """A process of ours that belongs to no job."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        process = ProcessHandle.from_pid(child.pid)
        assert process is not None
        yield process
        child.kill()


def plant_job(recording: Path, process: ProcessHandle) -> None:
    """Write events that name a process as the root of the job, its sampler and a rank."""
    writer = EventWriter(str(recording), Identity.for_this_process("node")._replace(pid=process.pid, start=process.start))
    now = time.monotonic_ns()
    writer.write(now, events.JobStarted, pid=process.pid, start=process.start)
    writer.write(now, events.RankFound, rank=0, pid=process.pid, start=process.start)
    writer.write(now, events.Reached, name="evil.example", joined=True)
    writer.close()


def make_recording(folder: Path, mode: int = 0o777) -> Path:
    recording = Path(directory.create_recording(["python", "train.py"], path=str(folder / "recording")))
    folder.chmod(0o755)
    recording.chmod(mode)
    return recording


@pytest.fixture
def reachable_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that other users can reach."""
    folder = Path("/tmp") / f"zerotop-users-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir(mode=0o755)
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_our_own_file_is_believed(tmp_path: Path, sleeping_process: ProcessHandle) -> None:
    recording = make_recording(tmp_path)
    plant_job(recording, sleeping_process)
    facts = job_control.read_facts(str(recording))
    assert (facts.job, facts.ranks, facts.samplers) == (sleeping_process, [sleeping_process], [sleeping_process])
    assert facts.reached_hosts == ["evil.example"]


@needs_root
def test_a_planted_file_stops_nothing(reachable_folder: Path, sleeping_process: ProcessHandle) -> None:
    recording = make_recording(reachable_folder)
    assert as_nobody(lambda: plant_job(recording, sleeping_process)) == 0
    facts = job_control.read_facts(str(recording))
    assert (facts.job, facts.ranks, facts.samplers, facts.reached_hosts) == (None, [], [], [])
    with pytest.raises(job_control.JobUnreachable):
        job_control.request_stop(str(recording))
    assert sleeping_process.is_alive()


@needs_root
def test_a_planted_file_stops_nothing_of_an_ordinary_user(reachable_folder: Path) -> None:
    """The victim is nobody, who believes root but not a third user."""
    recording = make_recording(reachable_folder)

    def stop_victim() -> None:
        victim = subprocess.Popen(["sleep", "600"])
        process = ProcessHandle.from_pid(victim.pid)
        assert process is not None
        pid_file = reachable_folder / "open" / "victim"
        pid_file.write_text(json.dumps(process))
        while not (reachable_folder / "open" / "planted").exists():
            time.sleep(0.01)
        try:
            assert job_control.read_facts(str(recording)).job is None
        finally:
            victim.kill()

    (reachable_folder / "open").mkdir()
    (reachable_folder / "open").chmod(0o777)
    third = os.fork()
    if not third:
        while not (reachable_folder / "open" / "victim").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        os.setuid(12345)
        plant_job(recording, ProcessHandle(*json.loads((reachable_folder / "open" / "victim").read_text())))
        (reachable_folder / "open" / "planted").touch()
        os._exit(0)
    try:
        assert as_nobody(stop_victim) == 0
    finally:
        os.kill(third, signal.SIGKILL)
        os.waitpid(third, 0)


@needs_root
def test_root_believes_a_user_about_the_users_processes(reachable_folder: Path) -> None:
    recording = make_recording(reachable_folder)
    with subprocess.Popen(["sleep", "600"], user=NOBODY) as child:
        process = ProcessHandle.from_pid(child.pid)
        assert process is not None
        assert as_nobody(lambda: plant_job(recording, process)) == 0
        facts = job_control.read_facts(str(recording))
        assert (facts.job, facts.ranks, facts.reached_hosts) == (process, [process], [])
        child.kill()


@needs_root
def test_a_process_that_names_the_recording_itself_is_believed(reachable_folder: Path) -> None:
    """As of files of root on a network file system, which belong to nobody."""
    recording = make_recording(reachable_folder)
    environment = {**os.environ, directory.SESSION_VARIABLE: str(recording)}
    with subprocess.Popen(["sleep", "600"], env=environment) as child:
        process = ProcessHandle.from_pid(child.pid)
        assert process is not None
        assert as_nobody(lambda: plant_job(recording, process)) == 0
        assert job_control.read_facts(str(recording)).job == process
        child.kill()


@needs_root
def test_a_folder_of_another_user_is_refused(reachable_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    other = reachable_folder / "other"
    other.mkdir()
    os.chown(other, NOBODY, NOBODY)
    assert main(["run", "--headless", "--require-recording", "--recording", str(other), "--", "true"]) == 1
    _, errors = capfd.readouterr()
    assert errors.count("\n") == 1
    assert f"{other} belongs to another user, who could change the recording. Name a new folder" in errors
    assert list(other.iterdir()) == []


def test_our_own_folder_is_made_private(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o2777)
    directory.create_recording(["true"], path=str(folder))
    assert folder.stat().st_mode & 0o7777 == 0o2755


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    plain, link, pipe = tmp_path / "plain", tmp_path / "link", tmp_path / "pipe"
    plain.write_text("text")
    link.symlink_to(plain)
    os.mkfifo(pipe)
    os.close(open_plain_file(str(plain)))
    for path in (link, pipe, tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(OSError, match=r"file|links|such"):
            open_plain_file(str(path))


def test_trusted_owners(tmp_path: Path) -> None:
    assert is_trusted_owner(os.geteuid(), str(tmp_path))
    assert is_trusted_owner(0, str(tmp_path))
    assert not is_trusted_owner(54321, str(tmp_path))


def test_requests_and_answers_replace_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in (directory.MICROSCOPE_FILE, f".{directory.MICROSCOPE_FILE}.{os.getpid()}"):
        (tmp_path / name).symlink_to(victim)
        if name.startswith("."):
            with pytest.raises(FileExistsError):
                request_trace(str(tmp_path), steps=1, stacks=False)
        else:
            assert request_trace(str(tmp_path), steps=1, stacks=False) == 1
            assert not (tmp_path / name).is_symlink()
    process = ProcessHandle.from_pid(os.getpid())
    assert process is not None
    answer = Path(payload.answer_path(str(tmp_path), process))
    answer.symlink_to(victim)
    payload.create_answer(str(answer), process)
    assert not answer.is_symlink()
    answer.unlink()
    answer.symlink_to(victim)
    assert payload.take_answer(str(answer)) is None
    assert victim.read_text() == "kept"
