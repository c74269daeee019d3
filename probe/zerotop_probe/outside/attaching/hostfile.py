"""The names of a job's nodes: from a hostfile, or from the command line of the job's own launcher."""

from __future__ import annotations

import base64
import json
import os
import re

from zerotop_probe.outside import procfs
from zerotop_probe.outside.attaching.jobs import FoundJob

# A destination for ssh that is neither one of its options nor a shell expression.
_HOST_PATTERN = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_\[:][\w.:\[\]%-]*", re.ASCII)
# DeepSpeed's default.
_DEFAULT_PATH = "/job/hostfile"
_FILE_OPTIONS = ("-H", "--hostfile", "--deepspeed_hostfile")
_WORLD_OPTION = "--world_info"
_MAX_BYTES = 1 << 20


class NoHosts(ValueError):
    """There are no valid node names; the text is a sentence with the reason and what to do."""


def parse_names(text: str) -> list[str]:
    """Parse names separated by commas; drop duplicates. Raises NoHosts."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if not _HOST_PATTERN.fullmatch(name):
            raise NoHosts(f"{name!r} is not a valid node name")
    if not names:
        raise NoHosts("There are no node names")
    return names


def read_file(path: str) -> list[str]:
    """Read the first word of each line of a hostfile, as in ``worker-1 slots=4``. Raises NoHosts, OSError."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return _parse_lines(file.read(_MAX_BYTES), path)


def _parse_lines(text: str, path: str) -> list[str]:
    words = [line.partition("#")[0].split() for line in text.splitlines()]
    try:
        return parse_names(",".join(line[0] for line in words if line))
    except NoHosts as error:
        raise NoHosts(f"{path} is not a valid hostfile: {error}") from error


def find_job_hosts(job: FoundJob) -> list[str]:
    """Return the nodes that the job's own launcher was given. Raises NoHosts."""
    commands = [procfs.read_command_line(pid) for pid in _list_launchers(job)]
    for command in commands:
        names = _parse_world(_find_option(command, (_WORLD_OPTION,)))
        if names:
            return parse_names(",".join(names))
    given = next((path for command in commands if (path := _find_option(command, _FILE_OPTIONS))), _DEFAULT_PATH)
    # Resolved as in the job: relative to its own working directory or root.
    path = os.path.join(f"/proc/{job.root.pid}/cwd", given)
    text = procfs.read_file(path if not os.path.isabs(given) else f"/proc/{job.root.pid}/root{given}", _MAX_BYTES)
    if not text:
        raise NoHosts("The job's launcher does not say which nodes it uses. Name them, or give a hostfile as @FILE")
    return _parse_lines(text.decode("utf-8", "replace"), given)


def _list_launchers(job: FoundJob) -> list[int]:
    """Return the pids from the ranks up to the root."""
    pids: dict[int, None] = {}
    for rank in job.ranks:
        lineage = procfs.list_ancestors(rank.process.pid)
        end = lineage.index(job.root.pid) + 1 if job.root.pid in lineage else len(lineage)
        pids.update(dict.fromkeys(lineage[:end]))
    return list(pids)


def _find_option(command: list[str], names: tuple[str, ...]) -> str:
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(command[position + 1 : position + 2]), "")
    return ""


def _parse_world(text: str) -> list[str]:
    """Parse the nodes that DeepSpeed passes to its launcher on each node: ``{"worker-1": [0, 1]}`` in base64."""
    try:
        world = json.loads(base64.urlsafe_b64decode(text))
    except ValueError:
        return []
    return [str(name) for name in world] if isinstance(world, dict) else []
