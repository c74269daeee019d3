"""The launcher's command line in a shell script: ``zerotop run -- bash start.sh`` may start ranks on several nodes, too."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from zerotop_probe.outside.sampling.ranks.launcher_programs import find_launcher
from zerotop_probe.recording.plain_files import open_plain_file

LAUNCHERS = ("deepspeed", "slurm", "mpi")
"""The launchers that may start ranks on other nodes."""
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_MAX_BYTES = 1 << 18
_MAX_QUOTED_LINES = 20
_OPERATORS = ";&|()"
# Before the words of a command.
_BEFORE = {"exec", "time", "nohup", "env", "command", "then", "do", "else", "if", "while", "!", "{"}
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


def find_launch(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command line of a launcher of several nodes: the command itself, or the last one in its script; else []."""
    if find_launcher(command) in LAUNCHERS:
        return list(command)
    text, arguments = _read_script(command)
    variables = dict(environment) | {str(place): word for place, word in enumerate(arguments, 1)}
    found = [words for words in _iter_commands(text, variables) if find_launcher(words) in LAUNCHERS]
    return found[-1] if found else []


def _read_script(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the shell script that a command runs and its arguments; an empty text without one."""
    words = list(command)
    if os.path.basename(words[0]) in _SHELLS:
        while words[1:] and words[1].startswith(("-", "+")):
            option = words.pop(1)
            if option.endswith("c") and not option.startswith("--"):
                return " ".join(words[1:2]), words[3:]
        words = words[1:]
    if not words:
        return "", []
    try:
        with open(open_plain_file(words[0]), encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_BYTES)
    except OSError:
        return "", []
    is_script = len(words) < len(command) or os.path.basename(text.partition("\n")[0].split(" ")[-1]) in _SHELLS
    return (text, words[1:]) if is_script else ("", [])


def _iter_commands(text: str, variables: dict[str, str]) -> Iterator[list[str]]:
    """Yield the simple commands of a script in order. Variables have the values that the script assigns plainly."""
    unfinished: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        unfinished.append(line)
        lexer = shlex.shlex("\n".join(unfinished), posix=True, punctuation_chars=_OPERATORS)
        lexer.whitespace_split = True
        try:
            tokens = list(lexer)
        except ValueError:  # within quotes that end on another line, or never
            unfinished = unfinished[-_MAX_QUOTED_LINES:]
            continue
        unfinished = []
        words: list[str] = []
        for token in [*tokens, ";"]:
            if token.strip(_OPERATORS):
                words.append(_VARIABLE.sub(lambda found: _expand(found, variables), token))
                continue
            if command := _strip_command(words, variables):
                yield command
            words = []


def _expand(found: re.Match[str], variables: Mapping[str, str]) -> str:
    return variables.get(found[1] or found[3]) or found[2] or ""


def _strip_command(words: list[str], variables: dict[str, str]) -> list[str]:
    """Return a command without what precedes it; note assignments that are all of it."""
    place = 0
    while place < len(words) and (words[place] in _BEFORE or _ASSIGNMENT.fullmatch(words[place])):
        place += 1
    assigned = words[1:] if words[:1] == ["export"] else words[:place] if place == len(words) else []
    variables.update(found.groups() for word in assigned if (found := _ASSIGNMENT.fullmatch(word)))  # type: ignore[misc]
    return words[place:]
