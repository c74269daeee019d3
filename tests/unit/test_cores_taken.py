"""Cores that others take for long enough without a break, in long made-up recordings that are read in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest

import long_recording
import recordings
from in_pieces import find_at_end
from long_recording import CORES, Trouble
from planted_troubles import set_values
from zerotop.analysis.findings import Finding
from zerotop.analysis.findings.host import cores_taken
from zerotop.analysis.views.finding_search import list_findings

PERIOD_S = 20.0


def find_taken(path: Path, piece: int = 16384) -> tuple[Finding, ...]:
    """Return the findings of this kind, read so many phases at a time."""
    return find_at_end(path, [cores_taken.detect], piece)


@pytest.mark.parametrize("seconds", [1.5, 3.0])
def test_pieces_make_no_difference(tmp_path: Path, seconds: float) -> None:
    """From second 60 on they are taken for so long in each PERIOD_S; a node is sampled twice a second."""
    share = seconds / PERIOD_S
    changes = {
        "hosts": set_values(PERIOD_S, share, cores_used=float(CORES)),
        "processes": set_values(PERIOD_S, share, waiting_cores=CORES / 2),
    }
    path = long_recording.write_recording(tmp_path / "recording", 500, Trouble(tables=changes))
    whole, *others = (find_taken(path, piece) for piece in (16384, 50, 7, 3))
    assert all(found == whole for found in others)
    if seconds < cores_taken.TAKEN_SECONDS:
        assert whole == ()
        return
    finding, second = whole  # the next ones are too short beside the training before them
    assert finding.end_ns - finding.begin_ns == 2.5 * 10**9  # the node is sampled twice a second
    assert [one.evidence["until_step"] for one in (finding, second)] == [250, 330]
    assert finding.evidence["others_cores"] == pytest.approx(CORES - 4)
    assert finding.evidence["waiting_cores"] == pytest.approx(CORES / 2)
    assert finding.evidence["cores"] == CORES
    assert finding.cost == 0  # no thread was sampled


def test_it_costs_the_time_in_which_the_training_thread_waits() -> None:
    """The rank that waits longest counts: the others wait for it. All of the shortage counts, not just its first seconds."""
    (finding,) = [one for one in list_findings(recordings.open_recording("held-clean-offload")) if one.name == "cores_taken"]
    assert "the training thread of rank 1 waits for one in 53 % of the time" in finding.details
    assert finding.cost == pytest.approx(0.53, abs=0.01)
    seconds = (finding.end_ns - finding.begin_ns) / 1e9
    assert seconds > 2 * cores_taken.TAKEN_SECONDS
    assert finding.evidence["lost_s"] == pytest.approx(finding.cost * seconds)


def test_a_second_shortage_is_told_after_the_first_has_ended(tmp_path: Path) -> None:
    """From second 60 on they are taken for half of each minute."""
    changes = {
        "hosts": set_values(60.0, 0.5, cores_used=float(CORES)),
        "processes": set_values(60.0, 0.5, waiting_cores=CORES / 2),
    }
    path = long_recording.write_recording(tmp_path / "recording", 800, Trouble(tables=changes))
    whole, *others = (find_taken(path, piece) for piece in (16384, 50, 7))
    assert all(found == whole for found in others)
    assert [(one.step, one.evidence.get("until_step")) for one in whole] == [(240, 358), (480, 598), (720, None)]


@pytest.mark.parametrize("steps", [500, 1000])
def test_it_is_told_again_while_it_lasts(tmp_path: Path, steps: int) -> None:
    """Breaks that are short beside it do not end it."""
    changes = {
        "hosts": set_values(5.0, 0.8, cores_used=float(CORES)),
        "processes": set_values(5.0, 0.8, waiting_cores=CORES / 2),
    }
    path = long_recording.write_recording(tmp_path / "recording", steps, Trouble(tables=changes))
    whole, *others = (find_taken(path, piece) for piece in (16384, 50, 3))
    assert all(found == whole for found in others)
    (finding,) = whole
    assert "until_step" not in finding.evidence
    assert (finding.end_ns - finding.begin_ns) / 1e9 == pytest.approx(steps / 4 - 60, rel=0.2)


@pytest.mark.parametrize(
    ("count", "cores", "name"),
    [
        ("loader_workers", "loader_cores", "DataLoader workers"),
        ("child_processes", "child_cores", "child processes"),
    ],
)
@pytest.mark.parametrize(("used", "others"), [(3.0, 1.0), (1.0, 3.0)])
def test_the_jobs_own_processes_are_no_others(
    tmp_path: Path, used: float, others: float, count: str, cores: str, name: str
) -> None:
    """The rank uses 4 of the cores, its own processes some of the rest, and others what is left over."""
    rest = CORES - 4
    changes = {
        "hosts": set_values(PERIOD_S, 0.2, cores_used=float(CORES)),
        "processes": set_values(PERIOD_S, 0.2, waiting_cores=CORES / 2, **{count: 4, cores: used / 4 * rest}),
    }
    path = long_recording.write_recording(tmp_path / "recording", 300, Trouble(tables=changes))
    found = find_taken(path)[0]
    own = "workers_cores" if count == "loader_workers" else "children_cores"
    assert found.evidence[own] == pytest.approx(used / 4 * rest)
    assert found.evidence["others_cores"] == pytest.approx(others / 4 * rest)
    assert str(found.headline).startswith(
        f"Its 4 {name} use 45.0 of 64" if used > others else "Other processes use 45.0 of 64"
    )
    assert f"The job's 4 {name} use 15.0 more." in str(found.details) or used > others
