"""The modes of terminals: what the job sets on the one that it was given becomes true of the user's, whose keys it reads."""

from __future__ import annotations

import os
import termios
from contextlib import suppress
from typing import Any

# How often they are looked at while the job prints nothing.
PERIOD_S = 0.03
_FLAGS = (0, 1, 3)  # input, output and local flags in what tcgetattr returns
_CHARACTERS = 6


class TerminalModes:
    """Copies the changed modes of the job's terminal to the user's.

    Not while the job is in the background: the terminal is then another program's. Back in the foreground all modes that the
    job has ever changed are set again.
    """

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        self._seen: list[Any] = termios.tcgetattr(source)
        self._changed = dict.fromkeys(_FLAGS, 0)
        self._characters: set[int] = set()
        self._is_behind = False

    def copy_changes(self) -> None:
        """Copy what has changed since the last call."""
        with suppress(OSError, termios.error):  # the user's terminal may be gone
            modes = termios.tcgetattr(self._source)
            if modes != self._seen:
                self._note_changes(modes)
            if not self._is_in_foreground():
                self._is_behind = any(self._changed.values()) or bool(self._characters)
            elif self._is_behind:
                self._is_behind = False
                self._set_modes()

    def renew(self) -> None:
        """Set the modes again at the next call: another program had the terminal, perhaps only for a moment."""
        self._is_behind = True

    def _note_changes(self, modes: list[Any]) -> None:
        for place in _FLAGS:
            self._changed[place] |= modes[place] ^ self._seen[place]
        before, after = self._seen[_CHARACTERS], modes[_CHARACTERS]
        self._characters |= {i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]}
        self._seen = modes
        self._is_behind = True

    def _is_in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._target) == os.getpgrp()
        except OSError:  # not the terminal of this recording, so that it has no foreground for us
            return True

    def _set_modes(self) -> None:
        modes = termios.tcgetattr(self._target)
        for place, changed in self._changed.items():
            modes[place] = modes[place] & ~changed | self._seen[place] & changed
        for i in self._characters:
            modes[_CHARACTERS][i] = self._seen[_CHARACTERS][i]
        termios.tcsetattr(self._target, termios.TCSANOW, modes)
