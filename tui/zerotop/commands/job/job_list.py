"""The list of this node's jobs that ``zerotop attach`` prints."""

from __future__ import annotations

import json
import shlex
import time
from typing import Any

from zerotop.analysis.text_tables import align_columns
from zerotop.commands.common.escape import escape_unprintable
from zerotop.commands.common.recording_lookup import find_recording
from zerotop.recording import catalog
from zerotop.recording.reader import Recording, RecordingError
from zerotop_probe.outside.attaching import gpus
from zerotop_probe.outside.attaching.attaching import format_age
from zerotop_probe.outside.attaching.jobs import FoundJob, find_jobs, find_kernel_jobs, read_zero_stage
from zerotop_probe.outside.job import job_control
from zerotop_probe.recording import events, redact

_HEADINGS = ("PID", "LAUNCHER", "RANKS", "GPUS", "AGE", "ZERO", "RECORDING", "SCRIPT")


def print_jobs(*, as_json: bool) -> int:
    """Print this node's jobs, youngest first. Return 0."""
    used = gpus.read_process_gpus()
    rows = [_describe_job(job, used) for job in (*find_jobs(), *find_kernel_jobs())] + _find_other_jobs()
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(
            "No DeepSpeed, torchrun or accelerate job and no Jupyter kernel with PyTorch is running here."
            " zerotop attach PID accepts any Python process."
        )
        return 0
    print(*align_columns([_HEADINGS, *map(_format_row, rows)], "><<<><<<"), sep="\n")
    print("\nzerotop attach PID watches a job from outside; --enter injects the probe into its ranks.")
    return 0


def _describe_job(job: FoundJob, used: dict[int, list[int]]) -> dict[str, Any]:
    recording = find_recording(job)
    return {
        "pid": job.root.pid,
        "launcher": job.launcher,
        "ranks": [{"rank": rank.rank, "pid": rank.process.pid} for rank in job.ranks],
        "gpus": _find_gpus(job, used),
        "age_s": round(job.age_s, 1),
        "script": job.script_path,
        "command": redact.redact_command(job.command),
        "zero_stage": read_zero_stage(job),
        "recording": None if recording is None else recording.name,
    }


def _find_other_jobs() -> list[dict[str, Any]]:
    """Return rows for live recordings of jobs without a launcher, such as a plain ``python train.py``."""
    jobs = [*find_jobs(), *find_kernel_jobs()]
    shown = {find_recording(job) for job in jobs}
    listed = {process for job in jobs for process in (job.root, *(rank.process for rank in job.ranks))}
    rows = []
    for path in catalog.list_recordings():
        facts = job_control.read_facts(str(path))
        if path in shown or facts.job is None or facts.job in listed or not facts.job.is_alive():
            continue
        try:
            recording = Recording.open(path)
        except RecordingError:
            continue
        command = [str(word) for word in recording.info.get("command") or ()]
        script = next((word for word in command if word.endswith(".py")), "")
        attached = recording.events_of(events.Attached)  # to a job that is older than the recording
        about = {
            "pid": facts.job.pid,
            "launcher": "python",
            "ranks": list_ranks(recording),
            "gpus": [],
            "age_s": None if attached else round((time.time_ns() - recording.begin_ns) / 1e9, 1),
            "zero_stage": None,
        }
        rows.append({**about, "script": script, "command": command, "recording": path.name})
    return rows


def list_ranks(recording: Recording) -> list[dict[str, Any]]:
    """Return the ranks that have reported to a recording, as ``--json`` prints them; of a restarted one the last."""
    pids = {event.writer.rank: event.writer.pid for event in recording.events_of(events.Hello)}
    return [{"rank": rank, "pid": pids[rank]} for rank in sorted(pids)]


def _find_gpus(job: FoundJob, used: dict[int, list[int]]) -> list[str]:
    by_nvml = sorted({index for rank in job.ranks for index in used.get(rank.process.pid, ())})
    if by_nvml or not used:
        return [str(index) for index in by_nvml]
    assigned = (gpus.find_launcher_gpu(rank.environment) for rank in job.ranks)
    return sorted({name for name in assigned if name is not None})


def _format_row(row: dict[str, Any]) -> list[str]:
    ranks = [str(rank["rank"]) for rank in row["ranks"] if rank["rank"] is not None]
    cells = (
        str(row["pid"]),
        row["launcher"],
        f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else "".join(ranks) or "-",
        ",".join(row["gpus"]) or "-",
        "-" if row["age_s"] is None else format_age(row["age_s"]),
        "-" if row["zero_stage"] is None else str(row["zero_stage"]),
        row["recording"] or "-",
        row["script"] or shlex.join(row["command"]),
    )
    return [escape_unprintable(cell) for cell in cells]
