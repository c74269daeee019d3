"""The user's settings, kept between runs."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from zerotop.recording.atomic_write import write_text_file

_MAX_BYTES = 1 << 16


class UserSettings:
    """Settings by name. A file that cannot be read or written is ignored."""

    def __init__(self, path: Path | None = None) -> None:
        """``path``: the file; None keeps the settings for this run only."""
        self._path = path
        self._values = _read_settings(path) if path is not None else {}

    def get(self, name: str, default: str) -> str:
        """Return a setting, or the default."""
        return self._values.get(name, default)

    def set(self, name: str, value: str) -> None:
        """Change a setting, also in the file, where it keeps changes by other processes."""
        if self._values.get(name) == value:
            return
        if self._path is None:
            self._values[name] = value
            return
        self._values = {**self._values, **_read_settings(self._path), name: value}
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text_file(self._path, json.dumps(self._values, indent=1) + "\n")


def _read_settings(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            words = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(k): v for k, v in words.items() if isinstance(v, str)} if isinstance(words, dict) else {}
