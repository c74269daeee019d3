"""Parts of the command line that several commands share: the type of ``add_command``, help texts, the price option."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from zerotop.commands.options.option_types import parse_price
from zerotop_probe.recording.directory import find_default_root

AddCommand = Callable[..., argparse.ArgumentParser]
"""Takes a name, a summary and examples."""

RECORDING_HELP = "name, start of a name, or path"
JSON_HELP = "print JSON for programs"


def name_recordings_folder() -> str:
    """Return the folder of recordings as a person would write it: ``~/.local/state/zerotop/sessions``."""
    folder, home = find_default_root(), os.path.expanduser("~")
    return f"~{folder[len(home) :]}" if folder.startswith(home + os.sep) else folder


def add_force(command: argparse.ArgumentParser) -> None:
    """Add the option to replace files."""
    command.add_argument("--force", action="store_true", help="replace files that exist")


def add_price(command: argparse.ArgumentParser) -> None:
    """Add the option for a price per hour."""
    command.add_argument(
        "--price-per-hour",
        type=parse_price,
        metavar="PRICE",
        help="price of all hardware of the job, such as 30, $29.50 or 28EUR",
    )
