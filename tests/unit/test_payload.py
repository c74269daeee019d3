"""What is executed inside a rank: it answers, leaves nothing behind, and keeps no signal from the job."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerotop_probe.inside import own_imports
from zerotop_probe.outside.attaching import payload
from zerotop_probe.recording import interruptions

# As the injector has it: the interpreter runs a text between two instructions of the job.
JOB = """
import ctypes, signal, sys, time
def ended(number, frame):
    print("told", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, ended)
before = set(globals()) | {"before"}
try:
    ctypes.pythonapi.PyRun_SimpleString(sys.argv[1].encode())
    print(sorted(set(globals()) - before), flush=True)
    time.sleep(float(sys.argv[2]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def make_probe(folder: Path, body: str) -> str:
    """A probe whose only action does that; its folder."""
    root = folder / "zerotop_probe"
    hooks, recording = root / "inside" / "hooks", root / "recording"
    for package in (root, root / "inside", hooks, recording):
        package.mkdir()
        (package / "__init__.py").touch()
    shutil.copy(own_imports.__file__, root / "inside")
    shutil.copy(interruptions.__file__, recording)
    code = f"import signal\ndef enter(recording):\n    {body}\n    return 'in ' + recording\n"
    (hooks / "hook_installer.py").write_text(code)
    return str(root)


def run_entered_job(answer: Path, body: str, *, stays_s: float) -> subprocess.CompletedProcess[str]:
    """A job into which a probe is put."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "_ROOT", make_probe(answer.parent, body))
        text = payload.make_call(str(answer), "enter", "here")
    job = [sys.executable, "-c", JOB, text, str(stays_s)]
    return subprocess.run(job, check=False, capture_output=True, text=True, timeout=60)


def run_job(folder: Path, body: str, *, stays_s: float) -> tuple[subprocess.CompletedProcess[str], str]:
    """The job and its probe's answer."""
    answer = folder / "answer"
    answer.touch()
    return run_entered_job(answer, body, stays_s=stays_s), answer.read_text()


def test_it_answers_and_leaves_no_name(tmp_path: Path) -> None:
    done, answer = run_job(tmp_path, "pass", stays_s=0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert answer == "in here"


def test_its_own_error_is_its_answer(tmp_path: Path) -> None:
    done, answer = run_job(tmp_path, "raise RuntimeError('no room')", stays_s=0.2)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
    assert answer == "! RuntimeError: no room"


def test_a_ctrl_c_meanwhile_reaches_the_job(tmp_path: Path) -> None:
    done, answer = run_job(tmp_path, "signal.raise_signal(signal.SIGINT)", stays_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\ninterrupted\n", "")
    assert answer.startswith("! KeyboardInterrupt")


def test_an_exception_of_the_jobs_own_signal_handler_reaches_the_job(tmp_path: Path) -> None:
    done, answer = run_job(tmp_path, "signal.raise_signal(signal.SIGTERM)", stays_s=30)
    told = f"told {int(signal.SIGTERM)}\n"
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{told}[]\n{told}", "")
    assert answer == "! SystemExit: 7"


def test_an_answer_that_is_not_awaited_is_dropped(tmp_path: Path) -> None:
    done = run_entered_job(tmp_path / "nobody", "pass", stays_s=0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_it_does_nothing_in_the_midst_of_an_import(tmp_path: Path) -> None:
    """Before CPython 3.12 an import there takes the lock away from the one that it interrupts, which fails then."""
    answer = tmp_path / "answer"
    answer.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "_ROOT", make_probe(tmp_path, "pass"))
        text = payload.make_call(str(answer), "enter", "here")
    (tmp_path / "half.py").write_text("import ctypes, sys\nctypes.pythonapi.PyRun_SimpleString(sys.argv[1].encode())\n")
    job = "import half, sys\nprint('zerotop_probe' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", job, text], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert answer.read_text() == "importing"
