"""Parsers of launcher messages about the ends of ranks: torchrun and accelerate, DeepSpeed's launcher, Slurm's srun."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerotop.recording.output.tail import PrintedLine
from zerotop_probe.recording.launchers import LAUNCHERS


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
    def names_killed(self) -> bool:
        """Whether its launcher prints which ranks it ends itself."""
        return self.launcher in _NAME_KILLED

    @property
    def is_unnamed(self) -> bool:
        """Whether the report does not name its rank."""
        return self.rank is None and self.local_rank is None and self.pid is None


_ENDS = tuple((launcher.title, re.compile(pattern)) for launcher in LAUNCHERS for pattern in launcher.ends)
_NAME_KILLED = {launcher.title for launcher in LAUNCHERS if launcher.kills}
_STOPPED = re.compile("|".join(pattern for launcher in LAUNCHERS for pattern in launcher.stops))
_TABLE_FIRST = re.compile(r"Root Cause \(first observed failure\):")
_TABLE_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: (\d+)\)")
_TABLE_EXIT = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_SIGNALS_BY_WORDS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
_SIGNALS_BY_WORDS |= {one.name: int(one) for one in signal.Signals}
_SIGNALS_BY_WORDS["Out Of Memory"] = int(signal.SIGKILL)  # killed for that


def find_stop(lines: Sequence[PrintedLine]) -> int | None:
    """Return when a launcher first printed that it received a signal to end (unix time); None if none did."""
    return next((time_ns for time_ns, text in lines if _STOPPED.search(text)), None)


def parse_reports(lines: Sequence[PrintedLine]) -> list[LauncherReport]:
    """Return the reports in one stream of output, in their order."""
    return [*_parse_lines(lines), *_parse_tables(lines)]


def _parse_lines(lines: Sequence[PrintedLine]) -> Iterator[LauncherReport]:
    """Parse reports of one line. DeepSpeed's launcher prints only one, for the first rank, without its number."""
    has_rank = False
    for time_ns, text in lines:
        title, match = next(((title, match) for title, end in _ENDS if (match := end.search(text)) is not None), ("", None))
        found = match.groupdict() if match is not None else {}
        rank, local_rank, pid = (int(found[name]) if found.get(name) else None for name in ("rank", "local", "pid"))
        if (code := _find_code(found)) is not None:
            yield LauncherReport(title, time_ns, code, rank is None or not has_rank, rank, local_rank, pid)
            has_rank = has_rank or rank is not None


def _find_code(found: dict[str, str]) -> int | None:
    if found.get("code"):
        return int(found["code"])
    number = _SIGNALS_BY_WORDS.get(found.get("signal", "").removesuffix(" (core dumped)").strip())
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
            yield LauncherReport("torchrun", time_ns, code, is_first, rank=ranks[0], local_rank=ranks[1], pid=pid)
            is_first, ranks = False, None
