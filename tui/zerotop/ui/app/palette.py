"""The command palette: actions used most through it first, then screens and actions in their own order."""

from __future__ import annotations

import json
from collections.abc import Mapping

from textual.command import DiscoveryHit, Hits
from textual.system_commands import SystemCommandsProvider

from zerotop.ui.app.settings import UserSettings

_USES = "palette uses"
_MOST_KEPT = 20  # actions


class ActionProvider(SystemCommandsProvider):
    """Offers the app's commands in the order in which it yields them; Textual's own provider sorts them by letter."""

    async def discover(self) -> Hits:
        for title, help_text, run, is_offered in self.app.get_system_commands(self.screen):
            if is_offered:
                yield DiscoveryHit(title, run, help=help_text)


def read_uses(settings: UserSettings) -> Mapping[str, int]:
    """Return how often each command was chosen in the palette."""
    try:
        uses = json.loads(settings.get(_USES, "{}"))
    except (ValueError, RecursionError):
        return {}
    return {title: count for title, count in uses.items() if type(count) is int} if isinstance(uses, dict) else {}


def count_use(settings: UserSettings, title: str) -> None:
    """Count a choice of a command. The least used ones are forgotten."""
    uses = {**read_uses(settings)}
    uses[title] = uses.get(title, 0) + 1
    kept = sorted(uses, key=lambda each: (each != title, -uses[each]))[:_MOST_KEPT]
    settings.set(_USES, json.dumps({each: uses[each] for each in kept}))
