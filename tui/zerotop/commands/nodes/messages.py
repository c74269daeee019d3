"""Messages between the nodes of a job and its collector: a header of JSON, the bytes of files, and a seal.

The seal is a BLAKE2b hash (RFC 7693) keyed by the token, over the job's name and the message. A message of another job, or
of somebody without the token, is refused before anything in it is read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from typing import Any, NamedTuple

from zerotop_probe.recording.tables import BEGINS, FOLDED, GPU_PROCESSES, HOSTS, LOGGED, SPANS, TABLES

TOKEN_VARIABLE = "ZEROTOP_TOKEN"
MIN_TOKEN = 16
"""Characters of a token: a shorter one could be guessed."""
MAX_DATA_BYTES = 1 << 19
"""Bytes of files in a message. Servers pass on 1 MiB, unless their site has set another limit."""
MAX_CHANGES = 1000
"""Changed files in a message, and files in a page of the collector's list."""

# Requests, and the kinds of answers to them.
HELLO, LIST, WRITE, BYE, PING = "hello", "list", "write", "bye", "ping"
OK, UNKNOWN, REFUSED = "ok", "unknown", "refused"

_REDUCED = ("events", *(table.name for table in (SPANS, BEGINS, FOLDED, GPU_PROCESSES, HOSTS, LOGGED)))
_MAX_MESSAGE_BYTES = 1 << 20
_MAX_SENTENCE = 300
_SEAL_BYTES = 32
_LENGTH_BYTES = 4
_JOB = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HOST = re.compile(r"\w{1,64}")  # see clock.read_hostname
_FILE_NAME = re.compile(
    rf"(?:{'|'.join(sorted(TABLES))}|events)-(?:node|control|rank-?[0-9]{{1,7}})-(?P<host>\w{{1,64}})-[0-9]{{1,10}}"
    r"(?:\.[a-z0-9]{1,10}){0,3}\.(?:rec|jsonl|log)"
)


class BadMessage(Exception):
    """A message is not what it must be; the text says why and ends without a full stop."""


class JobKey(NamedTuple):
    """The secret that the nodes of one job and its collector share."""

    job: str
    token: str

    def seal(self, header: dict[str, Any], data: bytes = b"") -> bytes:
        """Return a message."""
        text = json.dumps(header, separators=(",", ":")).encode()
        body = len(text).to_bytes(_LENGTH_BYTES, "big") + text + data
        return self._hash(body) + body

    def open(self, message: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the header and data of a message. Raise BadMessage."""
        if len(message) > _MAX_MESSAGE_BYTES:
            raise BadMessage("a message is larger than any of zerotop's")
        seal, body = message[:_SEAL_BYTES], message[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._hash(body)):
            raise BadMessage(f"a message was sent with another {TOKEN_VARIABLE} or for another job")
        end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "big")
        try:
            header = json.loads(body[_LENGTH_BYTES:end])
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise BadMessage("a message is damaged")
        return header, body[end:]

    def _hash(self, body: bytes) -> bytes:
        key = hashlib.blake2b(self.token.encode()).digest()
        return hashlib.blake2b(self.job.encode() + b"\0" + body, key=key, digest_size=_SEAL_BYTES).digest()


class FileChange(NamedTuple):
    """One change of a file.

    With the next ``generation`` its content begins anew, because it was cut or replaced; nothing of it shows until all
    ``size`` bytes have come. ``size`` is -1 if the file was deleted.
    """

    name: str
    generation: int
    offset: int
    length: int
    size: int


def parse_changes(header: dict[str, Any], data: bytes, host: str) -> list[tuple[FileChange, bytes]]:
    """Return the changes of a node's files in a message, each with its bytes. Raise BadMessage."""
    values = header.get("changes")
    if not isinstance(values, list) or len(values) > MAX_CHANGES:
        raise BadMessage("a message has no list of changes, or too many")
    changes, begin = [], 0
    for value in values:
        if not (isinstance(value, list) and len(value) == len(FileChange._fields) and isinstance(value[0], str)):
            raise BadMessage("a change is damaged")
        if any(type(number) is not int or not -1 <= number < 1 << 60 for number in value[1:]):
            raise BadMessage("a change has impossible numbers")
        change = FileChange(*value)
        check_file_name(change.name, host)
        if min(change.generation, change.offset, change.length) < 0 or begin + change.length > len(data):
            raise BadMessage("a change has impossible numbers")
        changes.append((change, data[begin : begin + change.length]))
        begin += change.length
    return changes


def is_file_name(name: str, host: str) -> bool:
    """Whether this is the name of a recording's file that a process of this node writes."""
    match = _FILE_NAME.fullmatch(name)
    return match is not None and match["host"] == host


def is_reduced_file(name: str) -> bool:
    """Whether nodes send this file also without full detail: steps, phases, tokens, losses, memory of the GPUs, events."""
    return name.startswith(tuple(f"{start}-" for start in _REDUCED))


def check_file_name(name: str, host: str) -> None:
    """Raise BadMessage for any other name, such as one with a folder in it."""
    if not is_file_name(name, host):
        raise BadMessage(f"{name[:100]!r} is not the name of a recording's file of node {host}")


def check_host(host: Any) -> str:
    """Return the name of a node. Raise BadMessage."""
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        raise BadMessage("a message has no valid name of a node")
    return host


def is_job_name(job: str) -> bool:
    """Whether this may be the name of a job: letters, digits, ``_`` and ``-``."""
    return _JOB.fullmatch(job) is not None


def make_token() -> str:
    """Return a new token. It begins with a letter: nats-server takes some of digits, such as 7e77d4, for damaged numbers."""
    return f"t{secrets.token_hex(16)}"


def shorten(sentence: object) -> str:
    """Return a sentence from the network as one line of a limited length."""
    return " ".join(str(sentence).split())[:_MAX_SENTENCE]


def hash_bytes(data: bytes) -> str:
    """Return the hash by which both sides compare bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def hash_file(path: str, size: int) -> str | None:
    """Return the hash of the first ``size`` bytes of a file; None if it is shorter. Raise OSError."""
    from zerotop_probe.recording.plain_files import open_plain_file

    digest = hashlib.blake2b(digest_size=16)
    with open(open_plain_file(path), "rb") as file:
        while size:
            block = file.read(min(size, 1 << 20))
            if not block:
                return None
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()
