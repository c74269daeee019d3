"""Who ended a job's processes, by what Slurm and launchers print. Slurm's lines are from jobs of other people."""

from __future__ import annotations

from pathlib import Path

import pytest

from memory_recording import record_two_steps
from small_recording import BEGIN_NS, S
from zerotop.analysis.failures.senders import Reason, find_senders
from zerotop.analysis.findings import detect_findings
from zerotop.recording.output.tail import PrintedLine
from zerotop_probe.recording import events

TIME = "slurmstepd: error: *** JOB 42221 ON clr1247 CANCELLED AT 2022-04-14T16:20:46 DUE TO TIME LIMIT ***"
BY_HAND = "slurmstepd: error: *** STEP 7.0 ON node022 CANCELLED AT 2023-05-30T19:46:40 ***"
MEMORY = (
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=6800197.batch. Some of your processes may have been killed by"
    " the cgroup out-of-memory handler."
)
NEW_MEMORY = "slurmstepd: error: Detected 2 oom_kill events in StepId=1034.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("line", "name", "reason", "pid", "job"),
    [
        (TIME, "Slurm", Reason.TIME, None, "42221"),
        (TIME.replace("TIME LIMIT", "PREEMPTION"), "Slurm", Reason.PREEMPTED, None, "42221"),
        (TIME.replace("TIME LIMIT", "NODE FAILURE, SEE SLURMCTLD LOG"), "Slurm", Reason.NODE, None, "42221"),
        (BY_HAND, "Slurm", Reason.CANCELLED, None, "7.0"),
        (MEMORY, "Slurm", Reason.MEMORY, None, "6800197"),
        (NEW_MEMORY, "Slurm", Reason.MEMORY, None, "1034"),
        ("srun: error: c4-n1: task 1: Out Of Memory", "Slurm", Reason.MEMORY, None, None),
        (
            "W1125 21:53:45.649000 7 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 1767 closing"
            " signal SIGTERM",
            "torchrun",
            Reason.PEER,
            1767,
            None,
        ),
        (
            "[2026-11-25 21:53:45,649] [INFO] [launch.py:335:sigkill_handler] Killing subprocess 1768",
            "DeepSpeed's launcher",
            Reason.PEER,
            1768,
            None,
        ),
    ],
)
def test_the_sender_of_a_signal_is_read_from_the_output(
    line: str, name: str, reason: Reason, pid: int | None, job: str | None
) -> None:
    (sender,) = find_senders([PrintedLine(5, "step 7: loss 0.3"), PrintedLine(9, line)])
    assert sender == (9, name, reason, pid, job)


def test_lines_that_only_mention_a_signal_name_no_sender() -> None:
    lines = ["CANCELLED orders: 7", "slurmstepd: error: Detected 0 oom-kill event(s) in StepId=7", "Out Of Memory"]
    assert list(find_senders([PrintedLine(1, line) for line in lines])) == []


def find_cancelled(folder: Path, output: str) -> list[tuple[str, str]]:
    recording = record_two_steps(folder)
    recording.write_output(32, f"step 3\n{output}\n")
    recording.write_event(recording.node, 33, events.JobEnded, exit_code=1, signal=None, text="The job failed.")
    found = detect_findings(recording.open_recording(), BEGIN_NS + 40 * S)
    return [(one.headline, one.fix) for one in found if one.name == "job_cancelled"]


def test_a_job_whose_time_was_over(tmp_path: Path) -> None:
    ((headline, fix),) = find_cancelled(tmp_path, f"{TIME}\n{MEMORY}")
    assert headline == "Slurm ended job 42221: its time limit was reached"
    assert fix.startswith("#SBATCH --time")


def test_a_job_that_used_too_much_memory(tmp_path: Path) -> None:
    ((headline, _),) = find_cancelled(tmp_path, "srun: error: c4-n1: task 1: Out Of Memory")
    assert headline == "Slurm ended processes: they exceeded their memory limit"


@pytest.mark.parametrize("output", [BY_HAND, "training done"])
def test_a_job_that_nobody_but_its_user_ended(tmp_path: Path, output: str) -> None:
    assert find_cancelled(tmp_path, output) == []
