"""``zerotop doctor``: what it reports on machines with restrictions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerotop.cli import main
from zerotop.commands import doctor
from zerotop_probe.inside import native


@pytest.mark.parametrize(
    ("scope", "user", "says"),
    [
        ("0", 1000, "ptrace           scope 0"),
        ("1", 0, "ptrace           scope 1"),
        ("1", 1000, "sudo sysctl kernel.yama.ptrace_scope=0"),
        ("2", 1000, "sudo sysctl kernel.yama.ptrace_scope=0"),
        ("3", 0, "reboot with a lower scope"),
    ],
)
def test_whether_a_running_job_can_be_entered(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scope: str,
    user: int,
    says: str,
) -> None:
    (tmp_path / "scope").write_text(f"{scope}\n")
    monkeypatch.setattr(doctor, "_PTRACE", str(tmp_path / "scope"))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    main(["doctor"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if " ptrace " in line)
    assert says in line
    assert line.startswith("ok") or "missing" in line


@pytest.mark.parametrize("choice", ["0", None])
def test_whether_the_probe_has_its_c_code(choice: str | None) -> None:
    environment = {**os.environ}
    environment.pop("PYTHONZEROTOP_NATIVE", None)
    environment |= {} if choice is None else {"PYTHONZEROTOP_NATIVE": choice}
    command = [sys.executable, "-m", "zerotop", "doctor"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in run.stdout.splitlines() if "probe's C code" in line]
    if choice == "0":
        assert line.startswith("missing")
        assert "switched off by PYTHONZEROTOP_NATIVE" in line
    else:
        assert line.startswith("ok") == (native.counted_steps is not None)
