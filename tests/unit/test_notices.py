"""The sentences under the header that are about how a job was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory_recording import PlantedRecording
from small_recording import BEGIN_NS, S, make_identity, make_span
from zerotop.analysis.views.recording_source import RecordingSource
from zerotop_probe.recording import events
from zerotop_probe.recording.tables import BOUNDARY, SPANS


def test_who_is_not_entered_and_why_until_it_is(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    numbered, alone = make_identity(3, 103), make_identity(0, 107)
    recording.write_event(recording.node, 1, events.Attached, pid=9, text="Attached to a job.")
    recording.write_event(recording.node, 2, events.NotEntered, rank=3, pid=103, why="it hangs", pending=True)
    recording.write_event(recording.node, 3, events.NotEntered, rank=3, pid=103, why="it still hangs", pending=True)
    recording.write_event(recording.node, 4, events.NotEntered, rank=None, pid=107, why="too early", pending=False)
    recording.write_event(numbered, 5, events.Entered)
    recording.write_event(alone, 6, events.Entered)
    recording.write_event(recording.node, 7, events.Detached)
    source = RecordingSource(recording.open_recording())
    notices = [source.view_at(BEGIN_NS + second * S).job.notices for second in range(1, 7)]
    assert notices == [
        ("Attached to a job.",),
        ("Attached to a job.", "Rank 3 is not entered: it hangs"),
        ("Attached to a job.", "Rank 3 is not entered: it still hangs"),
        ("Attached to a job.", "Rank 3 is not entered: it still hangs", "Process 107 is not entered: too early"),
        ("Attached to a job.", "Process 107 is not entered: too early"),
        ("Attached to a job.",),
    ]
    assert source.view_at(None).job.exit_text == "The recording was ended here, and the job went on."


def test_a_job_that_does_not_begin_to_train_may_only_infer(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_event(recording.node, 0, events.JobStarted, pid=9)
    recording.write_event(recording.node, 90, events.SamplerError, where="nothing", error="else")
    source = RecordingSource(recording.open_recording())
    assert source.view_at(BEGIN_NS + 59 * S).job.exit_text == "Waiting for the training to begin."
    text = source.view_at(BEGIN_NS + 75 * S).job.exit_text
    assert text == "No rank has reported a step in the first 75 s. A program that only infers has no steps."


def test_a_first_start_names_what_it_waits_for(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_event(recording.node, 1, events.JobStarted, pid=9)
    recording.write_event(recording.node, 2, events.Compiling, rank=0, pid=100)
    recording.write_event(recording.node, 3, events.BuildLocked, path="/builds/cpu_adam/lock")
    recording.write_event(recording.node, 4, events.BuildLocked, path="/builds/utils/lock")
    recording.write_event(recording.node, 5, events.Compiling, rank=0, pid=100, extension="cpu_adam")
    recording.write_engine(at=6)
    recording.write_event(recording.node, 9, events.SamplerError, where="nothing", error="else")
    source = RecordingSource(recording.open_recording())
    texts = [source.view_at(BEGIN_NS + second * S).job.exit_text for second in range(1, 7)]
    assert texts[0] == "Waiting for the training to begin."
    assert texts[1] == "Compiling DeepSpeed's operators for 0 s: 1 to 2 minutes, on the first run only."
    assert "no process on their node holds /builds/cpu_adam/lock: they may wait forever" in texts[2]
    assert texts[2].endswith("stop this one, delete it and start it again.")
    assert "holds /builds/cpu_adam/lock and /builds/utils/lock: they may" in texts[3]
    assert texts[4] == "Compiling cpu_adam for 3 s: 1 to 2 minutes, on the first run only."
    assert texts[5] == ""


def test_which_optimizers_make_an_iteration(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    rank = make_identity(0, 100)
    recording.write_event(rank, 1, events.Engine, engine=0, kind="loop", model="Net", optimizer="Adam + SGD")
    both = [
        {"number": 0, "class": "Adam", "parameters": 2000, "steps": 1, "counts": True},
        {"number": 1, "class": "SGD", "parameters": 1, "steps": 1, "counts": True},
    ]
    recording.write_event(rank, 2, events.Optimizers, engine=0, step=0, optimizers=both)
    one = [both[0], both[1] | {"counts": False}]
    recording.write_event(rank, 3, events.Optimizers, engine=0, step=9, optimizers=one)
    empty = [both[0], both[1] | {"counts": False, "parameters": 0}]
    recording.write_event(rank, 4, events.Optimizers, engine=0, step=10, optimizers=empty)
    recording.write_event(rank, 5, events.Goodbye, lost=0)
    source = RecordingSource(recording.open_recording())
    notices = [source.view_at(BEGIN_NS + second * S).job.notices for second in range(1, 5)]
    assert notices == [
        (),
        ("An iteration ends when Adam (2,000 parameters) and SGD (1 parameter) have each stepped since the last one.",),
        (
            "An iteration is a step of Adam (2,000 parameters). SGD (1 parameter) does not count: the others have stepped"
            " many times meanwhile.",
        ),
        (),
    ]


def test_a_loop_without_an_optimizer(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_event(make_identity(0, 100), 1, events.Engine, engine=0, kind="loop", model="Net", optimizer="")
    recording.write_event(make_identity(0, 100), 2, events.Goodbye, lost=0)
    (notice,) = RecordingSource(recording.open_recording()).view_at(None).job.notices
    assert notice.startswith("This loop has no optimizer")


@pytest.mark.parametrize(("backwards", "has_step", "is_said"), [(100, False, True), (99, False, False), (100, True, False)])
def test_an_optimizer_that_never_steps(tmp_path: Path, backwards: int, has_step: bool, is_said: bool) -> None:
    """For example where a script lacks optimizer.step()."""
    recording = PlantedRecording(tmp_path)
    rank = make_identity(0, 100)
    recording.write_event(rank, 1, events.Engine, engine=0, kind="loop", model="Net", optimizer="AdamW")
    spans = [make_span(2 + number, 2.5 + number, "backward") for number in range(backwards)]
    steps = [make_span(2 + backwards, 2.5 + backwards, "step", flags=BOUNDARY)] if has_step else []
    recording.write_records(SPANS, rank, [*spans, *steps])
    recording.write_event(rank, 199, events.Goodbye, lost=0)
    source = RecordingSource(recording.open_recording())
    sentence = (
        f"None of {backwards} backwards was followed by a step of AdamW so far: without steps there are no iterations."
    )
    assert source.view_at(None).job.notices == ((sentence,) if is_said else ())
    assert source.view_at(BEGIN_NS + 10 * S).job.notices == ()  # 8 backwards


def test_a_job_that_trains_nothing(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    recording.write_event(recording.node, 1, events.JobStarted, pid=9)
    recording.write_event(recording.node, 2, events.JobEnded, exit_code=0, text="The job ended.")
    source = RecordingSource(recording.open_recording())
    assert source.view_at(BEGIN_NS + S).job.notices == ()
    assert [notice[:15] for notice in source.view_at(None).job.notices] == ["No training was"]


def test_pinned_memory_that_an_older_pytorch_does_not_count(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    rank = make_identity(0, 100)
    recording.write_event(rank, 1, events.Hello, torch="2.4.1")
    recording.write_event(
        rank, 2, events.Tensors, engine=0, step=0, when="init", host={}, host_pinned={}, pinned_allocator=None
    )
    pinned = {"optimizer_state": 1 << 30}
    recording.write_event(
        rank, 3, events.Tensors, engine=0, step=0, when="x", host={}, host_pinned=pinned, pinned_allocator=None
    )
    source = RecordingSource(recording.open_recording())
    assert source.view_at(BEGIN_NS + 2 * S).job.notices == ()
    (notice,) = source.view_at(None).job.notices
    assert notice.startswith("PyTorch 2.4.1 does not count pinned memory")


def test_sharding_by_an_unknown_version_of_pytorch_is_reported_once(tmp_path: Path) -> None:
    recording = PlantedRecording(tmp_path)
    for rank in (make_identity(0, 100), make_identity(1, 101)):
        recording.write_event(rank, 1, events.Hello, torch="9.9.0")
        facts = {"kind": "loop", "model": "Net", "optimizer": "SGD", "unread": {"sharding": "AttributeError: fsdp_params"}}
        recording.write_event(rank, 2, events.Engine, engine=0, **facts)
    (notice,) = RecordingSource(recording.open_recording()).view_at(None).job.notices
    assert notice.startswith("PyTorch 9.9.0 keeps FSDP's parameters in a way that zerotop does not know")
