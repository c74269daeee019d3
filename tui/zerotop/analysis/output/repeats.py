"""Lines that repeat those before them, which a screen shows once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

from zerotop.analysis.output.lines import OutputLine

_RANK = re.compile(r"^\s*\[(?:rank|default)\d+\]:\s?")
# As tqdm writes it; where the output is no terminal, each update may be a line.
_PROGRESS = re.compile(r"\d+%\s*[|\[]|\d+/\d+\s*\[[\d:]+<")
_NUMBERS = re.compile(r"[\d?.:,]+")
# Lines of a message, such as a warning with its place and its source line.
_LONGEST_MESSAGE = 4
_BAR = re.compile(r"[|\[][^|\]]*[|\]]")


def fold_repeats(lines: Iterable[OutputLine], search: re.Pattern[str] | None = None) -> list[OutputLine]:
    """Return the last line of each run that says the same, with the number of its lines.

    Lines of several ranks say the same, and so do updates of a progress bar. A message of several lines that comes again
    at once is folded, too. A run ends at the cursor, and each line that a ``search`` finds stays.
    """
    folded: list[OutputLine] = []
    keys: list[Hashable] = []
    for line in lines:
        is_found = search is not None and search.search(line.text) is not None
        folded.append(line)
        keys.append(object() if is_found else (_make_key(line.text), line.is_later, line.position is None))
        for size in range(1, min(_LONGEST_MESSAGE, len(keys) // 2) + 1):
            if keys[-size:] == keys[-2 * size : -size] and any(one.text.strip() for one in folded[-size:]):
                again = zip(folded[-2 * size : -size], folded[-size:], strict=True)
                folded[-2 * size :] = [later._replace(repeats=one.repeats + later.repeats) for one, later in again]
                del keys[-size:]
                break
    return folded


def _make_key(text: str) -> str:
    text = _RANK.sub("", text)
    return _NUMBERS.sub("", _BAR.sub("", text)) if _PROGRESS.search(text) else text
