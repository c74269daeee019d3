"""The line that is new in a phase which takes longer than before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import recordings
from declared_events import check_event
from small_recording import S, make_identity
from zerotop.analysis.findings import Finding, detect_findings
from zerotop.analysis.findings.support.lines.new_lines import find_new_line, has_new_line
from zerotop.recording.reader import Recording
from zerotop_probe.recording.events import Stacks

Stack = tuple[tuple[str, int, str, bool], ...]

LOOP = ("train.py", 90, "main", True)
LINEAR = (("torch/nn/modules/linear.py", 134, "Linear.forward", False), ("net.py", 28, "Net.forward", True), LOOP)
ROWS = (("torch/_tensor.py", 5, "Tensor.item", False), ("net.py", 31, "Net.forward", True), LOOP)
COUNT = (("net.py", 18, "count", True), ("net.py", 33, "Net.forward", True), LOOP)
EXPERT = (*LINEAR[:2], ("net.py", 40, "Net.route", True), LOOP)


def sample(counts: dict[Stack, int]) -> list[Stacks]:
    """Return an event with samples of stacks, innermost frame first."""
    frames = list(dict.fromkeys(frame for stack in counts for frame in stack))
    facts = {
        "where": "forward",
        "why": "share",
        "samples": sum(counts.values()),
        "frames": [dict(zip(("file", "line", "function", "own"), frame, strict=True)) for frame in frames],
        "stacks": [
            {"count": count, "seconds": count / 10, "frames": [frames.index(frame) for frame in stack]}
            for stack, count in counts.items()
        ],
    }
    return [Stacks(facts, 0, make_identity(0))]


@pytest.mark.parametrize(
    ("before", "levels", "on_cpu", "line"),
    [
        (0, (0.02, 0.10), True, 18),
        (0, (0.02, 0.10), False, None),  # the host may have been ahead of the GPU
        (0, (0.05, 0.10), True, None),  # it may have taken nearly as long before
        (20, (0.02, 0.10), True, 18),
    ],
)
def test_a_line_that_takes_longer_than_everything_did_before(
    before: int, levels: tuple[float, float], on_cpu: bool, line: int | None
) -> None:
    """A short run has few samples before the change, or an event that began before it."""
    found = find_new_line(sample({LINEAR: before}), sample({LINEAR: 40, COUNT: 60}), levels, is_on_cpu=on_cpu)
    assert (found.line[1] if found is not None else None) == line
    assert found is None or found.is_new is (before > 0)


@pytest.mark.parametrize(
    ("before", "since", "levels", "line"),
    [
        ({LINEAR: 40}, {LINEAR: 70, COUNT: 30}, (0.07, 0.10), 18),
        ({LINEAR: 40}, {LINEAR: 70, ROWS: 30}, (0.07, 0.10), 31),  # also where it calls PyTorch
        ({LINEAR: 40}, {LINEAR: 40, EXPERT: 60}, (0.04, 0.10), 40),  # the innermost line that is new
        ({LINEAR: 40}, {LINEAR: 95, COUNT: 5}, (0.07, 0.10), None),  # too little of the added time
        ({LINEAR: 40}, {LINEAR: 40, COUNT: 60}, (0.09, 0.10), None),  # more than that: samples of other steps
        ({LINEAR: 30, COUNT: 10}, {LINEAR: 70, COUNT: 30}, (0.07, 0.10), None),  # it took time before
        ({LINEAR: 40}, {LINEAR: 100}, (0.07, 0.10), None),
        ({LINEAR: 10}, {LINEAR: 70, COUNT: 30}, (0.07, 0.10), None),  # too few samples
        ({LINEAR: 40}, {LINEAR: 12, COUNT: 6}, (0.07, 0.10), None),
    ],
)
def test_the_new_line(
    before: dict[Stack, int],
    since: dict[Stack, int],
    levels: tuple[float, float],
    line: int | None,
) -> None:
    found = find_new_line(sample(before), sample(since), levels)
    assert (found.line[1] if found is not None else None) == line


CALLS = (("torch/autograd/__init__.py", 381, "grad", False), ("train.py", 76, "main", True))
SYNCHRONIZE = (("torch/cuda/__init__.py", 1083, "synchronize", False), *CALLS[1:])


@pytest.mark.parametrize(
    ("before", "since", "moved"),
    [
        ({LINEAR: 80}, {LINEAR: 85, COUNT: 15}, True),  # however little of the added time it explains
        ({LINEAR: 70, COUNT: 10}, {LINEAR: 70, COUNT: 30}, False),
        ({LINEAR: 80}, {LINEAR: 95, COUNT: 5}, False),  # it may have been missed before by chance
        ({LINEAR: 80}, {LINEAR: 100}, False),
    ],
)
def test_whether_stacks_have_moved(before: dict[Stack, int], since: dict[Stack, int], moved: bool) -> None:
    assert has_new_line(sample(before), sample(since)) == moved


@pytest.mark.parametrize(
    ("stack", "before", "line"),
    [
        (CALLS, 40, 76),
        (CALLS, 20, None),  # too few samples before: the host may have waited elsewhere
        (COUNT, 40, None),  # it may compare a tensor
        (SYNCHRONIZE, 40, None),
    ],
)
def test_where_the_gpu_may_have_more_to_do_a_new_line_has_to_launch_it(stack: Stack, before: int, line: int | None) -> None:
    found = find_new_line(sample({LINEAR: before}), sample({LINEAR: 70, stack: 30}), (0.07, 0.10), is_gpu_idle=False)
    assert (found.line[1] if found is not None else None) == line


HIT, SUM, REDUCE, READ, AGAIN = (
    (*inner, ("train.py", line, "main", True))
    for line, *inner in (
        (66, ("torch/nn/modules/module.py", 9, "Module.__call__", False)),
        (72, ("torch/_tensor.py", 5, "sum", False)),
        (73, ("torch/distributed/distributed_c10d.py", 9, "all_reduce", False)),
        (74, ("torch/cuda/__init__.py", 1083, "synchronize", False)),
        (80, ("torch/_tensor.py", 5, "sum", False)),
    )
)


@pytest.mark.parametrize(
    ("since", "is_idle", "line"),
    [
        ({HIT: 40, SUM: 8, REDUCE: 12, READ: 20}, False, 73),  # it waits for the work that the others launch
        ({HIT: 70, SUM: 8, REDUCE: 12, READ: 10}, True, 73),
        ({HIT: 60, READ: 30, SUM: 10}, False, 72),
        ({HIT: 60, READ: 40}, False, None),
        ({HIT: 60, READ: 38, SUM: 2}, False, None),  # only a wait, which may have been elsewhere before
        ({HIT: 70, SUM: 15, AGAIN: 15}, True, None),  # not of one loop
    ],
)
def test_lines_next_to_each_other_share_the_time(since: dict[Stack, int], is_idle: bool, line: int | None) -> None:
    found = find_new_line(sample({HIT: 80}), sample(since), (0.04, 0.1), is_gpu_idle=is_idle)
    assert (found.line[1] if found is not None else None) == line


def write_samples(folder: Path, begin_ns: int, end_ns: int, counts: dict[Stack, int], where: str) -> None:
    """Write samples of rank 0 between two times (unix nanoseconds)."""
    (path,) = folder.glob("events-rank0-*.jsonl")
    (source,) = [one for one in Recording.open(folder).sources["spans"] if one.rank == 0]
    times = {name: time_ns - source.offset_ns for name, time_ns in (("begin_ns", begin_ns), ("end_ns", end_ns))}
    event = {**sample(counts)[0].facts, **times, "time_ns": times["end_ns"], "event": "stacks", "where": where}
    check_event(event)
    lines = [*path.read_text().splitlines(), json.dumps(event)]
    path.write_text("".join(f"{line}\n" for line in sorted(lines, key=lambda line: json.loads(line).get("time_ns", 0))))


def leave_gpu(folder: Path) -> None:
    """Make it the recording of a job on the CPU."""
    (path,) = folder.glob("events-rank0-*.jsonl")
    path.write_text(path.read_text().replace('"device": "cuda:0"', '"device": "cpu"'))
    for table in ("device_times", "gpus", "gpu_processes", "allocator"):
        for file in folder.glob(f"{table}-*.rec"):
            file.unlink()


@pytest.mark.parametrize(
    ("where", "new", "on_gpu", "is_named"),
    [
        ("step", 60, False, True),
        ("unknown phase", 40, False, True),
        ("step", 0, False, False),
        ("step", 20, False, False),  # too little, but no sign that nothing has changed
        ("step", 60, True, False),  # the GPU has more work than before, and the line may wait for that
    ],
)
def test_a_change_names_it(tmp_path: Path, where: str, new: int, on_gpu: bool, is_named: bool) -> None:
    folder = recordings.unpack_to_folder("hand-foreach", tmp_path)
    info = json.loads((folder / "session.json").read_text())
    (folder / "session.json").write_text(json.dumps(info | {"stacks": True}))
    if not on_gpu:
        leave_gpu(folder)

    def find_shift() -> Finding:
        recording = Recording.open(folder)
        return next(one for one in detect_findings(recording, recording.end_ns) if one.name == "iteration_shift")

    usual = find_shift()
    write_samples(folder, usual.begin_ns - 2 * S, usual.begin_ns - S, {LINEAR: 60}, where)
    write_samples(folder, usual.begin_ns + S // 10, usual.begin_ns + S, {LINEAR: 100, COUNT: new}, where)
    shift = find_shift()
    assert shift.headline.endswith(": net.py:18") is is_named
    assert ("that at net.py:18 in count" in shift.details) is is_named
    assert ("no cause was found" in shift.details) is (new == 0 or on_gpu)
