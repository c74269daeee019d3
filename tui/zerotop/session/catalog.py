"""Finding recordings by name."""

from __future__ import annotations

from pathlib import Path

from zerotop.session.headers import SessionError
from zerotop_probe.recording.directory import SESSION_FILE, default_root


def listing(root: Path | None = None) -> list[Path]:
    """All sessions in ``root`` (by default the user's), newest first."""
    folder = root or Path(default_root())
    try:
        found = [path for path in folder.iterdir() if (path / SESSION_FILE).is_file()]
    except OSError:
        return []
    return sorted(found, key=lambda path: (path / SESSION_FILE).stat().st_mtime_ns, reverse=True)


def find(text: str, root: Path | None = None) -> Path:
    """The session that ``text`` means: a directory, a name, or the unique beginning of a name.

    Raises SessionError when there is none or more than one.
    """
    path = Path(text)
    if path.is_dir():
        return path
    sessions = listing(root)
    matches = [found for found in sessions if found.name == text] or [f for f in sessions if f.name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise SessionError(f"There is no session {text!r}: `zerotop sessions` lists them.")
    names = ", ".join(found.name for found in matches[:4])
    raise SessionError(f"{text!r} may mean several sessions ({names}): type more of the name.")
