"""Running a detector on a recording that is read in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from small_recording import read_recording
from zerotop.analysis.findings import Detector, Finding
from zerotop.analysis.findings.support import detection


def find_at_end(folder: Path, detectors: Sequence[Detector], piece: int = 16384) -> tuple[Finding, ...]:
    """Return the findings of some detectors at the end, read so many phases at a time."""
    return _search(folder, detectors, piece).findings_at(read_recording(folder).end_ns)


def find_in_pieces(folder: Path, detect: Detector, pieces: Sequence[int]) -> tuple[Finding, ...]:
    """Return all findings, which must be the same for each number of phases that are read at a time."""
    found = [_search(folder, [detect], piece).ordered_findings for piece in pieces]
    assert found[1:] == found[:-1]
    return found[0]


def _search(folder: Path, detectors: Sequence[Detector], piece: int) -> detection.Detection:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detection, "_PIECE", piece)
        runner = detection.Detection(read_recording(folder), detectors)
        runner.update()
    return runner
