"""Running a detector on a recording that is read in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from small_recording import read_recording
from zerotop.analysis.findings import Detector, Finding
from zerotop.analysis.findings.support import detection


def find_in_pieces(folder: Path, detect: Detector, pieces: Sequence[int]) -> tuple[Finding, ...]:
    """Return all findings, which must be the same for each number of phases that are read at a time."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for piece in pieces:
            patch.setattr(detection, "_PIECE", piece)
            runner = detection.Detection(read_recording(folder), [detect])
            runner.update()
            found.append(runner._ordered_findings)
    assert found[1:] == found[:-1]
    return found[0]
