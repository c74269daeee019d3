"""``zerotop`` without a command: the list of recordings and running jobs."""

from __future__ import annotations

import argparse

from zerotop.commands.common.user_settings import load_settings
from zerotop.commands.job.recording_library import UserLibrary
from zerotop.ui.app.start_app import StartApp


def home(options: argparse.Namespace) -> int:
    """Show the list. Return 0 unless the screen failed."""
    app = StartApp(UserLibrary(), settings=load_settings())
    app.run()
    return app.return_code or 0
