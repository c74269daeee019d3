"""Damaged recordings in all commands, and some on all screens; ``benchmarks/fuzz_recordings.py`` tries a thousand."""

from __future__ import annotations

from pathlib import Path

import pytest

import recordings
from fuzzing import KINDS, SHRUNK, find_faults, visit_screens, write_case

SEED = 20
NAMES = ("cpu-clean", "z2-oom", "gpu-leak")
# Of the kinds of damage those that once broke something and take little time; one on all screens.
CHOSEN = (
    "zeroed_range",
    "foreign_dtype",
    "wrong_header",
    "extreme_values",
    "shifted_times",
    "wrong_fact",
    "any_events",
    "escapes_everywhere",
    "no_plain_file",
    "flipped_pack",
    "lying_sizes",
    SHRUNK,
)
ON_SCREENS = ("any_events",)
# Recordings whose records out of order once broke a screen, with the seed.
ON_ALL_SCREENS = (("held-there-and-back", 413), ("held-save", 653))


@pytest.mark.parametrize("kind", CHOSEN)
def test_no_damage_breaks_a_command(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = SEED + KINDS.index(kind)
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    path = write_case(recordings.find_packed_file(NAMES[seed % len(NAMES)]), kind, seed, tmp_path)
    faults = [fault for *_, fault in find_faults(path, kind, seed, screens=kind in ON_SCREENS) if fault]
    assert not faults, faults[0].text


@pytest.mark.parametrize(("name", "seed"), ON_ALL_SCREENS)
async def test_records_out_of_order_break_no_screen(name: str, seed: int, tmp_path: Path) -> None:
    await visit_screens(write_case(recordings.find_packed_file(name), "unordered_records", seed, tmp_path))
