"""The loss, gradient norm and learning rate that a job prints, in the common forms.

These are a dict as the Trainer prints it, ``{'loss': 1.2, 'learning_rate': 1e-5}``, JSON, and pairs such as ``step 3: loss
1.2 | lr 1e-5`` or ``train_loss=1.2``. Values of an evaluation are other values. A job may print several losses, such as that
of a step and the mean of an epoch: the first kind of line that was printed three times counts. Each update of a progress bar
is such a line.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from zerotop.recording.output.transcript import read_updates
from zerotop.recording.reader import Recording, Source
from zerotop_probe.recording.logged_names import find_column
from zerotop_probe.recording.tables import STREAMS

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf(?:inity)?))(?![\w.]*\w)"
_DICT = re.compile(r"\{[^{}]*loss[^{}]*\}", re.IGNORECASE)
_DICT_PAIR = re.compile(rf"['\"]([\w/ -]+)['\"]\s*:\s*['\"]?{_NUMBER}", re.IGNORECASE)
# A name of one or two words, such as "lm loss".
_PAIR = re.compile(rf"(?<![\w/.-])([A-Za-z][\w/]*(?: [A-Za-z][\w/]*)?)\s*[:=]?\s*(?:tensor\()?{_NUMBER}", re.IGNORECASE)
_EVALUATION = re.compile(r"(?<![a-z])(?:eval(?:uation)?|val(?:id(?:ation)?)?|test(?:ing)?|dev)(?![a-z])", re.IGNORECASE)
_EVALUATION_WORD = re.compile(r"['\"](?:eval(?:uation)?|val(?:id(?:ation)?)?|test|dev)['\"]", re.IGNORECASE)
_OTHER_RANK = re.compile(r"\s*\[(?:rank|default)[1-9]\d*\]:")
_MOST_LETTERS = 40
# Lines of one kind before it counts.
_LEAST_LINES = 3
_PIECE_RECORDS = 4096
_LONGEST_LINE = 2000


class LoggedLine(NamedTuple):
    """The values in one line."""

    time_ns: int  # unix time at which it was finished
    values: dict[str, float]  # by column of LOGGED


def parse_line(text: str) -> tuple[str, dict[str, float]] | None:
    """Return the kind of a line and its values by column of LOGGED; None if it has no loss of the training."""
    if _OTHER_RANK.match(text):
        return None
    found = _DICT.search(text)
    body, begin = (found[0], found.start()) if found is not None else (text, 0)
    values: dict[str, float] = {}
    names: list[str] = []
    loss_at = -1
    for pair in (_DICT_PAIR if found is not None else _PAIR).finditer(body):
        column = find_column(pair[1])
        if column == "loss" and loss_at < 0:
            loss_at = begin + pair.start()
        if column is not None:
            values.setdefault(column, float(pair[2]))
        elif loss_at < 0:
            names.append(pair[1])
    if loss_at < 0 or _EVALUATION.search(text[:loss_at]) or (found is not None and _EVALUATION_WORD.search(body)):
        return None
    if "train_runtime" in body and "train_loss" in body:  # the mean of all steps, at the end
        return None
    letters = re.sub(r"[^a-z]+", " ", re.sub(r"\d[\d.e+-]*", " ", text[:loss_at].lower()))[-_MOST_LETTERS:]
    return "{" + ",".join(names) if found is not None else letters.replace(" s it ", " it s "), values


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
                if (parsed := _parse_bytes(line)) is not None:
                    kind, values = parsed
                    self._kinds.setdefault(kind, []).append(LoggedLine(time_ns, values))


def _parse_bytes(line: bytes) -> tuple[str, dict[str, float]] | None:
    has_loss = b"oss" in line or b"OSS" in line
    return parse_line(line[:_LONGEST_LINE].decode(errors="replace")) if has_loss else None
