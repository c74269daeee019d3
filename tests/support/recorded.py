"""Real recordings, made on H200s with ``zerotop run``, or on CPU; folders packed into ``tests/recordings/*.tar.xz``."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "recordings"


def names() -> list[str]:
    """Of all there are."""
    return sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz"))


def unpack(name: str, into: Path) -> Path:
    """Unpacks a recording and returns the session's folder."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        for member in archive.getmembers():
            assert member.isfile()
            assert ".." not in member.name
        archive.extractall(into, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return into / name


def labels() -> dict[str, set[tuple[str, int | None]]]:
    """(finding, step in which it begins) that each recording must have, and nothing else; set by hand, with reasons."""
    told = json.loads((FOLDER / "labels.json").read_text())
    return {name: {(finding, step) for finding, step in entry["findings"]} for name, entry in told.items()}
