"""Delivering a notification to a command or a web address, beside everything else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from zerotop_probe.outside.causes import describe_cause

_COMMAND_S, _SERVER_S = 30.0, 10.0
_MOST_SAID = 200  # characters of a failed command's last line


class Delivery:
    """Sends one message at a time in a thread; a failure becomes a sentence."""

    def __init__(self, deliver: Callable[[bytes], None], tell: Callable[[str], None]) -> None:
        """``deliver`` raises DeliveryError."""
        self._deliver = deliver
        self._tell = tell
        self._thread: threading.Thread | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing is being delivered."""
        return self._thread is None or not self._thread.is_alive()

    def send(self, message: bytes) -> None:
        """Deliver a message after those that are being delivered."""
        before = self._thread
        # The thread does not keep the process alive: a server may answer a byte a minute.
        self._thread = threading.Thread(target=self._send, args=(message, before), daemon=True, name="notification")
        self._thread.start()

    def _send(self, message: bytes, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            self._deliver(message)
        except DeliveryError as error:
            self._tell(str(error))

    def wait(self, seconds: float) -> None:
        """Wait until all has been delivered or has failed, but not longer."""
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self._tell("A notification was not delivered in time")


class DeliveryError(Exception):
    """A message was not delivered; the text is a sentence for the user."""


def choose_delivery(target: str, tell: Callable[[str], None]) -> Delivery:
    """Return the delivery to a web address, or else to a command of the shell."""
    deliver = _post if re.match("https?://", target, re.IGNORECASE) else _run
    return Delivery(lambda message: deliver(target, message), tell)


def _run(command: str, message: bytes) -> None:
    """Run a command with the message as its standard input. Raise DeliveryError."""
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as standard_input:
        standard_input.write(message + b"\n")
        standard_input.seek(0)
        try:
            process = subprocess.Popen(
                command,
                shell=True,
                stdin=standard_input,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            cause = describe_cause(error) if isinstance(error, OSError) else str(error)
            raise DeliveryError(f"The command of --notify could not be started: {cause}") from None
        try:
            code = process.wait(_COMMAND_S)
        except subprocess.TimeoutExpired:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise DeliveryError(f"The command of --notify did not end within {_COMMAND_S:.0f} s and was killed") from None
        if code:
            errors.seek(0)
            said = errors.read(1 << 16).decode(errors="replace").strip().rpartition("\n")[2][:_MOST_SAID]
            raise DeliveryError(f"The command of --notify failed with exit code {code}{said and f': {said}'}")


def _post(address: str, message: bytes) -> None:
    """Post the message as JSON. Raise DeliveryError, which names only the host: the rest of an address may be a secret."""
    try:
        host = urlsplit(address).hostname or "no host"
        request = urllib.request.Request(
            address, message, {"Content-Type": "application/json", "User-Agent": "zerotop"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=_SERVER_S) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        raise DeliveryError(f"The server of --notify, {host}, answered {error.code} {error.reason}") from None
    except ValueError:
        raise DeliveryError("The address of --notify is not valid") from None
    except Exception as error:  # whatever a server answers that does not speak HTTP
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        text = describe_cause(cause) if isinstance(cause, OSError) and cause.strerror else str(cause) or type(cause).__name__
        raise DeliveryError(f"The server of --notify, {host}, was not reached: {text}") from None
