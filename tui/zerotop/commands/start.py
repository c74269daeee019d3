"""``zerotop`` alone: the list of what was recorded and what runs."""

from __future__ import annotations

import argparse

from zerotop.commands.desk import UserDesk
from zerotop.session import catalog
from zerotop.ui.habits import Habits
from zerotop.ui.start_app import StartApp


def start(options: argparse.Namespace) -> int:
    """Returns 0 when the screen was left in good order."""
    app = StartApp(UserDesk(), habits=kept_habits())
    app.run()
    return app.return_code or 0


def kept_habits() -> Habits:
    """What the user has set, in the state directory."""
    return Habits(catalog.usual_place().with_name("habits.json"))
