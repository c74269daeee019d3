"""Reading session.json: a recording's identity, its clock, and the recorded facts about its command."""

from __future__ import annotations

import json
from typing import Any

from zerotop.recording.events.event_schema import drop_invalid_facts
from zerotop.recording.headers import DAMAGE_ERRORS, Clocks, RecordingError, check_format
from zerotop.recording.storage import Folder
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.event_base import Facts

_MAX_INFO_BYTES = 1 << 24
_MAX_NAME = 255  # characters of a recording's name, which was the name of a folder


class RecordingFacts(Facts):
    """The facts of a recording file that are used if they have these types."""

    name: str | None  # its folder's name
    command: list[str] | None  # the command line, redacted
    launcher: str | None  # kind of launcher
    working_directory: str | None  # of the command
    host: str | None  # short host name
    boot: str | None  # id of the boot
    price_per_hour: str | None  # of all hardware of the job, as the user wrote it


def load_info(folder: Folder) -> dict[str, Any]:
    """Read the recording file. Raise RecordingError."""
    path = folder.path
    try:
        info: dict[str, Any] = json.loads(folder.read_bytes(SESSION_FILE, 0, _MAX_INFO_BYTES))
        check_format(info, SESSION_FILE)
        Clocks().find_offset(info)
        drop_invalid_facts(RecordingFacts, info)
        if len(info.get("name") or "") > _MAX_NAME:
            info["name"] = None
    except FileNotFoundError:
        raise RecordingError(f"{path} holds no recording: it has no {SESSION_FILE}.") from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}.") from None
    except DAMAGE_ERRORS:
        raise RecordingError(f"{path / SESSION_FILE} is damaged, or not of zerotop: the recording cannot be read.") from None
    return {name: value for name, value in info.items() if value is not None}
