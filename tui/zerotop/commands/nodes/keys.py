"""Private files in the home folder: a job's token where its launcher would show it on a command line, on each node, and the
certificate of its server with its key, where that runs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from zerotop_probe.outside.attaching.ssh import build_command

CERTIFICATE_VARIABLE, KEY_VARIABLE = "ZEROTOP_TLS_CERT", "ZEROTOP_TLS_KEY"
"""The site's certificate in PEM for servers that we start, and its key, which may be in the same file."""
_CERTIFICATE = (".cert", ".certkey")
# Nodes accept only this certificate, whatever is in it.
_OPENSSL = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    *("-nodes", "-days", "3650", "-subj", "/CN=zerotop"),
)
_MAKE_S = 20.0
_FOLDER = ".local/state/zerotop/keys"  # not where XDG_STATE_HOME says: ssh may not pass that on
_SHARE_S = 20.0
# The file that came by ssh has another name: a home that nodes share has the first already, and keeps it.
_SENT = ".sent"
_SCRIPT = """\
umask 077
cd "$HOME" && mkdir -p {folder} && cd {folder} || exit
[ -e {job} ] || {{ echo {token} > {job}.new && mv {job}.new {job}{sent}; }}
"""


def _make_path(job: str) -> str:
    return os.path.join(os.path.expanduser("~"), _FOLDER, job)


def write_key(job: str, token: str) -> None:
    """Write the file on this node. Raise OSError."""
    path = _make_path(job)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    os.replace(f"{path}.new", path)


def read_key(job: str) -> str:
    """Return the token of a job; "" without a file of this user."""
    for path in (_make_path(job), _make_path(job) + _SENT):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor) as file:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    return file.read().strip()
    return ""


def remove_key(job: str, *, sent: bool) -> None:
    """Remove the files: those that were written on this node, or the one that was sent here."""
    for suffix in (_SENT,) if sent else ("", *_CERTIFICATE):
        with suppress(OSError):
            os.unlink(_make_path(job) + suffix)


def make_certificate(job: str) -> None:
    """Make a certificate for the job's server, if the site has named none and there is OpenSSL. Raise OSError."""
    if CERTIFICATE_VARIABLE in os.environ or shutil.which(_OPENSSL[0]) is None:
        return
    certificate, key = (_make_path(job) + suffix for suffix in _CERTIFICATE)
    os.makedirs(os.path.dirname(key), mode=0o700, exist_ok=True)
    with suppress(subprocess.SubprocessError):
        subprocess.run(
            [*_OPENSSL, "-keyout", key, "-out", certificate],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_MAKE_S,
            umask=0o077,
        )


def find_certificate(job: str) -> tuple[str, str] | None:
    """Return the files of the certificate and key for the job's server; None without them."""
    made = tuple(_make_path(job) + suffix for suffix in _CERTIFICATE)
    certificate = os.environ.get(CERTIFICATE_VARIABLE, made[0])
    found = certificate, os.environ.get(KEY_VARIABLE, certificate if CERTIFICATE_VARIABLE in os.environ else made[1])
    return found if CERTIFICATE_VARIABLE in os.environ or all(map(os.path.exists, found)) else None


def share_key(job: str, token: str, names: Sequence[str], ssh: Sequence[str], options: Sequence[str]) -> list[str]:
    """Send the file to these nodes by ssh, in its standard input; return sentences about those that could not be reached."""
    words = {"folder": _FOLDER, "job": job, "token": token, "sent": _SENT}
    script = _SCRIPT.format(**{name: shlex.quote(word) for name, word in words.items()}).encode()
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    why = {}
    for name in names:
        command = build_command(ssh, name, options)
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        except OSError as error:
            return [f"Other nodes do not take part: {command[0]} cannot be executed ({error.strerror})."]
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as file:  # it fits into the pipe
            file.write(script)
        process.stdin = None
        running.append((name, process))
    deadline_s = time.monotonic() + _SHARE_S
    for name, process in running:
        try:
            _, errors = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
            lines = errors.decode(errors="replace").split("\n")
            why[name] = next(filter(None, map(str.strip, reversed(lines))), "ssh failed") if process.returncode else ""
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            why[name] = f"no answer within {_SHARE_S:.0f} s"
    return [f"Node {name} cannot take part: {text.rstrip('.')}." for name, text in why.items() if text]
