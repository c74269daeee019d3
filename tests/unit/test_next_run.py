"""What findings advise once the job has ended: nothing that needs a live process."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import recordings
from zerotop.analysis.findings import detect_findings
from zerotop.analysis.reports.recorded_run import RecordedRun
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop.recording.reader import Recording
from zerotop_probe.recording import events

LATE = (
    "deepspeed --num_gpus 2 /tmp/held/staged.py --stage 1 --accumulation 2 --rows 8 --length 64 --steps 36"
    " --slow-from 12 --slow-rank 0 --seconds 0.12"
)
LIVE = re.compile(r"--pid|-p \d|-pc \d|-CONT|pgrep")
# Recording, finding, its fix while the job runs, and what is offered when it has ended.
FIXES = [
    ("held-straggler", "straggler", "py-spy dump --pid 29873", f"py-spy record --subprocesses -o stacks.svg -- {LATE}"),
    ("blind-slow-forward", "slow_forward", "taskset -pc 7811", "numactl --physcpubind=CORES"),
    ("gpu-others", "others_on_gpu", "nvidia-smi; ps -o user,lstart,cmd -p 730", "nvidia-smi"),
    ("gpu-neighbour", "iteration_shift", "ps -o user,lstart,cmd -p 2042", "nvidia-smi"),
]


@pytest.mark.parametrize(("recording", "name", "live", "ended"), FIXES)
def test_a_fix_for_the_next_run(recording: str, name: str, live: str, ended: str) -> None:
    opened = recordings.open_recording(recording)
    detected = next(one for one in detect_findings(opened, opened.end_ns) if one.name == name)
    reported = next(one for one in RecordedRun(opened, memory=False).findings if one.name == name)
    assert (detected.fix, reported.fix) == (live, ended)
    assert replace(reported, advice=detected.advice, fix=detected.fix) == detected
    assert reported.for_next_run == reported


def find_fix(recording: Recording) -> str:
    """Return the fix of the straggler, as a screen shows it."""
    source = RecordingSource(recording)
    source.refresh()
    while source.search_findings().is_behind:
        pass
    return next(one.fix for one in source.findings_at(None) if one.name == "straggler")


def detach(event: dict[str, Any]) -> dict[str, Any]:
    """Make the end of the job that of its recording."""
    return {**event, "event": events.Detached.event_name} if event.get("event") == events.JobEnded.event_name else event


def test_a_job_that_goes_on_after_its_recording_has_live_fixes() -> None:
    assert find_fix(recordings.open_recording("held-straggler")).startswith("py-spy record")
    assert find_fix(recordings.rewrite_events("held-straggler", detach)).startswith("py-spy dump --pid")
