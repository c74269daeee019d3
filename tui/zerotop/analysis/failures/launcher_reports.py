"""Parsers of launcher messages about the ends of ranks: torchrun and accelerate, DeepSpeed's launcher, Slurm's srun."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerotop.session.output.tail import PrintedLine


class LauncherReport(NamedTuple):
    """One rank's end as its launcher printed it."""

    launcher: str  # in words
    time_ns: int  # unix time of the line
    exit_code: int  # negative for a signal
    is_first: bool  # the launcher says that this rank failed first
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None

    @property
    def is_unnamed(self) -> bool:
        """Whether the report does not name its rank."""
        return self.rank is None and self.local_rank is None and self.pid is None


TORCHRUN, DEEPSPEED, SLURM = "torchrun", "DeepSpeed's launcher", "srun"

# The command is always that of the last rank, even if another one has ended.
_DEEPSPEED = re.compile(r"\[launch\.py:\d+:\w+\] \[.*\] exits with return code = (?P<code>-?\d+)")
_TORCHRUN_LOG = re.compile(
    r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\) of binary"
)
_TABLE_FIRST = re.compile(r"Root Cause \(first observed failure\):")
_TABLE_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: (\d+)\)")
_TABLE_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_SRUN = re.compile(r"srun: error: \S+: task (?P<task>\d+): (?P<end>.+)")
_SRUN_MEMORY = "Out Of Memory"  # killed for that
_SRUN_CODE = re.compile(r"Exited with exit code (\d+)")
_SIGNALS_BY_WORDS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
# Messages of a launcher that was asked to end, with its ranks.
_STOPPED = re.compile(
    r"Received \w+ death signal, shutting down workers|SignalException: Process \d+ got signal: \d+"
    r"|Main process received SIG\w+, exiting|\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT"
)


def find_stop(lines: Sequence[PrintedLine]) -> int | None:
    """Return when a launcher first printed that it received a signal to end (unix time); None if none did."""
    return next((time_ns for time_ns, text in lines if _STOPPED.search(text)), None)


def parse_reports(lines: Sequence[PrintedLine]) -> list[LauncherReport]:
    """Return the reports in one stream of output, in their order."""
    return [*_parse_lines(lines), *_parse_tables(lines)]


def _parse_lines(lines: Sequence[PrintedLine]) -> Iterator[LauncherReport]:
    """Parse reports of one line. DeepSpeed's launcher prints only one, for the first rank, without its number."""
    has_task = False
    for time_ns, text in lines:
        if (match := _DEEPSPEED.search(text)) is not None:
            yield LauncherReport(DEEPSPEED, time_ns, int(match["code"]), is_first=True)
        elif (match := _TORCHRUN_LOG.search(text)) is not None:
            local_rank, pid = int(match["local"]), int(match["pid"])
            yield LauncherReport(TORCHRUN, time_ns, int(match["code"]), is_first=True, local_rank=local_rank, pid=pid)
        elif (match := _SRUN.search(text)) is not None and (code := _parse_srun_end(match["end"])) is not None:
            yield LauncherReport(SLURM, time_ns, code, is_first=not has_task, rank=int(match["task"]))
            has_task = True


def _parse_srun_end(text: str) -> int | None:
    if (match := _SRUN_CODE.match(text)) is not None:
        return int(match[1])
    words = text.removesuffix(" (core dumped)").strip()
    number = signal.SIGKILL if words == _SRUN_MEMORY else _SIGNALS_BY_WORDS.get(words)
    return -number if number is not None else None


def _parse_tables(lines: Sequence[PrintedLine]) -> Iterator[LauncherReport]:
    """The table of torchrun, which has the first failure last."""
    is_first, ranks = False, None
    for time_ns, text in lines:
        if _TABLE_FIRST.search(text):
            is_first = True
        elif (match := _TABLE_RANK.search(text)) is not None:
            ranks = int(match[1]), int(match[2])
        elif ranks is not None and (match := _TABLE_EXIT.search(text)) is not None:
            code, pid = int(match[1]), int(match[2])
            yield LauncherReport(TORCHRUN, time_ns, code, is_first, rank=ranks[0], local_rank=ranks[1], pid=pid)
            is_first, ranks = False, None
