"""``zerotop doctor``: what it reports on machines with restrictions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zerotop.cli import main
from zerotop.commands import doctor


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
