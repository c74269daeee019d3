"""``zerotop`` alone: the list of what was recorded and what runs."""

from __future__ import annotations

import argparse

from zerotop.commands.common.user_settings import load_settings
from zerotop.commands.job.recording_library import UserLibrary
from zerotop.ui.app.start_app import StartApp


def start(options: argparse.Namespace) -> int:
    """Returns 0 when the screen was left in good order."""
    app = StartApp(UserLibrary(), settings=load_settings())
    app.run()
    return app.return_code or 0
