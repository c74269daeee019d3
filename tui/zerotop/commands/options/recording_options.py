"""The options of commands about recordings, except those that send one to somebody."""

from __future__ import annotations

from zerotop.commands.options.common_options import (
    JSON_HELP,
    RECORDING_HELP,
    AddCommand,
    add_force,
    add_price,
    name_recordings_folder,
)
from zerotop.commands.options.option_types import parse_age, parse_size, parse_speed


def add_recording_commands(add_command: AddCommand) -> None:
    """Add the commands with their options."""
    _add_recordings(add_command)
    history = add_command(
        "history",
        "show how often each command ran, how fast, and what was found",
        "zerotop history",
        "zerotop history --history /shared/runs --json",
    )
    history.add_argument(
        "--history", metavar="DIR", help="add the recordings in this folder and those of all who name it, too"
    )
    history.add_argument("--json", action="store_true", help=JSON_HELP)
    replay = add_command(
        "replay", "replay a recording", "zerotop replay brisk-otter", "zerotop replay otter.zerotop --speed 4"
    )
    replay.add_argument("recording", metavar="RECORDING", help=RECORDING_HELP)
    replay.add_argument("--speed", type=parse_speed, default=1.0, help="0.25 to 1000 [1]")
    add_price(replay)
    findings = add_command("findings", "list findings and fixes", "zerotop findings brisk-otter")
    findings.add_argument("recording", metavar="RECORDING", help=RECORDING_HELP)
    as_text = findings.add_mutually_exclusive_group()
    as_text.add_argument("--json", action="store_true", help=JSON_HELP)
    as_text.add_argument("--fix", action="store_true", help="only what can be pasted, the costliest first")
    memory = add_command("memory", "show memory: measured vs expected", "zerotop memory brisk-otter --at 24")
    memory.add_argument("recording", metavar="RECORDING", help=RECORDING_HELP)
    memory.add_argument("--at", type=int, metavar="STEP", help="at the end of this step [the last step, or the failure]")
    memory.add_argument("--json", action="store_true", help=f"{JSON_HELP}, with sizes in bytes")
    compare = add_command(
        "compare", "compare two or more recordings side by side", "zerotop compare brisk-otter calm-heron --json"
    )
    compare.add_argument("recordings", nargs="+", metavar="RECORDING", help=RECORDING_HELP)
    compare.add_argument("--json", action="store_true", help=f"{JSON_HELP}, with sizes in bytes and times in seconds")
    pack = add_command("pack", "pack a recording into one small file", "zerotop pack brisk-otter -o otter.zerotop")
    pack.add_argument("recording", metavar="RECORDING", help=RECORDING_HELP)
    pack.add_argument("-o", "--output", metavar="FILE", help="output file [RECORDING.zerotop in this directory]")
    add_force(pack)
    _add_serve(add_command)
    add_command("mcp", "answer questions of programs about recordings, by the Model Context Protocol", "zerotop mcp")


def _add_recordings(add_command: AddCommand) -> None:
    listing = add_command(
        "recordings",
        "list recordings, or delete old ones",
        "zerotop recordings",
        "zerotop recordings --prune --older-than 30d --dry-run",
        "zerotop recordings --prune --total-size 20GB --yes",
    )
    listing.description = f"{listing.description} They are in {name_recordings_folder()}."
    listing.add_argument("--json", action="store_true", help=JSON_HELP)
    listing.add_argument("--prune", action="store_true", help="delete recordings, never one whose job runs; asks first")
    listing.add_argument(
        "--older-than", type=parse_age, metavar="AGE", help="not written to for this long, such as 12h or 30d"
    )
    listing.add_argument(
        "--total-size", type=parse_size, metavar="SIZE", help="the oldest, until the others fit into this size, such as 20GB"
    )
    listing.add_argument("--ended", action="store_true", help="all whose jobs have ended")
    listing.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    listing.add_argument("--yes", action="store_true", help="delete without asking")


def _add_serve(add_command: AddCommand) -> None:
    serve = add_command("serve", "use zerotop in a browser", "zerotop serve", "zerotop serve brisk-otter --port 0")
    serve.add_argument("recording", nargs="?", metavar="RECORDING", help="only this recording [the list of all]")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on [127.0.0.1]")
    serve.add_argument("--port", type=int, default=8023, help="port, 0 for any free one [8023]")
    serve.add_argument("--token", help="access token [$ZEROTOP_TOKEN, else a random one]")
    serve.add_argument("--no-browser", action="store_true", help="do not open a browser")
