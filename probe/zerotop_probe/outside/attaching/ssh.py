"""Running zerotop on other nodes through ssh, without password prompts.

The remote command is just ``sh``, which every login shell runs alike; its script comes by standard input. It uses the same
Python as here if that exists at the same path there, else ``zerotop`` from the PATH.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerotop_probe.outside.attaching.remote_agent import ANSWER_KEY
from zerotop_probe.outside.own_python import BOOT_CODE, SOURCE_ROOT
from zerotop_probe.recording.event_base import Facts

_OPTIONS = (
    "-T",
    "-o", "BatchMode=yes",
    "-o", "ConnectTimeout=10",
    # A master connection started by us would keep our pipe open; an existing one is still used.
    "-o", "ControlMaster=no",
    # Detect a broken connection within 15 s.
    "-o", "ServerAliveInterval=5",
    "-o", "ServerAliveCountMax=3",
)  # fmt: skip
# Connecting takes up to 10 s, unresponsive ranks 5 s.
PATIENCE_S = 60.0
_SSH_FAILED = 255
_LOST = "the connection broke before it answered"
_POLL_S = 0.02

_BOOT_CODE = BOOT_CODE.format(module="zerotop_probe.outside.attaching.remote_agent")
_BEGUN_MARK = "zerotop_begun"
_SCRIPT = """\
echo
echo {begun}
python={python}
root={root}
request={request}
if [ -x "$python" ] && [ -f "$root/zerotop_probe/outside/attaching/remote_agent.py" ]; then
    exec "$python" -I -c {boot} "$root" "$request"
fi
if command -v zerotop >/dev/null 2>&1; then
    exec zerotop attach --there "$request"
fi
echo
echo {nothing}
"""


class NoSsh(OSError):
    """The ssh command cannot be executed; the text is a sentence."""


class RankAnswer(Facts):
    """What became of a request to enter or leave a rank."""

    rank: int | None
    pid: int
    said: str  # its reply
    why_not: str  # "" if it was done
    pending: bool  # whether it may still be done


class NodeAnswer(Facts):
    """What a node says: none of it where it did not answer."""

    why_not: str | None  # why it refused
    here: bool | None  # whether that node is this one
    host: str | None  # its own hostname
    format: list[int] | None  # that its zerotop writes
    entries: list[RankAnswer] | None
    ranks: int | None  # that it runs
    ahead_s: float | None  # of its clock
    part: str | None  # the recording that is its part of this one


@dataclass(frozen=True)
class Answer:
    """A node's answer, or the reason why there is none."""

    name: str  # as passed to ssh
    why_not: str = ""  # why the request failed; "" if it succeeded
    is_lost: bool = False  # the request may have succeeded: it began, but the answer was lost
    said: NodeAnswer = field(default_factory=lambda: NodeAnswer({}))


class RemoteCalls:
    """Requests to several nodes at once."""

    def __init__(self, names: Iterable[str], command: Sequence[str], request: Mapping[str, Any]) -> None:
        """Send the request. ``command`` is the ssh command, by default ``ssh``. Raises NoSsh."""
        self._began_s = time.monotonic()
        self._processes: list[tuple[str, subprocess.Popen[str]]] = []
        script = make_script(request)
        try:
            for name in names:
                self._processes.append((name, _start_ssh(build_command(command, name), script)))
        except NoSsh:
            self.kill_remaining()
            raise

    def wait_all(self, seconds: float) -> None:
        """Wait until all have ended, at most ``seconds``."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and any(process.poll() is None for _, process in self._processes):
            time.sleep(_POLL_S)

    def collect_answers(self) -> list[Answer]:
        """Wait for all answers and return them in the order of the names."""
        return [self._collect_answer(name, process) for name, process in self._processes]

    def _collect_answer(self, name: str, process: subprocess.Popen[str]) -> Answer:
        left_s = self._began_s + PATIENCE_S - time.monotonic()
        try:
            output, errors = process.communicate(timeout=max(left_s, 0.0))
        except subprocess.TimeoutExpired as error:
            return Answer(name, f"it has not answered within {PATIENCE_S:.0f} s", is_lost=_has_begun(error.stdout or b""))
        said = _parse_answer(output)
        if said is None:
            lost = process.returncode == _SSH_FAILED and _has_begun(output)
            return Answer(name, _LOST if lost else _describe_silence(process.returncode, errors), lost)
        return Answer(name, said.why_not or "", said=said)

    def kill_remaining(self) -> None:
        """Kill the ssh processes of nodes that have not answered."""
        for _, process in self._processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


def build_command(command: Sequence[str], name: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command line for a shell on a node, whose script comes by standard input.

    ``command``: of ssh, by default ``ssh``, or with ``{}`` in place of the node, such as ``kubectl exec -i {} --``.
    """
    if any("{}" in word for word in command):
        return [*(word.replace("{}", name) for word in command), "sh"]
    return [*(command or ["ssh"]), *_OPTIONS, *options, "--", name, "sh"]


def _start_ssh(command: list[str], script: str) -> subprocess.Popen[str]:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise NoSsh(
            f"{command[0]} cannot be executed ({error.strerror}). Choose another command with --ssh or ZEROTOP_SSH"
        ) from error
    assert process.stdin is not None
    # The script fits into the pipe. If ssh has already exited, its error output says why.
    with contextlib.suppress(BrokenPipeError), process.stdin as file:
        file.write(script)
    process.stdin = None
    return process


def make_script(request: Mapping[str, Any]) -> str:
    """Return the shell's script that has the remote agent handle a request."""
    why_not = f"zerotop is installed neither for {sys.executable} nor on the PATH there. Install it on that node"
    nothing = json.dumps({ANSWER_KEY: {"why_not": why_not}})
    words = {
        "python": sys.executable,
        "root": SOURCE_ROOT,
        "request": json.dumps(request),
        "boot": _BOOT_CODE,
        "nothing": nothing,
    }
    words["begun"] = _BEGUN_MARK
    return _SCRIPT.format(**{name: shlex.quote(word) for name, word in words.items()})


def _has_begun(output: str | bytes) -> bool:
    return _BEGUN_MARK in (output.decode("utf-8", "replace") if isinstance(output, bytes) else output)


def _parse_answer(output: str) -> NodeAnswer | None:
    """Return the answer; skip lines that the shell's startup files may print."""
    for line in output.splitlines():
        if line.startswith('{"' + ANSWER_KEY):
            try:
                facts = json.loads(line)[ANSWER_KEY]
            except (ValueError, KeyError):
                continue
            if isinstance(facts, dict):
                return NodeAnswer(facts)
    return None


def _describe_silence(returncode: int, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else "no error message"
    if returncode != _SSH_FAILED:
        if any("unrecognized arguments" in line for line in lines):
            return "zerotop there is too old. Install the same version on both nodes"
        return f"zerotop failed there ({last})"
    if "Permission denied" in last:
        return f"ssh cannot log in without a password ({last}). Set up a key or an ssh agent"
    if "Host key verification failed" in last:
        return "ssh does not know its host key. Connect once by hand and accept it"
    return f"ssh cannot connect ({last.removeprefix('ssh: ')})"
