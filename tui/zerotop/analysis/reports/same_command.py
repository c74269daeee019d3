"""Which runs are of the same command: programs and options count, folders and numbers do not."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_PYTHON = re.compile(r"python[\d.]*")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)(e[+-]?\d+)?[kmg]?", re.IGNORECASE)
# Files that a command reads: their names say what it does, where the names of other paths often change with the run.
_SCRIPTS = (".py", ".sh")
_READ = (*_SCRIPTS, ".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".hjson", ".ipynb")


def build_command_key(command: Sequence[str], working_directory: str) -> tuple[str, ...]:
    """Return a command without what differs from run to run, after the name of the folder of its script.

    Of programs, scripts and configurations the file name is kept, of Python no version; other paths become ``PATH``, numbers
    ``N``, also after ``=``. Two runs of the same command have the same key.
    """
    script = next((word for word in command if word.endswith(_SCRIPTS)), "")
    folder = os.path.dirname(os.path.normpath(os.path.join(working_directory, script))) if script else working_directory
    words = (_simplify_program(word) if place == 0 else _simplify_word(word) for place, word in enumerate(command))
    return os.path.basename(folder), *words


def _simplify_program(word: str) -> str:
    name = word.rpartition("/")[2]
    return "python" if _PYTHON.fullmatch(name) else name


def _simplify_word(word: str) -> str:
    name, equals, value = word.partition("=")
    if equals and not re.search(r"[\s/]", name):
        return f"{name}={_simplify_value(value)}"
    return _simplify_value(word)


def _simplify_value(value: str) -> str:
    if _NUMBER.fullmatch(value):
        return "N"
    if re.search(r"\s", value):  # the text of a program
        return value
    file = value.rpartition("/")[2]
    if file.endswith(_READ):
        return file
    return "PATH" if "/" in value else value
