"""The sentences under the header that are about how a job was recorded."""

from __future__ import annotations

from pathlib import Path

from memory_recording import Recording
from small_recording import BEGIN_NS, S, identity
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop_probe.recording import events


def test_who_is_not_entered_and_why_until_it_is(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    numbered, alone = identity(3, 103), identity(0, 107)
    recording.event(recording.node, 1, events.ATTACHED, pid=9, text="Attached to a job.")
    recording.event(recording.node, 2, events.NOT_ENTERED, rank=3, pid=103, why="it hangs", pending=True)
    recording.event(recording.node, 3, events.NOT_ENTERED, rank=3, pid=103, why="it still hangs", pending=True)
    recording.event(recording.node, 4, events.NOT_ENTERED, rank=None, pid=107, why="too early", pending=False)
    recording.event(numbered, 5, events.ENTERED)
    recording.event(alone, 6, events.ENTERED)
    recording.event(recording.node, 7, events.DETACHED)
    source = RecordingSource(recording.read())
    said = [source.view_at(BEGIN_NS + second * S).job.notices for second in range(1, 7)]
    assert said == [
        ("Attached to a job.",),
        ("Attached to a job.", "Rank 3 is not entered: it hangs"),
        ("Attached to a job.", "Rank 3 is not entered: it still hangs"),
        ("Attached to a job.", "Rank 3 is not entered: it still hangs", "Process 107 is not entered: too early"),
        ("Attached to a job.", "Process 107 is not entered: too early"),
        ("Attached to a job.",),
    ]
    assert source.view_at(None).job.exit_text == "The recording was ended here, and the job went on."


def test_what_a_first_start_waits_for(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    recording.event(recording.node, 1, events.JOB_STARTED, pid=9)
    recording.event(recording.node, 2, events.COMPILING, rank=0, pid=100)
    recording.event(recording.node, 3, events.BUILD_LOCKED, path="/builds/cpu_adam/lock")
    recording.event(recording.node, 4, events.BUILD_LOCKED, path="/builds/utils/lock")
    recording.event(recording.node, 5, events.COMPILING, rank=0, pid=100)
    recording.engine(at=6)
    recording.event(recording.node, 9, events.SAMPLER_ERROR, where="nothing", error="else")
    source = RecordingSource(recording.read())
    said = [source.view_at(BEGIN_NS + second * S).job.exit_text for second in range(1, 7)]
    assert said[0] == "Waiting for the training to begin."
    assert said[1].startswith("Compiling DeepSpeed's operators")
    assert "no process on their node holds /builds/cpu_adam/lock: they may wait forever" in said[2]
    assert said[2].endswith("stop this one, delete it and start it again.")
    assert "holds /builds/cpu_adam/lock and /builds/utils/lock: they may" in said[3]
    assert said[4] == said[1]
    assert said[5] == ""
