"""What goes wrong in the web server, as one line each on standard error, without tracebacks."""

from __future__ import annotations

import logging
import sys
import time

from zerotop.commands.common.escape import escape_unprintable

# A stranger who sends invalid requests fills neither a terminal nor a log.
_QUIET_S = 10.0
_MAX_CHARACTERS = 200
_LOGGERS = ("aiohttp", "asyncio", "textual-serve")

_next_report: dict[str, float] = {}


def report(what: str, reason: str) -> None:
    """Print a line, unless one about the same was printed just now."""
    now = time.monotonic()
    if now >= _next_report.get(what, now):
        _next_report[what] = now + _QUIET_S
        line = escape_unprintable(f"{what}: {reason}".partition("\n")[0][:_MAX_CHARACTERS])
        print(f"zerotop: {line}", file=sys.stderr, flush=True)


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        report(record.getMessage().partition("\n")[0], "" if error is None else f"{type(error).__name__}: {error}")


def install_reports() -> None:
    """Report the warnings and errors of the libraries that serve."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [_LineHandler(logging.WARNING)], False
