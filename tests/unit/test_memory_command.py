"""``zerotop memory``: the same facts as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import recordings
from memory_recording import GIB, PARTS, PlantedRecording, gib_to_bytes, make_reading, record_two_steps
from small_recording import BEGIN_NS, S, make_identity
from zerotop.cli import main
from zerotop_probe.recording import directory, events


def record_ended_job(folder: Path, *readings: Any) -> PlantedRecording:
    """The usual recording with its recording file, ended after second 30."""
    path = folder / "job"
    directory.create_recording(["deepspeed", "train.py"], path=str(path), launcher="deepspeed")
    info = json.loads((path / directory.SESSION_FILE).read_text())
    info |= {"boot": "boot", "clock": {"unix_ns": BEGIN_NS, "monotonic_ns": 0}}
    (path / directory.SESSION_FILE).write_text(json.dumps(info))
    recording = record_two_steps(path, *readings)
    recording.write_event(recording.node, 30, events.JobEnded, exit_code=0, signal=None, oom_kills=0, text="")
    return recording


def run_memory(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["memory", *arguments]) == 0
    return capsys.readouterr().out


def test_the_rule_of_thumb_is_beside_the_peak_of_a_step_where_another_phase_has_the_highest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = run_memory(capsys, str(recordings.find_packed_file("evaluation-graphs")))
    assert "Peak of rank 0: 21.206 GiB allocated, in several phases of step 420" in report
    assert "= 16.074 GiB; measured 16.841 in backward of step 331" in report


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_memory(capsys, str(record_ended_job(tmp_path).folder))
    lines = report.splitlines()
    setup = "1,073.7 M parameters, ZeRO-2, bf16, batch 1 x 1 x 1 (micro-batch x accumulation x ranks)"
    assert lines[0] == f"job, at the end of step 1: {setup}"
    table = {line.split("  ")[1]: line.split() for line in lines if line.startswith("  ")}
    assert table["free"][1] == "51.500"
    assert table["total"][-1] == "80.000"
    assert "parameters 2.000 2.000 +0.000 tensors counted in step 0, after" in " ".join(report.split())
    assert "Peak of rank 0: 19.500 GiB allocated, in backward of step 1" in report
    assert "Rule of thumb: parameters 2.000 + optimizer 12.000 + the larger of gradients 2.000" in report
    assert "Host memory of rank 0 on node1, process 100" in report
    assert "Allocator of rank 0: 0 retries" in report
    assert "offload_optimizer=none" in next(line for line in lines if line.endswith("this job"))
    assert all(line == line.rstrip() for line in lines)


def test_one_retry_is_no_retries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reading = make_reading(29.7, 15, 22, step=1, retries=1, ooms=1)
    report = run_memory(capsys, str(record_ended_job(tmp_path, reading).folder))
    assert "Allocator of rank 0: 1 retry, 1 out-of-memory error" in report


def test_figures_that_several_ranks_share_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_memory(capsys, str(recordings.find_packed_file("x4-z3"))).splitlines()
    assert "  The same: Peak of rank 1; Peak of rank 2; Peak of rank 3." in lines
    (gpus,) = [line for line in lines if line.startswith("  The same: GPU")]
    assert [rank for rank in range(4) if f"rank {rank}" in gpus] == [1, 2, 3]
    assert sum(line.startswith("  total") for line in lines) == 1
    # These differ.
    assert sum(line.startswith("Host memory of rank") for line in lines) == 4


def test_host_memory_has_no_row_of_zeros(capsys: pytest.CaptureFixture[str]) -> None:
    text = run_memory(capsys, str(recordings.find_packed_file("gpu-leak")))
    host = text[text.index("Host memory of rank 0") :].split("\n\n")[0]
    assert [line.split("  ")[1] for line in host.splitlines()[1:]] == ["Python, batches, other", "resident"]
    offloaded = run_memory(capsys, str(recordings.find_packed_file("z3-offload-all")))
    assert "  master weights                           1.840     1.840" in offloaded
    assert "PyTorch's pinned allocator held 6.231 GiB" in offloaded


def test_json_has_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report: dict[str, Any] = json.loads(run_memory(capsys, str(record_ended_job(tmp_path).folder), "--json"))
    (gpu,) = report["gpus"]
    rows = {row["key"]: row["bytes"] for row in gpu["rows"]}
    assert sum(rows.values()) == gpu["total_bytes"] == gib_to_bytes(80)
    assert {name: rows[name] / GIB for name in PARTS} == PARTS
    differences = {each["key"]: each["difference_bytes"] for each in gpu["differences"]}
    assert (differences["parameters"], differences["buffers"]) == (0, None)
    assert report["at_peak"][0]["peak"]["allocated_bytes"] == gib_to_bytes(19.5)
    assert report["rules"]["0"]["bytes"] == gib_to_bytes(2 + 12 + 4.5)
    assert [(each["options"], each["this_job"]) for each in report["estimates"]] == [
        ("offload_optimizer=cpu", False),
        ("offload_optimizer=none", True),
    ]
    assert (report["step"], report["unix_ns"], report["post_mortem"]) == (1, BEGIN_NS + 29 * S, None)


def test_at_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(record_ended_job(tmp_path).folder)
    assert json.loads(run_memory(capsys, folder, "--at", "0", "--json"))["unix_ns"] == BEGIN_NS + 19 * S
    assert main(["memory", folder, "--at", "7"]) == 1
    assert capsys.readouterr().err == ("zerotop: Step 7 did not finish in this recording: the last finished step is 1\n")


def test_a_failure_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = record_ended_job(tmp_path)
    facts = {
        "requested_bytes": gib_to_bytes(60),
        "free_bytes": gib_to_bytes(51),
        "limit_bytes": gib_to_bytes(79),
        "phase": "forward",
        "step": 2,
    }
    recording.write_event(make_identity(0), 29.5, events.OutOfMemory, device=0, micro_step=0, **facts)
    lines = run_memory(capsys, str(recording.folder)).splitlines()
    assert lines[0].startswith("job, at the failure: ")
    assert lines[2] == "Out of memory: rank 0, GPU 0, step 2, micro-step 0, forward; the job ended"
    assert "  The forward requested 60.00 GiB; 51.00 GiB of 79.00 GiB were free." in lines
    assert json.loads(run_memory(capsys, str(recording.folder), "--json"))["post_mortem"]["requested_bytes"] == gib_to_bytes(
        60
    )


def test_a_recording_with_nothing_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory.create_recording(["true"], path=str(tmp_path / "empty"), launcher="python")
    report = run_memory(capsys, str(tmp_path / "empty"))
    assert report.splitlines()[0] == "empty, at the end: no training was recorded"


def test_a_recording_without_a_sampler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record_ended_job(tmp_path).folder
    for path in folder.glob("*-node-*.rec"):
        path.unlink()
    report = run_memory(capsys, str(folder))
    assert "offload_optimizer=none" in report


def test_a_killed_rank_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recordings.find_packed_file("cpu-dead"))
    lines = run_memory(capsys, path).splitlines()
    assert lines[2] == "Rank 1 (PID 29690) was killed by SIGKILL after step() of step 19."
    assert "Find out what ends processes on the node" in lines[4]
    report = json.loads(run_memory(capsys, path, "--json"))
    assert (report["failure"]["kind"], report["failure"]["setting"], report["post_mortem"]) == (
        "signal",
        "",
        None,
    )
    assert json.loads(run_memory(capsys, path, "--at", "3", "--json"))["failure"] is None


def test_parts_of_an_update(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_memory(capsys, str(recordings.find_packed_file("z2-offload")))
    assert "Inside step() of rank 0, median 0.1" in report
    assert "the GPU is idle for at least 0.0" in report


def test_the_state_of_each_of_several_optimizers_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = record_ended_job(tmp_path)
    state = gib_to_bytes(PARTS["optimizer_state"])
    states = [{"class": "AdamW", "device": state - GIB, "host": 0}, {"class": "SGD", "device": GIB, "host": 0}]
    recording.write_inventory(21, "after_update", PARTS, optimizer_states=states)
    lines = run_memory(capsys, str(recording.folder)).splitlines()
    assert f"  Optimizer state: {PARTS['optimizer_state'] - 1:.2f} GiB of AdamW, 1.00 GiB of SGD." in lines
    assert sum(line.startswith("  Optimizer state:") for line in lines) == 1  # none of it is in host memory
    assert main(["report", str(recording.folder), "-o", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").read_text().count("GiB of AdamW, 1.00 GiB of SGD.") == 1
