"""``zerotop completions`` in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import recordings

_BASH = """
eval "$(zerotop completions bash)"
COMP_LINE="$1"; COMP_POINT=${#COMP_LINE}; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMP_TYPE=63
_python_argcomplete zerotop "${COMP_WORDS[-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
_FISH = 'zerotop completions fish | source; complete -C "$argv[1]"'
_ZSH = 'autoload -U compinit; compinit -D -u; eval "$(zerotop completions zsh)"; print -r -- ${_comps[zerotop]}'


@pytest.fixture(scope="module")
def shell_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a home with the program on the path and two recordings."""
    home = tmp_path_factory.mktemp("home")
    program = home / "zerotop"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m zerotop "$@"\n')
    program.chmod(0o755)
    folders = home / "state" / "zerotop" / "sessions"
    folders.mkdir(parents=True)
    for name in ("brisk-otter", "calm-heron"):
        shutil.copy(recordings.find_packed_file("cpu-clean"), folders / f"{name}.zerotop")
    return home


def complete_line(home: Path, shell: str, line: str) -> list[str]:
    """Return what the shell offers after a line, without descriptions."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    arguments = (
        [shell, "--norc", "-c", _BASH, "bash", line] if shell == "bash" else [shell, "--no-config", "-c", _FISH, line]
    )
    environment = {
        **os.environ,
        "PATH": f"{home}:{os.environ['PATH']}",
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
    }
    run = subprocess.run(arguments, env=environment, cwd=home, capture_output=True, text=True, timeout=60, check=False)
    return [word.split("\t")[0].strip() for word in run.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_commands_options_and_recordings_are_completed(shell_home: Path, shell: str) -> None:
    assert complete_line(shell_home, shell, "zerotop repl") == ["replay"]
    assert complete_line(shell_home, shell, "zerotop export --form") == ["--format"]
    assert sorted(complete_line(shell_home, shell, "zerotop export --format p")) == ["parquet", "perfetto"]
    assert complete_line(shell_home, shell, "zerotop report bri") == ["brisk-otter.zerotop"]
    assert complete_line(shell_home, shell, "zerotop completions z") == ["zsh"]


def test_zsh_knows_the_program(shell_home: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    environment = {**os.environ, "PATH": f"{shell_home}:{os.environ['PATH']}", "HOME": str(shell_home)}
    run = subprocess.run(["zsh", "-f", "-c", _ZSH], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "_python_argcomplete"
