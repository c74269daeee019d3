"""``zerotop`` alone: the list of what was recorded and what runs."""

from __future__ import annotations

import argparse

from zerotop.commands.common.user_settings import kept_habits
from zerotop.commands.job.recording_library import UserDesk
from zerotop.ui.app.start_app import StartApp


def start(options: argparse.Namespace) -> int:
    """Returns 0 when the screen was left in good order."""
    app = StartApp(UserDesk(), habits=kept_habits())
    app.run()
    return app.return_code or 0
