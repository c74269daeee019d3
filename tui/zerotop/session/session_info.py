"""Reading session.json: the session's identity, its clock, and the recorded facts about its command."""

from __future__ import annotations

import json
from typing import Any

from zerotop.session.events.event_schema import MAX_DEPTH, is_deeper, is_valid
from zerotop.session.headers import DAMAGE_ERRORS, Clocks, SessionError, check_format
from zerotop.session.storage import Folder
from zerotop_probe.recording.directory import SESSION_FILE
from zerotop_probe.recording.events import Field

_MAX_INFO_BYTES = 1 << 24
_MAX_NAME = 255  # characters of a session's name, which was the name of a folder
_INFO_FIELDS = (
    Field("name", str, "its folder's name"),
    Field("command", [str], "the command line, redacted"),
    Field("launcher", str, "kind of launcher"),
    Field("working_directory", str, "of the command"),
    Field("host", str, "short host name"),
    Field("boot", str, "id of the boot"),
    Field("price_per_hour", str, "of all hardware of the job, as the user wrote it"),
)


def load_info(folder: Folder) -> dict[str, Any]:
    """Read the session file. Raise SessionError."""
    path = folder.path
    try:
        info: dict[str, Any] = json.loads(folder.read_bytes(SESSION_FILE, 0, _MAX_INFO_BYTES))
        check_format(info, SESSION_FILE)
        Clocks().find_offset(info)
        _drop_invalid(info)
    except FileNotFoundError:
        raise SessionError(f"{path} holds no recording: it has no {SESSION_FILE}.") from None
    except OSError as error:
        raise SessionError(f"{path} cannot be read: {error.strerror}.") from None
    except DAMAGE_ERRORS:
        raise SessionError(f"{path / SESSION_FILE} is damaged, or not of zerotop: the recording cannot be read.") from None
    return info


def _drop_invalid(info: dict[str, Any]) -> None:
    """Remove wrongly typed facts of a session file. Raise ValueError if facts are nested too deeply."""
    if is_deeper(info, MAX_DEPTH):
        raise ValueError("the session file is nested too deeply")
    for field in _INFO_FIELDS:
        if not is_valid(info.get(field.name), field):
            del info[field.name]
    if len(info.get("name") or "") > _MAX_NAME:
        del info["name"]
