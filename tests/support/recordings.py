"""Real recordings, packed: ``tests/recordings/README.md`` says how each was made."""

from __future__ import annotations

import json
from pathlib import Path

from zerotop.demo import RECORDING
from zerotop.session.packing import SUFFIX, unpack
from zerotop.session.reader import Session

FOLDER = Path(__file__).resolve().parent.parent / "recordings"


def names() -> list[str]:
    """Of all there are; one of them is shipped with the demo."""
    return sorted(path.stem for path in (RECORDING, *FOLDER.glob(f"*{SUFFIX}")))


def packed(name: str) -> Path:
    """The packed file."""
    return RECORDING if name == RECORDING.stem else FOLDER / (name + SUFFIX)


def recording(name: str) -> Session:
    """A recording, opened."""
    return Session.open(packed(name))


def as_directory(name: str, into: Path) -> Path:
    """Writes a recording's files to a new folder in ``into``: the session as it was before it was packed."""
    session = into / name
    session.mkdir()
    for file, content in unpack(packed(name)).items():
        (session / file).write_bytes(content)
    return session


def labels() -> dict[str, set[tuple[str, int | None]]]:
    """(finding, step in which it begins) that each recording must have, and nothing else; set by hand, with reasons."""
    told = json.loads((FOLDER / "labels.json").read_text())
    return {name: {(finding, step) for finding, step in entry["findings"]} for name, entry in told.items()}
