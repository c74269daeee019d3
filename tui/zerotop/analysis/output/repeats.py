"""Lines that repeat the one before them, which a screen shows once."""

from __future__ import annotations

import re
from collections.abc import Iterable

from zerotop.analysis.output.lines import OutputLine

_RANK = re.compile(r"^\s*\[(?:rank|default)\d+\]:\s?")
# As tqdm writes it; where the output is no terminal, each update may be a line.
_PROGRESS = re.compile(r"\d+%\s*[|\[]|\d+/\d+\s*\[[\d:]+<")
_NUMBERS = re.compile(r"[\d?.:,]+")
_BAR = re.compile(r"[|\[][^|\]]*[|\]]")


def fold_repeats(lines: Iterable[OutputLine], search: re.Pattern[str] | None = None) -> list[OutputLine]:
    """Return the last line of each run that says the same, with the number of its lines.

    Lines of several ranks say the same, and so do updates of a progress bar. A run ends at the cursor,
    and each line that a ``search`` finds stays.
    """
    folded: list[OutputLine] = []
    before: tuple[object, ...] = ()
    for line in lines:
        key = (_make_key(line.text), line.is_later, line.position is None)
        is_found = search is not None and search.search(line.text) is not None
        if folded and key == before and line.text.strip() and not is_found:
            folded[-1] = line._replace(repeats=folded[-1].repeats + 1)
        else:
            folded.append(line)
        before = key
    return folded


def _make_key(text: str) -> str:
    text = _RANK.sub("", text)
    return _NUMBERS.sub("", _BAR.sub("", text)) if _PROGRESS.search(text) else text
