"""The loss, gradient norm and learning rate of a training, as its ranks recorded them, else as the job printed them.

A loss that only a DeepSpeed engine was given counts if the job prints fewer.

The loss, gradient norm and learning rate that a job prints, in the common forms.

These are a dict as the Trainer prints it, ``{'loss': 1.2, 'learning_rate': 1e-5}``, JSON, and pairs such as ``step 3: loss
1.2 | lr 1e-5`` or ``train_loss=1.2``. Values of an evaluation are other values. A job may print several losses, such as that
of a step and the mean of an epoch: the first kind of line that was printed three times counts. Each update of a progress bar
is such a line, and so is what a job prints behind a bar of tqdm, which leaves the cursor there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerotop.analysis.stats.medians import compute_known_median
from zerotop.recording.output.ansi import strip_escapes
from zerotop.recording.output.transcript import read_updates
from zerotop.recording.reader import Recording, Source
from zerotop.recording.samples import Floats, Ints, Rows
from zerotop_probe.recording.logged_names import find_column, put_usual_first
from zerotop_probe.recording.tables import ENGINE_LOSS, LOGGED, LOGGED_BITS, OF_NEXT_STEP, OPTIMIZER_RATE, STREAMS, UNKNOWN

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?))(?![\w.]*\w)"
_ANY_LOSS = re.compile(rb"loss|\bce\b|xent|entropy|nll|\bmse\b", re.IGNORECASE)
_DICT = re.compile(r"\{[^{}]*loss[^{}]*\}", re.IGNORECASE)
_DICT_PAIR = re.compile(rf"['\"]([\w/ -]+)['\"]\s*:\s*['\"]?{_NUMBER}", re.IGNORECASE)
# A name of one or two words, such as "lm loss".
_PAIR = re.compile(rf"(?<![\w/.-])([A-Za-z][\w/]*(?: [A-Za-z][\w/]*)?)\s*[:=]?\s*(?:tensor\()?{_NUMBER}", re.IGNORECASE)
_EVALUATION = re.compile(r"(?<![a-z])(?:eval(?:uation)?|val(?:id(?:ation)?)?|test(?:ing)?|dev)(?![a-z])", re.IGNORECASE)
_EVALUATION_WORD = re.compile(r"['\"](?:eval(?:uation)?|val(?:id(?:ation)?)?|test|dev)['\"]", re.IGNORECASE)
# The number of a step, as scripts print it.
_STEP = re.compile(
    r"(?<![a-z])(?:step|iter|iteration)['\"]?\s*[:=#]?\s*\[?\s*(\d{1,15})(?!\.?\d|[a-z_%]|\s*m?s\b)", re.IGNORECASE
)
_AROUND_WORDS = "'\" :=#[\t"
# A figure in small letters, or the word for one that is not known yet: step 3/none.
_FIGURE = re.compile(r"\d[\d.e+-]*|\b(?:none|null|nan|inf)\b")
# The end of tqdm's bar: [00:03<00:01, 30.1it/s, loss=0.5], or without a total [00:03, 30.1it/s].
_BAR_END = re.compile(r"\[[\d:]+(?:<[\d:?]+)?, [^\[\]]*(?:/s|s/\w+)\b[^\[\]]*\]")
_OTHER_RANK = re.compile(r"\s*\[(?:rank|default)[1-9]\d*\]:")
_MOST_LETTERS = 40
_PRINTED_LOSSES = ("mse", "train_mse", "train mse")
# Lines of one kind before it counts.
_LEAST_LINES = 3
_PIECE_RECORDS = 4096
_LONGEST_LINE = 2000


class LoggedLine(NamedTuple):
    """The values in one line."""

    time_ns: int  # unix time at which it was finished
    values: dict[str, float]  # by column of LOGGED
    number: int  # of the step, as the line says; UNKNOWN without one


def parse_line(text: str) -> tuple[str, dict[str, float]] | None:
    """Return the kind of a line and its values by column of LOGGED; None if it has no loss of the training."""
    if _OTHER_RANK.match(text):
        return None
    found = _DICT.search(text)
    body, begin = (found[0], found.start()) if found is not None else (text, 0)
    found_pairs: list[tuple[str, float]] = []
    names: list[str] = []
    loss_at = -1
    for pair in (_DICT_PAIR if found is not None else _PAIR).finditer(body):
        # Among logged values this may be a score; a line that is printed says whether it is that of an evaluation.
        column = "loss" if pair[1].lower() in _PRINTED_LOSSES else find_column(pair[1])
        if column == "loss" and loss_at < 0:
            loss_at = begin + pair.start()
        if column is not None:
            found_pairs.append((pair[1], float(pair[2])))
        elif loss_at < 0:
            names.append(pair[1])
    if loss_at < 0 or _EVALUATION.search(text[:loss_at]) or (found is not None and _EVALUATION_WORD.search(body)):
        return None
    if "train_runtime" in body and "train_loss" in body:  # the mean of all steps, at the end
        return None
    # Of several with one meaning the first counts.
    usual = sorted(found_pairs, key=lambda pair: pair[0].lower() in _PRINTED_LOSSES)
    values = {find_column(name) or "loss": value for name, value in reversed(put_usual_first(usual))}
    letters = re.sub(r"[^a-z]+", " ", _FIGURE.sub(" ", text[:loss_at].lower()))[-_MOST_LETTERS:]
    return "{" + ",".join(names) if found is not None else letters.replace(" s it ", " it s ").strip(), values


def list_figures(text: str) -> dict[str, float]:
    """Return the numbers in a line that have a name, by that name."""
    pairs = list(_DICT_PAIR.finditer(text)) if "{" in text else []
    return {pair[1]: float(pair[2]) for pair in pairs or _PAIR.finditer(text)}


def name_step(text: str) -> str | None:
    """Return the number of a step as a line says it, with its word: ``iter 300``; None without one."""
    found = _STEP.search(text)
    return f"{found[0].partition(found[1])[0].strip(_AROUND_WORDS).lower()} {found[1]}" if found is not None else None


class LoggedLines:
    """The values that a growing output contains, read once."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._read: dict[Source, int] = {}
        self._rests: dict[tuple[Source, int], bytes] = {}
        self._kinds: dict[str, list[LoggedLine]] = {}
        self._chosen: str | None = None

    def update(self) -> list[LoggedLine]:
        """Read the output since the last call; return the values of the kind of line that counts, by time."""
        for source in self._recording.sources["output"]:
            count = len(source.array)
            for begin in range(self._read.get(source, 0), count, _PIECE_RECORDS):
                self._read_piece(source, begin, min(count, begin + _PIECE_RECORDS))
            self._read[source] = count
        if self._chosen is None:
            ready = [(lines[_LEAST_LINES - 1].time_ns, kind) for kind, lines in self._kinds.items() if lines[2:]]
            self._chosen = min(ready)[1] if ready else None
        kind = self._chosen if self._chosen is not None else next(iter(self._kinds), None)
        return self._kinds[kind] if kind is not None else []

    def _read_piece(self, source: Source, begin: int, end: int) -> None:
        for code in range(len(STREAMS)):
            lines, times = read_updates(source, code, begin, end)
            lines[0] = self._rests.get((source, code), b"") + lines[0]
            self._rests[source, code] = lines[-1][-_LONGEST_LINE:]
            for line, time_ns in zip(lines, times, strict=False):  # the last one is not finished
                for kind, values, number in _parse_bytes(line):
                    self._kinds.setdefault(kind, []).append(LoggedLine(time_ns, values, number))


def _parse_bytes(line: bytes) -> Iterator[tuple[str, dict[str, float], int]]:
    """Yield the kind, the values and the step's number of each text in a line that has a loss of the training."""
    if _ANY_LOSS.search(line) is None:
        return
    for text in _split_bars(strip_escapes(line[:_LONGEST_LINE].decode(errors="replace"))):
        if (parsed := parse_line(text)) is not None:
            number = _STEP.search(text)
            yield *parsed, int(number[1]) if number is not None else UNKNOWN


def _split_bars(text: str) -> list[str]:
    """Return the progress bars at the beginning of a line, and what was printed after each."""
    ends = [found.end() for found in _BAR_END.finditer(text)]
    return [text[begin:end] for begin, end in pairwise([0, *ends, len(text)]) if begin < end]


# What a job prints is read this often.
_READ_NS = 50_000_000
# The share of lines that are read without a further delay.
_READ_IN_TIME = 0.9
# Of a long training the last steps suffice to find those of the last values.
_NEAR_STEPS = 4096
NAMES = tuple(metric.name for metric in LOGGED.metrics)


class LoggedSeries(NamedTuple):
    """The values of one name, in the order of their times."""

    times: Ints  # unix nanoseconds
    values: Floats  # NaN is a value that was logged
    numbers: Ints  # of the steps as their lines say; UNKNOWN without one
    are_next: NDArray[np.bool_]  # whether they are of the step that begins

    def until(self, cursor_ns: int) -> LoggedSeries:
        """Return the values up to a moment."""
        return self.select(slice(int(np.searchsorted(self.times, cursor_ns, "right"))))

    def select(self, which: slice) -> LoggedSeries:
        """Return some of the values."""
        return LoggedSeries._make(column[which] for column in self)


NO_VALUES = LoggedSeries(np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64), np.empty(0, bool))


class LoggedReader:
    """The logged values of a recording, which may grow."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._lines = LoggedLines(recording)
        self._taken: list[LoggedLine] | None = None  # the lines of which
        self._taken_count = 0  # so many
        self._printed: dict[str, LoggedSeries] = {}  # are in here
        self._counts: tuple[int, ...] = ()
        self._series: dict[str, LoggedSeries] = {}

    def read(self) -> dict[str, LoggedSeries]:
        """Return all values so far by the names of LOGGED's metrics; a name without any is missing."""
        sources = [*self._recording.sources["logged"], *self._recording.sources["output"]]
        counts = tuple(len(source.array) for source in sources)
        if counts != self._counts:
            self._counts = counts
            engine, printed = self._read_recorded(ENGINE_LOSS), self._read_printed()
            if len(engine.get("loss", NO_VALUES).times) > len(printed.get("loss", NO_VALUES).times):
                printed = printed | engine
            # By name: an engine records its learning rate alone. What an optimizer has is what it uses.
            self._series = engine | printed | self._read_recorded(0) | self._read_recorded(OPTIMIZER_RATE)
        return self._series

    def _read_recorded(self, mark: int) -> dict[str, LoggedSeries]:
        tables = [source for source in self._recording.sources["logged"] if len(source.array)]
        found: dict[str, LoggedSeries] = {}
        for name in NAMES:
            read = [(source.rank, _read_table(source, name, mark)) for source in tables]
            known = [(rank, series) for rank, series in read if len(series.times)]
            lowest = min((rank for rank, _ in known), default=-1)
            if known:
                found[name] = _join_series([series for rank, series in known if rank == lowest])
        return found

    def _read_printed(self) -> dict[str, LoggedSeries]:
        lines = self._lines.update()
        if lines is not self._taken:
            self._taken, self._taken_count, self._printed = lines, 0, {}
        fresh = sorted(lines[self._taken_count :], key=lambda line: line.time_ns)
        if fresh:
            last_ns = max((int(series.times[-1]) for series in self._printed.values()), default=0)
            times = _spread_times(np.array([line.time_ns for line in fresh], np.int64), last_ns)
            for name in NAMES:
                known = [place for place, line in enumerate(fresh) if name in line.values]
                if known:
                    values = np.array([fresh[place].values[name] for place in known])
                    numbers = np.array([fresh[place].number for place in known])
                    new = LoggedSeries(times[known], values, numbers, np.zeros(len(known), bool))
                    self._printed[name] = _join_series([self._printed.get(name, NO_VALUES), new])
            self._taken_count = len(lines)
        return self._printed


def _spread_times(times: Ints, last_ns: int) -> Ints:
    """Spread lines that were read together, and so have the same time, over the time before it, since ``last_ns``."""
    begins = np.flatnonzero(np.diff(times, prepend=-1))
    counts = np.diff(np.append(begins, len(times)))
    room = np.clip(np.diff(times[begins], prepend=last_ns), 0, _READ_NS)
    behind = np.repeat(begins + counts, counts) - np.arange(len(times)) - 1  # lines of the same time after each
    spread: Ints = times - behind * np.repeat(room, counts) // np.repeat(counts, counts)
    return spread


def _read_table(source: Source, name: str, mark: int) -> LoggedSeries:
    """Return a name's values that have this mark, ENGINE_LOSS, OPTIMIZER_RATE or 0."""
    bits = LOGGED_BITS[name] | ENGINE_LOSS | OPTIMIZER_RATE
    rows: Rows = source.array[(source.array["known"] & bits) == LOGGED_BITS[name] | mark]
    are_next = (rows["known"] & OF_NEXT_STEP) > 0
    return LoggedSeries(source.unix_times(rows), rows[name].astype(np.float64), np.full(len(rows), UNKNOWN), are_next)


def _join_series(several: Sequence[LoggedSeries]) -> LoggedSeries:
    series = LoggedSeries._make(np.concatenate(columns) for columns in zip(*several, strict=True))
    if (np.diff(series.times) < 0).any():  # of several nodes or processes
        order = np.argsort(series.times, kind="stable")
        series = LoggedSeries._make(column[order] for column in series)
    return series


def read_logged(recording: Recording) -> dict[str, LoggedSeries]:
    """Return all logged values by name; see :meth:`LoggedReader.read`."""
    if LoggedReader not in recording.kept:
        recording.kept[LoggedReader] = LoggedReader(recording)
    series: dict[str, LoggedSeries] = recording.kept[LoggedReader].read()
    return series


def find_steps(rows: Rows, series: LoggedSeries, *, are_last: bool = False) -> Ints:
    """Return the step (STEP_DTYPE) that each value belongs to; UNKNOWN without a step.

    ``are_last``: of a long training only those of the last values.

    Scripts print a loss after the step, or between its forward and its update. Lines are read some time after they were
    printed, in which many short steps may pass: then the numbers that the lines themselves say are better.
    """
    if not len(rows):
        return np.full(len(series.times), UNKNOWN)
    origin = _find_origin(series.numbers) if rows["step"][0] == 0 else None
    if are_last and len(rows) > _NEAR_STEPS:
        rows = rows[-_NEAR_STEPS:]
        begin = min(int(series.times.searchsorted(rows["end_unix_ns"][0])), len(series.times) - 1)
        series = series.select(slice(max(begin, len(series.times) - _NEAR_STEPS), None))
    steps, numbers = _find_steps_by_time(rows, series), series.numbers
    # Up to this many steps pass before a printed line is read.
    delay = 2 * _READ_NS / 1e9 / max(compute_known_median(rows["iteration_s"]), 1e-4)
    shifts, first, behind = steps - numbers, int(rows["step"][0]), int(rows["step"][-1]) + 1
    if len(steps) and (np.diff(numbers, prepend=UNKNOWN) > 0).all():
        # No line is read before it is printed; on a busy node a few are read later still.
        shift = shifts.min()
        if np.quantile(shifts, _READ_IN_TIME) - shift <= delay + 1:
            # A line that is read within the step of its own number counts from 1: it says how many steps were done.
            likely = origin if origin is not None else -1 if shift == -1 else 0
            if abs(shift - likely) <= delay:
                shift = likely
            if first <= numbers[0] + shift and numbers[-1] + shift <= behind:
                numbered: Ints = numbers + shift
                return numbered
    return _make_even(steps, delay, first)


def _find_steps_by_time(rows: Rows, series: LoggedSeries) -> Ints:
    ends, times = rows["end_unix_ns"], series.times
    after = np.searchsorted(ends, times, "right")
    inside = np.flatnonzero((after > 0) & (after < len(rows)) & ~series.are_next)
    following = rows[after[inside]]
    left_s = (following["end_unix_ns"] - times[inside]) / 1e9
    is_computed = left_s < following["step_s"] + following["backward_s"] + following["forward_s"] / 2
    after[inside[is_computed]] += 1
    steps: Ints = rows["step"][np.maximum(after, 1) - 1].astype(np.int64)
    steps += series.are_next & (after > 0)
    return steps


def _find_origin(numbers: Ints) -> int | None:
    """Return what has to be added to numbers of steps that begin at 0 or 1; None where that is not certain."""
    first, distance = int(numbers[0]) if len(numbers) else UNKNOWN, int(np.diff(numbers[:2]).sum())
    if first == 0 or 2 < distance == first + 1:  # every tenth step: 9, 19, 29
        return 0
    return -1 if first == 1 and distance and distance != 2 else None


def _make_even(steps: Ints, delay: float, first_step: int) -> Ints:
    """Return steps that are equally far apart if these are so but for the delay with which short steps' lines are read."""
    distance = round((steps[-1] - steps[0]) / (len(steps) - 1)) if len(steps) > 2 else 0
    begins = steps - distance * np.arange(len(steps))
    if not distance or not 0 < np.ptp(begins) <= delay:
        return steps
    even: Ints = steps - begins + begins.min()
    # Where some steps have two values, as of an engine and its monitor, they would begin before the first step.
    return even if even[0] >= first_step else steps
