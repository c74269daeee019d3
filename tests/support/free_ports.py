"""Ports at which the ranks of real jobs meet."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Below those that the kernel gives to connections (32768 and up). Each of pytest's workers has some of its own.
_FIRST, _EACH, _WORKERS = 12_000, 1_000, 20
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_begin = random.randrange(_EACH)  # another run of the tests may use the same ones
_ports = itertools.cycle(_FIRST + _EACH * _worker + (_begin + number) % _EACH for number in range(_EACH))


def find_free_port() -> int:
    """Return a port that nothing has and that was not returned before: a job may take 20 s until it listens there."""
    while True:
        port = next(_ports)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
