"""Completing a command line in a shell: commands, options, recordings and files."""

from __future__ import annotations

import argparse
from typing import Any

import argcomplete
from argcomplete.completers import FilesCompleter, SuppressCompleter

from zerotop.recording import catalog
from zerotop.recording.sweeps import SWEEP_FILE, find_default_folder

_FILES = ("FILE", "DIR", "PATH", "BUDGET")


def print_completions(parser: argparse.ArgumentParser) -> None:
    """Print the possible continuations of the command line in the shell's environment, and end the program."""
    _choose_completers(parser)
    argcomplete.autocomplete(parser, always_complete_options="long")


def _choose_completers(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _choose_completers(command)
        elif action.choices is None:
            action.completer = _choose_completer(str(action.metavar or ""))  # type: ignore[attr-defined]


def _choose_completer(metavar: str) -> Any:
    words = metavar.split("|")
    if "RECORDING" in words or "SWEEP" in words:
        return _RecordingCompleter(sweeps="SWEEP" in words)
    return FilesCompleter() if set(words) & set(_FILES) else SuppressCompleter()


class _RecordingCompleter:
    """Completes names of recordings in the state directory, and paths."""

    def __init__(self, *, sweeps: bool) -> None:
        self._sweeps = sweeps

    def __call__(self, prefix: str, **_: Any) -> list[str]:
        names = [path.name for path in catalog.list_recordings() if path.name.startswith(prefix)]
        if self._sweeps and (folder := find_default_folder()).is_dir():
            names += [
                path.name for path in folder.iterdir() if (path / SWEEP_FILE).is_file() and path.name.startswith(prefix)
            ]
        return [*names, *FilesCompleter()(prefix)]
