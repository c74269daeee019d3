"""The user's command with placeholders: ``{seq_length}``, ``{deepspeed}``, ``{gradient_checkpointing?--recompute}``.

``{NAME}`` is replaced by the setting's value, ``{NAME?TEXT}`` by TEXT if the setting is on, else by nothing. A word that
becomes empty is dropped. ``{deepspeed}`` is the path of the DeepSpeed configuration that is written for each point,
``{steps}`` the number of optimizer steps, ``{port}`` a free port. Other braces are unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from zerotop.analysis.sweeps.settings import ACCUMULATION, ALLOCATOR, MICRO_BATCH, OFFLOAD, SETTINGS, STAGE

DEEPSPEED, STEPS, PORT = "deepspeed", "steps", "port"

# Settings that reach the job by its DeepSpeed configuration, and one that is an environment variable.
_IN_CONFIG = (STAGE, OFFLOAD, MICRO_BATCH, ACCUMULATION)
_GIVEN = (DEEPSPEED, STEPS, PORT)
_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(?:\?([^{}]*))?\}")
_WHOLE_WORD = re.compile(rf"(?:--?[\w-]+=)?{_PLACEHOLDER.pattern}")


def find_placeholders(command: Sequence[str]) -> set[str]:
    """Return the names of all placeholders of a command."""
    return {match[1] for word in command for match in _PLACEHOLDER.finditer(word)}


def check_placeholders(command: Sequence[str], settings: Mapping[str, Sequence[object]]) -> None:
    """Raise ValueError if a setting cannot reach the command, or a placeholder has no value."""
    names = find_placeholders(command)
    for name, values in settings.items():
        if name in names or name == ALLOCATOR or (name in _IN_CONFIG and DEEPSPEED in names):
            continue
        option = f"--{name.replace('_', '-')}" if name in SETTINGS else f"--set {name}=..."
        others = f" or {{{DEEPSPEED}}}" if name in _IN_CONFIG else ""
        verb = "varies" if len(values) > 1 else "is given"
        raise ValueError(f"{option} {verb}, but the command has no {{{name}}}{others} that would pass it on")
    for name in sorted(names):
        if name in SETTINGS and name not in settings:
            raise ValueError(f"the command has {{{name}}}: give its values with --{name.replace('_', '-')}")
    for name in filter(None, map(_read_whole_word, command)):
        if name not in settings and name not in _GIVEN:
            raise ValueError(f"the command has {{{name}}}: give its values with --set {name}=VALUES")


def _read_whole_word(word: str) -> str | None:
    """Return the placeholder that is a word by itself, or the value of an option; other braces may be the command's own."""
    match = _WHOLE_WORD.fullmatch(word)
    return match[1] if match is not None else None


def expand_command(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return the command with a point's values instead of placeholders."""
    words = []
    for word in command:
        expanded = _PLACEHOLDER.sub(lambda match: _expand(match, values), word)
        if expanded or not word:
            words.append(expanded)
    return words


def _expand(match: re.Match[str], values: Mapping[str, object]) -> str:
    name, text = match.groups()
    if name not in values:
        return match[0]
    value = values[name]
    if text is not None:
        return text if value not in (False, "off", "", 0) else ""
    return str(value).lower() if isinstance(value, bool) else str(value)
