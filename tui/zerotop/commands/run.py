"""``zerotop run``: starts a job, records it, and shows it where there is a terminal."""

from __future__ import annotations

import argparse
import os

from zerotop.analysis.views.job_exit import Ending
from zerotop.commands.common.errors import FAILED
from zerotop.commands.common.exit_messages import describe_end, write_messages
from zerotop.commands.common.gc_pause import freeze_imports
from zerotop.commands.common.terminal import has_terminal
from zerotop.commands.job.launching import make_session
from zerotop_probe.outside.job import agent
from zerotop_probe.recording import directory


def run(options: argparse.Namespace) -> int:
    """Returns the job's exit code; 0 when it was left running."""
    if options.no_phase_peaks:
        os.environ[directory.PHASE_PEAKS_VARIABLE] = "0"
    if options.headless or not has_terminal():
        return _run_headless(options)
    with make_session(options.command, options.session) as session:
        agent.launch_in_background(session, options.command)
    with freeze_imports():
        from zerotop.commands.job.watch import watch_job

    return watch_job(session)


def _run_headless(options: argparse.Namespace) -> int:
    # Nothing with threads may be imported here: the agent waits for signals in this very process.
    with make_session(options.command, options.session) as session:
        end = agent.run_in_foreground(session, options.command)
    words = describe_end(Ending(end.exit_code, end.text, end.lost_records, end.lost_output_bytes))
    if end.echo_error:
        words.append(f"The job's output could not be passed on to its end: {end.echo_error}.")
    write_messages(*words, f"recorded in {session}")
    return FAILED if end.exit_code is None else end.exit_code
