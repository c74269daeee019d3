"""``zerotop`` alone: the list of what was recorded and what runs."""

from __future__ import annotations

import argparse

from zerotop.commands.desk import UserDesk
from zerotop.commands.kept import kept_habits
from zerotop.ui.start_app import StartApp


def start(options: argparse.Namespace) -> int:
    """Returns 0 when the screen was left in good order."""
    app = StartApp(UserDesk(), habits=kept_habits())
    app.run()
    return app.return_code or 0
