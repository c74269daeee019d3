"""``zerotop run``: start a job, record it, and show it in a terminal."""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from zerotop.commands.common.errors import FAILED, USAGE, Problem
from zerotop.commands.common.exit_messages import (
    describe_losses,
    describe_missing_probe,
    describe_place,
    describe_rank_losses,
    keep_exit_code,
    write_messages,
)
from zerotop.commands.common.expectation import ask_expectation
from zerotop.commands.common.gc_pause import freeze_imports
from zerotop.commands.common.past_runs import describe_past
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.job_report import (
    check_place,
    describe_cost,
    describe_expectation,
    describe_worst_finding,
    has_ended,
    report_job,
)
from zerotop.commands.job.launch_script import find_launch
from zerotop.commands.job.launching import NotRecorded, make_recording, run_unrecorded
from zerotop.commands.publishing.companion import accompany, check_targets
from zerotop_probe.outside.job import agent
from zerotop_probe.outside.job.job import JobResult
from zerotop_probe.outside.job.job_signals import die_of
from zerotop_probe.outside.sampling.nccl_inspector import enable_inspector
from zerotop_probe.recording import directory
from zerotop_probe.recording.node_part import PART_OF

if TYPE_CHECKING:
    from zerotop.commands.nodes.joining import Helper

# Of a process that is one task of several.
_TASK_VARIABLES = ("SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE")


def run(options: argparse.Namespace) -> int:
    """Run the job. Return its exit code; 0 if it was left running."""
    _check_options(options)
    try:
        return (
            _run_headless(options)
            if options.headless or options.no_record_output or not has_terminal()
            else _run_with_screen(options)
        )
    except Problem as error:
        if options.meeting is not None:
            options.meeting.end("")
        if not isinstance(error, NotRecorded):
            raise
        if options.require_recording:
            raise Problem(". ".join(filter(None, (f"Not started: {error}", error.advice)))) from error
        run_unrecorded(options.command, error)
        raise


def _check_options(options: argparse.Namespace) -> None:
    """Check the options, pass them on to the job, and meet its other tasks. Raises Problem."""
    if options.report is not None:
        check_place(options.report)
    if options.collector is not None:
        from zerotop.commands.nodes.joining import check_options

        check_options(options)
    if options.expect is not None:
        options.expected = ask_expectation(options.expect)
    if options.no_phase_peaks:
        os.environ[directory.PHASE_PEAKS_VARIABLE] = "0"
    if options.budget is not None:
        os.environ[directory.BUDGET_VARIABLE] = str(options.budget)
    options.targets = check_targets(options)
    if options.nccl_inspector is not None and not os.path.isfile(options.nccl_inspector):
        raise Problem(f"NCCL's Inspector {options.nccl_inspector} is not a file", USAGE)
    options.part_of = options.meeting = None
    if options.job is not None or any(name in os.environ for name in _TASK_VARIABLES):
        from zerotop.commands.nodes.meeting import meet

        options.meeting = meet(options)


def _run_with_screen(options: argparse.Namespace) -> int:
    with _make_recording(options) as recording:
        _enable_inspector(options, recording)
        helpers = _start_helpers(recording, options, quiet=True)
        agent.launch_in_background(recording, options.command)
    with accompany(recording, options.targets):
        with freeze_imports():
            from zerotop.commands.job.watch import watch_job

        code = watch_job(recording)
    for helper in helpers:
        write_messages(*helper.read_said())
    if has_ended(recording):
        if options.meeting is not None:
            options.meeting.end(recording)
        with keep_exit_code(recording):
            _say_end_of_watched(options, recording)
    return code


def _say_end_of_watched(options: argparse.Namespace, recording: str) -> None:
    write_messages(*describe_past(recording))
    write_messages(*describe_missing_probe(recording), *(describe_expectation(recording) if options.expect else []))
    if options.price_per_hour is not None:
        write_messages(*describe_cost(recording))
    if options.report is not None:
        report_job(recording, options.report)


def _run_headless(options: argparse.Namespace) -> int:
    # Import nothing that starts threads: the agent waits for signals in this process.
    with _make_recording(options) as recording, accompany(recording, options.targets):
        _enable_inspector(options, recording)
        helpers = _start_helpers(recording, options)
        end = agent.run_in_foreground(
            recording, options.command, on_message=write_messages, record_output=not options.no_record_output
        )
    for helper in helpers:
        write_messages(*helper.await_end())
    if options.meeting is not None:
        options.meeting.end(recording)
    if not options.part_of:  # else the first node says the rest
        with keep_exit_code(recording):
            _say_end(options, recording, end)
    if end.signal:
        die_of(end.signal)
    return FAILED if end.exit_code is None else end.exit_code


def _say_end(options: argparse.Namespace, recording: str, end: JobResult) -> None:
    """Tell how a job without a screen ended, and what its recording says."""
    messages = [end.text] if end.exit_code != 0 else []
    losses = describe_rank_losses(recording)
    if not losses and directory.has_recording(recording) and (end.lost_records or end.lost_output_bytes):
        losses = [describe_losses(end.lost_records, end.lost_output_bytes)]
    messages += losses
    if end.echo_error:
        messages.append(f"The last part of the job's output could not be passed through: {end.echo_error}.")
    if end.left_ranks:
        ranks = "1 rank still runs" if end.left_ranks == 1 else f"{end.left_ranks} ranks still run"
        messages.append(f"{ranks}, no longer recorded.")
    messages += describe_missing_probe(recording)
    if not end.signal:  # whoever sent one wants an end, not an analysis
        messages += [*describe_worst_finding(recording), *describe_past(recording)]
    if options.expect and not end.signal:
        messages += describe_expectation(recording)
    if options.price_per_hour is not None:
        messages += describe_cost(recording)
    write_messages(*messages, describe_place(recording))
    if options.report is not None:
        report_job(recording, options.report)


def _start_helpers(recording: str, options: argparse.Namespace, *, quiet: bool = False) -> list[Helper]:
    """Start sending the recording to the collector if that was asked for, and collecting if the job has other nodes."""
    helpers: list[Helper] = []
    try:
        if options.collector is not None:
            from zerotop.commands.nodes.joining import Helper

            arguments = [
                "forward",
                os.path.abspath(recording),
                *(["--remove-sent"] if options.part_of and not quiet else []),
            ]
            helpers.append(Helper(arguments, options.collector, options.job, quiet=quiet))
        from zerotop.commands.nodes.ray_cluster import is_for_cluster

        options.launch = find_launch(options.command, os.environ)
        if options.meeting is not None or options.launch or is_for_cluster(options.command, os.environ):
            from zerotop.commands.nodes.hub import prepare_nodes

            helpers += prepare_nodes(recording, options, quiet=quiet)
    except OSError as error:
        write_messages(f"The recording is not shared with other nodes: {error.strerror}")
    return helpers


def _enable_inspector(options: argparse.Namespace, recording: str) -> None:
    if options.nccl_inspector is not None:
        enable_inspector(os.path.abspath(options.nccl_inspector), recording, os.environ)


def _make_recording(options: argparse.Namespace) -> AbstractContextManager[str]:
    facts = {
        "max_bytes": options.max_size,
        "redact_output": options.redact_output,
        directory.STACKS_SETTING: not options.no_stacks,
        directory.OUTPUT_SETTING: not options.no_record_output,
    }
    if options.price_per_hour is not None:
        facts["price_per_hour"] = options.price_per_hour.source_text
    if options.expect is not None:
        facts[directory.EXPECTED] = options.expected
    if options.part_of:
        facts[PART_OF] = options.part_of
    return make_recording(options.command, options.recording, elsewhere=not options.require_recording, **facts)
