"""The clock of a node, aligned to the collector's by round trips over the connection that carries the recording.

The collector's time in an answer is later than the question and earlier than the answer's arrival. Taken for the time in
their middle, as NTP does (RFC 5905), it is wrong by at most half of the round trip. Several round trips leave less than the
shortest one, since one of them may have had the quickest question and another the quickest answer.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from zerotop_probe.recording.identity import Identity
from zerotop_probe.recording.writer import CREATE_FLAGS, make_header

_MAX_NS = 1 << 62
# Two clocks may drift apart by so much of the time that passes: NTP corrects a clock by 0.5 ms a second at most.
_DRIFT = 0.0005


class Alignment(NamedTuple):
    """The collector's unix time at one instant of a node's CLOCK_MONOTONIC, and how wrong it may be."""

    monotonic_ns: int
    unix_ns: int
    error_ns: int

    @classmethod
    def from_round_trip(cls, asked_ns: int, answered_ns: int, unix_ns: int) -> Alignment:
        """Return the alignment from one round trip; the first two times are the node's CLOCK_MONOTONIC."""
        half_ns = (answered_ns - asked_ns) // 2
        return cls(asked_ns + half_ns, unix_ns, half_ns)

    def narrow(self, later: Alignment) -> Alignment:
        """Return what is possible after a later round trip, too; only what it says itself if a clock was set meanwhile."""
        drift_ns = int(_DRIFT * (later.monotonic_ns - self.monotonic_ns)) + 1
        ahead_ns, later_ahead_ns = self.unix_ns - self.monotonic_ns, later.unix_ns - later.monotonic_ns
        least_ns = max(ahead_ns - self.error_ns - drift_ns, later_ahead_ns - later.error_ns)
        most_ns = min(ahead_ns + self.error_ns + drift_ns, later_ahead_ns + later.error_ns)
        if least_ns > most_ns:
            return later
        half_ns = (most_ns - least_ns + 1) // 2
        return Alignment(later.monotonic_ns, later.monotonic_ns + least_ns + half_ns, half_ns)

    @classmethod
    def parse(cls, value: Any) -> Alignment | None:
        """Return the alignment in a message; None without a valid one."""
        is_valid = isinstance(value, list) and len(value) == len(cls._fields)
        if not is_valid or any(type(number) is not int or not 0 <= number < _MAX_NS for number in value):
            return None
        return cls(*value)

    @property
    def clock(self) -> dict[str, int]:
        """The clock pair of a recording's header."""
        return {"monotonic_ns": self.monotonic_ns, "unix_ns": self.unix_ns}

    def count_ahead_ns(self, clock: Any) -> int:
        """Return how far a node's own clock, a pair of its recording, is ahead of the collector's; 0 without a pair."""
        try:
            return int(clock["unix_ns"]) - int(clock["monotonic_ns"]) - (self.unix_ns - self.monotonic_ns)
        except (TypeError, ValueError, KeyError):
            return 0


def write_alignment(folder: str, host: str, boot: str, own: Identity, alignment: Alignment) -> None:
    """Have readers use the aligned clock for this boot of a node. Raise OSError."""
    writer = Identity("control", -1, host, own.pid, own.start, boot)
    extra = {"clock": alignment.clock, "aligned": True, "error_ns": alignment.error_ns}
    line = json.dumps(make_header("events", writer, **extra)).encode() + b"\n"
    path = os.path.join(folder, f"events-control-{host}-{own.host}-{own.pid}.jsonl")
    descriptor = os.open(path, CREATE_FLAGS, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(line)
