"""The prompt that finds a node or a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from textual.widgets import Input

from zerotop.ui.dialogs.dialog import Prompt
from zerotop.ui.drawing.glyphs import Glyphs

_MOST_NAMES = 3


class FoundRanks(NamedTuple):
    """A node with all of its ranks, or one rank."""

    ranks: tuple[int, ...]
    is_node: bool


def find_rank(text: str, ranks: Mapping[int, str]) -> FoundRanks | str:
    """Return what a text names, or else a sentence: ``12`` or ``rank 12`` is a rank, all else is part of a node's name.

    ``ranks`` has the node of each rank.
    """
    words = text.strip().lower()
    if (match := re.fullmatch(r"(?:rank\s*)?(\d{1,9})", words)) is not None:
        rank = int(match[1])
        return FoundRanks((rank,), False) if rank in ranks else f"There is no rank {rank}."
    names = dict.fromkeys(ranks.values())
    matches = [name for name in names if name.lower() == words] or [name for name in names if words in name.lower()]
    if len(matches) != 1:
        told = ", ".join(matches[:_MOST_NAMES]) + (", ..." if matches[_MOST_NAMES:] else "")
        return f"{len(matches)} nodes have that in their names: {told}" if matches else f"No node is called {text.strip()}."
    return FoundRanks(tuple(rank for rank, name in ranks.items() if name == matches[0]), True)


class FindRankDialog(Prompt[FoundRanks]):
    """Returns the node or the rank, or None."""

    def __init__(self, ranks: Mapping[int, str], glyphs: Glyphs) -> None:
        """``ranks`` has the node of each rank."""
        super().__init__("Find", "A rank such as 12, or a part of a node's name.", glyphs)
        self._ranks = ranks

    def on_input_submitted(self, event: Input.Submitted) -> None:
        found = find_rank(event.value, self._ranks) if event.value.strip() else None
        if isinstance(found, str):
            self.show_problem(found)
        else:
            self.dismiss(found)
