"""Remove secrets from command lines, configurations and environments before they are recorded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "<redacted>"

_SECRET_NAME = re.compile(
    r"(?:^|[-_.])(?:(?:\w*token|secret|passwd|password|pwd|credentials?)|(?:api|access|private|secret|auth)[-_]?key)s?$",
    re.IGNORECASE,
)
# Options that end like the name of a secret but are token ids and token counts.
_HARMLESS = re.compile(r"(?:pad|eos|bos|unk|sep|cls|mask|special|new|max|min|num|image|image_)[-_]?tokens?$", re.IGNORECASE)
# Values that are secrets in any place: tokens of hubs, clouds, code hosts and experiment trackers.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{12,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}"
    r"|AKIA[0-9A-Z]{12,}|xox[abprs]-[\w-]{8,}|[0-9a-f]{40})\b"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def is_secret_name(name: str) -> bool:
    """Return whether an option, key or variable of this name holds a secret."""
    name = name.lstrip("-")
    return bool(_SECRET_NAME.search(name)) and not _HARMLESS.search(name)


def redact_text(value: str) -> str:
    """Return a text in which apparent secrets are replaced."""
    return _URL_LOGIN.sub(HIDDEN, _SECRET_VALUE.sub(HIDDEN, value))


def redact_command(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the values of secret options (``--token X``, ``--api-key=X``, ``TOKEN=X``)."""
    shown = []
    hide_next = False
    for argument in arguments:
        name, equals, _value = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        hide_next = not equals and argument.startswith("-") and is_secret_name(name)
        shown.append(f"{name}={HIDDEN}" if equals and is_secret_name(name) else redact_text(argument))
    return shown


def redact_tree(value: Any, name: str = "") -> Any:
    """Return a configuration without the values of secret keys, at any depth."""
    if name and is_secret_name(name) and isinstance(value, (str, bytes)):
        return HIDDEN
    if isinstance(value, dict):
        return {str(key): redact_tree(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(inner) for inner in value]
    return redact_text(value) if isinstance(value, str) else value
