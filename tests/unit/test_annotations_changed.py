"""Real recordings in which a cause was written in afterwards: what could not be staged on the machines at hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import recordings
from zerotop.analysis.annotations import Annotation, annotations
from zerotop.session.reader import Session

Rows = np.ndarray[Any, Any]


def change(folder: Path, table: str, write: Callable[[Rows], None]) -> None:
    """Lets ``write`` change the records of a table of rank 0 or of a sampler."""
    (path,) = [*folder.glob(f"{table}-rank0-*.rec"), *folder.glob(f"{table}-node-*.rec")]
    header, _, records = path.read_bytes().partition(b"\n")
    rows = np.frombuffer(records, [tuple(field) for field in json.loads(header)["dtype"]]).copy()
    write(rows)
    path.write_bytes(header + b"\n" + rows.tobytes())


def found(folder: Path, name: str) -> list[Annotation]:
    session = Session.open(folder)
    return [finding for finding in annotations(session, session.end_ns) if finding.name == name]


def test_a_nearly_full_device_of_which_a_third_is_used(tmp_path: Path) -> None:
    folder = recordings.as_directory("z2", tmp_path)

    def hold(rows: Rows) -> None:
        late = rows["step"] >= 4
        rows["reserved_bytes"][late] = rows["reserved_peak_bytes"][late] = 130 * 10**9

    change(folder, "allocator", hold)
    (fragmented,) = found(folder, "fragmentation")
    assert fragmented.step == 4
    assert "expandable segments are off" in fragmented.sentence
    assert fragmented.advice == "Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."


def test_a_device_with_room_is_not_called_fragmented(tmp_path: Path) -> None:
    folder = recordings.as_directory("z2", tmp_path)

    def hold(rows: Rows) -> None:
        rows["reserved_bytes"] = rows["reserved_peak_bytes"] = 100 * 10**9

    change(folder, "allocator", hold)
    assert found(folder, "fragmentation") == []


def test_retries_are_told_at_each_tenfold(tmp_path: Path) -> None:
    folder = recordings.as_directory("z2", tmp_path)

    def flush(rows: Rows) -> None:
        rows["retries"] = np.maximum(0, rows["step"] - 3)

    change(folder, "allocator", flush)
    assert [(finding.step, finding.evidence["retries"]) for finding in found(folder, "allocator_retries")] == [
        (4, 1.0),
        (13, 10.0),
    ]


def test_clocks_that_were_slowed_are_the_cause(tmp_path: Path) -> None:
    """The staged sleep of gpu-slow, with a GPU that says it is too hot while it lasts."""
    folder = recordings.as_directory("gpu-slow", tmp_path)
    session = Session.open(folder)
    (shift,) = found(folder, "iteration_shift")
    (gpus,) = session.sources["gpus"]
    since_ns = shift.begin_ns - gpus.offset_ns

    def heat(rows: Rows) -> None:
        rows["throttle_reasons"] = np.where(rows["time_ns"] > since_ns, 0x40, 0)

    change(folder, "gpus", heat)
    (shift,) = found(folder, "iteration_shift")
    assert "the GPU slowed its clocks down in 100 % of samples" in shift.sentence


def test_a_job_that_was_being_stopped_has_no_dead_rank(tmp_path: Path) -> None:
    folder = recordings.as_directory("cpu-dead", tmp_path)
    (dead,) = found(folder, "dead_rank")
    assert dead.ranks == (1,)
    (path,) = folder.glob("events-node-*.jsonl")
    header, *lines = path.read_text().splitlines()
    gone = next(json.loads(line) for line in lines if "rank_gone" in line)
    stop = json.dumps({"time_ns": gone["time_ns"] - 10**9, "event": "stop_sent", "signal": "SIGTERM"})
    path.write_text("\n".join([header, stop, *lines]) + "\n")
    assert found(folder, "dead_rank") == []
