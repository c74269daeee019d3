"""``python -m zerotop_probe.outside [options] RECORDING -- COMMAND``: the agent as a separate process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial

from zerotop_probe.outside import own_python
from zerotop_probe.outside.job import agent, daemon
from zerotop_probe.outside.job.job import JobResult
from zerotop_probe.outside.job.job_signals import die_of
from zerotop_probe.outside.job.shutdown import GRACE_S
from zerotop_probe.outside.procfs import ProcessHandle


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zerotop_probe.outside",
        description="Run COMMAND and record it in the directory RECORDING.",
        usage="%(prog)s [options] RECORDING -- COMMAND ...",
    )
    parser.add_argument("recording", metavar="RECORDING")
    parser.add_argument("--foreground", action="store_true", help="pass on the job's output and our signals")
    parser.add_argument("--daemon", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--watch", nargs=2, type=int, metavar=("PID", "START"), help="record a running job")
    parser.add_argument("--grace", nargs=2, type=float, default=GRACE_S, help="seconds between stop signals")
    return parser


def main() -> int:
    """Return the job's exit code, 1 if it is unknown or the job could not be started, 2 for wrong usage."""
    own_python.restore_environment()
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _make_parser().parse_args(arguments[:split])
    command = arguments[split + 1 :]
    grace_s = (options.grace[0], options.grace[1])

    def prepare_agent() -> Callable[[], JobResult]:
        if options.watch:
            return agent.prepare_watch(options.recording, ProcessHandle(*options.watch))
        return agent.prepare_in_background(options.recording, command, grace_s=grace_s)

    if options.daemon:
        daemon.serve_agent(prepare_agent)
        return 0
    try:
        run = partial(agent.run_in_foreground, options.recording, command, grace_s=grace_s)
        end = run() if options.foreground else prepare_agent()()
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        return 1
    except agent.AgentError as error:
        print(error, file=sys.stderr)
        return 1
    if end.signal:
        die_of(end.signal)
    return 1 if end.exit_code is None else end.exit_code


if __name__ == "__main__":
    sys.exit(main())
