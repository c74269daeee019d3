"""Finding recordings by name."""

from __future__ import annotations

from pathlib import Path

from zerotop.session.headers import SessionError
from zerotop.session.packing import SUFFIX
from zerotop_probe.recording.directory import SESSION_FILE, find_default_root


def find_default_folder() -> Path:
    """Where the user's sessions lie."""
    return Path(find_default_root())


def list_sessions(root: Path | None = None) -> list[Path]:
    """All sessions in ``root`` (by default the user's), packed ones too, newest first."""
    folder = root or find_default_folder()
    try:
        found = [(path, _read_change_time(path)) for path in folder.iterdir()]
    except OSError:
        return []
    known = [(path, written) for path, written in found if written is not None]
    return [path for path, _ in sorted(known, key=lambda pair: pair[1], reverse=True)]


def _read_change_time(path: Path) -> int | None:
    """When a session was made (its last change, unix nanoseconds); None for what is none."""
    packed = path.suffix == SUFFIX and path.is_file()
    try:
        return (path if packed else path / SESSION_FILE).stat().st_mtime_ns
    except OSError:
        return None


def find_session(text: str, root: Path | None = None) -> Path:
    """The session that ``text`` means: a directory, a packed recording, a name, or the unique beginning of a name.

    Raises SessionError when there is none or more than one.
    """
    path = Path(text)
    if path.is_dir() or (path.suffix == SUFFIX and path.is_file()):
        return path
    sessions = list_sessions(root)
    matches = [found for found in sessions if found.name == text] or [f for f in sessions if f.name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if not matches and path.is_file():
        return path
    if not matches:
        raise SessionError(f"There is no session {text!r}: `zerotop sessions` lists them.")
    names = ", ".join(found.name for found in matches[:4])
    raise SessionError(f"{text!r} may mean several sessions ({names}): type more of the name.")
