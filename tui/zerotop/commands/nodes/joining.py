"""Starting and awaiting the processes that send a node's recording to the collector, and that collect."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile

from zerotop.commands.common.errors import USAGE, Problem
from zerotop.commands.nodes.forwarder import PATIENCE_S
from zerotop.commands.nodes.keys import read_key
from zerotop.commands.nodes.link import check_url
from zerotop.commands.nodes.messages import MIN_TOKEN, TOKEN_VARIABLE, JobKey, is_job_name, make_token
from zerotop_probe.outside import own_python

URL_VARIABLE, JOB_VARIABLE = "ZEROTOP_COLLECTOR", "ZEROTOP_JOB"
_MAX_SAID_BYTES = 1 << 14


def check_options(options: argparse.Namespace) -> JobKey:
    """Check address, job and token; return the key. Raises Problem."""
    if not options.collector:
        raise Problem("Give the address of a NATS server, such as nats://head:4222", USAGE)
    if not options.job:
        raise Problem("Name the job, the same on all nodes: --job NAME", USAGE)
    if not is_job_name(options.job):
        raise Problem(f"{options.job} is not a job's name: letters, digits, _ and -, at most 64", USAGE)
    check_url(options.collector)
    token = os.environ.get(TOKEN_VARIABLE, "") or read_key(options.job)
    if len(token) < MIN_TOKEN:
        raise Problem(
            f"{TOKEN_VARIABLE} must have one secret of at least {MIN_TOKEN} characters for the server, the nodes and the"
            f" collector, such as: export {TOKEN_VARIABLE}={make_token()}",
            USAGE,
        )
    return JobKey(options.job, token)


class Helper:
    """A process that sends a recording, or collects, in a session of its own: it outlives us."""

    def __init__(self, arguments: list[str], url: str, job: str, *, quiet: bool, if_killed: str = "") -> None:
        """Start zerotop with these arguments; ``quiet`` keeps what it says until :meth:`read_said`. Raises OSError.

        ``if_killed``: what to say if it could not say anything itself.
        """
        self._if_killed = if_killed
        self._said = tempfile.TemporaryFile() if quiet else None  # noqa: SIM115 - as long as we are there
        self._process = subprocess.Popen(
            own_python.build_command("zerotop.cli", *arguments),
            # The address may have a password in it, which a command line would show to everybody.
            env=own_python.build_environment() | {URL_VARIABLE: url, JOB_VARIABLE: job},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            start_new_session=True,
        )

    def await_end(self) -> list[str]:
        """Wait until all has been sent, or cannot be: a launcher may end what is left on its nodes. Ctrl-C ends waiting.

        Return a sentence if it was killed.
        """
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            self._process.wait(2 * PATIENCE_S)
        return self._list_failure()

    def _list_failure(self) -> list[str]:
        is_killed = (self._process.poll() or 0) < 0
        return [self._if_killed] if is_killed and self._if_killed else []

    def read_said(self) -> list[str]:
        """Return the sentences that were kept so far."""
        if self._said is None:
            return []
        lines = os.pread(self._said.fileno(), _MAX_SAID_BYTES, 0).decode(errors="replace").splitlines()
        return [line.removeprefix("zerotop: ") for line in lines] + self._list_failure()
