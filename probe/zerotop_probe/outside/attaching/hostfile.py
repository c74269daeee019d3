"""The nodes of a job by name: as a hostfile lists them, or as the job's own launcher was told."""

from __future__ import annotations

import base64
import json
import os
import re

from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching.jobs import FoundJob

# What ssh takes for a destination, and no option of it or word of a shell.
_HOST_PATTERN = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_\[:][\w.:\[\]%-]*", re.ASCII)
# Where DeepSpeed looks when it is told no file.
_DEFAULT_PATH = "/job/hostfile"
_FILE_OPTIONS = ("-H", "--hostfile", "--deepspeed_hostfile")
_WORLD_OPTION = "--world_info"
_MAX_BYTES = 1 << 20


class NoHosts(ValueError):
    """No names of nodes; the text is a sentence that says why and what to do."""


def parse_names(text: str) -> list[str]:
    """Names with commas between them, each once, in order. Raises NoHosts."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if not _HOST_PATTERN.fullmatch(name):
            raise NoHosts(f"{name!r} is no name of a node")
    if not names:
        raise NoHosts("No node is named")
    return names


def read_file(path: str) -> list[str]:
    """The first words of a file's lines, as in ``worker-1 slots=4``. Raises NoHosts, OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return _parse_lines(file.read(_MAX_BYTES), path)


def _parse_lines(text: str, path: str) -> list[str]:
    words = [line.partition("#")[0].split() for line in text.splitlines()]
    try:
        return parse_names(",".join(line[0] for line in words if line))
    except NoHosts as error:
        raise NoHosts(f"{path} does not list nodes: {error}") from error


def find_job_hosts(job: FoundJob) -> list[str]:
    """The nodes that a job's own launcher was told. Raises NoHosts."""
    commands = [procfs.read_command_line(pid) for pid in _list_ancestors(job)]
    for command in commands:
        names = _parse_world(_find_option(command, (_WORLD_OPTION,)))
        if names:
            return parse_names(",".join(names))
    told = next((path for command in commands if (path := _find_option(command, _FILE_OPTIONS))), _DEFAULT_PATH)
    # As the job sees it: its paths are relative to its own folder and root.
    path = os.path.join(f"/proc/{job.root.pid}/cwd", told)
    text = procfs.read_file(path if not os.path.isabs(told) else f"/proc/{job.root.pid}/root{told}", _MAX_BYTES)
    if not text:
        raise NoHosts("The job's launcher does not say which nodes it runs on: name them, or @FILE for a hostfile")
    return _parse_lines(text.decode("utf-8", "replace"), told)


def _list_ancestors(job: FoundJob) -> list[int]:
    """The processes from the ranks up to the root."""
    found: list[int] = []
    for rank in job.ranks:
        pid = rank.process.pid
        while pid > 1 and pid not in found:
            found.append(pid)
            facts = procfs.read_stat(pid)
            pid = facts.parent if facts is not None and pid != job.root.pid else 0
    return found


def _find_option(command: list[str], names: tuple[str, ...]) -> str:
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(command[position + 1 : position + 2]), "")
    return ""


def _parse_world(text: str) -> list[str]:
    """What DeepSpeed's launcher tells its part on each node: ``{"worker-1": [0, 1]}`` in base64."""
    try:
        world = json.loads(base64.urlsafe_b64decode(text))
    except ValueError:
        return []
    return [str(name) for name in world] if isinstance(world, dict) else []
