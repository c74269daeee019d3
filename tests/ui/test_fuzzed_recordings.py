"""Damaged recordings in all commands, and some on all screens; ``benchmarks/fuzz_recordings.py`` tries a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

import recordings
from fuzzing import KINDS, SHRUNK, find_faults, write_case

SEED = 20
NAMES = ("cpu-clean", "z2-oom", "gpu-leak")
ON_SCREENS = ("zeroed_range", "any_events", "damaged_inside", SHRUNK)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("huge", "many_members"))])
def test_no_damage_breaks_a_command(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = SEED + KINDS.index(kind)
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    path = write_case(recordings.packed(NAMES[seed % len(NAMES)]), kind, seed, tmp_path)
    faults = [fault for *_, fault in find_faults(path, kind, seed, screens=kind in ON_SCREENS) if fault]
    assert not faults, faults[0].text
