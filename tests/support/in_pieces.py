"""Running a detector on a recording that is read in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from small_recording import read_recording
from zerotop.analysis.annotations import Annotation, Detector
from zerotop.analysis.annotations.support import annotator


def find_in_pieces(folder: Path, detect: Detector, pieces: Sequence[int]) -> tuple[Annotation, ...]:
    """Return all findings, which must be the same for each number of phases that are read at a time."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for piece in pieces:
            patch.setattr(annotator, "_PIECE", piece)
            runner = annotator.Annotator(read_recording(folder), [detect])
            runner.update()
            found.append(runner._ordered_findings)
    assert found[1:] == found[:-1]
    return found[0]
