"""Find recordings by name."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from zerotop.recording.headers import RecordingError
from zerotop.recording.packed.packing import SUFFIX
from zerotop.recording.sweeps import POINTS_FOLDER, is_sweep
from zerotop_probe.recording.directory import SESSION_FILE, find_default_root


def find_default_folder() -> Path:
    """Return the folder of the user's recordings."""
    return Path(find_default_root())


def list_recordings(root: Path | None = None) -> list[Path]:
    """Return all recordings in ``root`` (by default the user's), packed ones too, newest first."""
    folder = root or find_default_folder()
    try:
        times = {path: _read_change_time(path) for path in folder.iterdir()}
    except OSError:
        return []
    changed = {path: time_ns for path, time_ns in times.items() if time_ns is not None}
    return sorted(changed, key=changed.__getitem__, reverse=True)


def _read_change_time(path: Path) -> int | None:
    """Return when a recording was created (last change of its file, unix nanoseconds); None for other files."""
    packed = path.suffix == SUFFIX and path.is_file()
    try:
        return (path if packed else path / SESSION_FILE).stat().st_mtime_ns
    except OSError:
        return None


def find_recording(text: str, root: Path | None = None) -> Path:
    """Return the recording that ``text`` names: a directory, a packed recording, a name, or the unique prefix of a name.

    Raise RecordingError if there is none or more than one.
    """
    path = Path(text)
    if is_sweep(path) and not (path / SESSION_FILE).is_file():
        points = sorted((path / POINTS_FOLDER).glob("*"))
        example = f", as {points[0]}" if points else ""
        raise RecordingError(f"{text} is a sweep: name the recording of a point{example}.")
    if path.is_dir() or (path.suffix == SUFFIX and path.is_file()):
        return path
    recordings = list_recordings(root)
    matches = [path for path in recordings if path.name == text] or [
        path for path in recordings if path.name.startswith(text)
    ]
    if len(matches) == 1:
        return matches[0]
    if not matches and path.is_file():
        return path
    if not matches:
        if "/" in text or path.suffix:
            raise RecordingError(f"There is no recording at {text}: no such file or folder.")
        likely = get_close_matches(text, [one.name for one in recordings], 1)
        meant = f" Did you mean {likely[0]}?" if likely else ""
        raise RecordingError(f"There is no recording {text!r}: `zerotop recordings` lists them.{meant}")
    names = ", ".join(match.name for match in matches[:4])
    raise RecordingError(f"{text!r} matches several recordings ({names}): type more of the name.")
