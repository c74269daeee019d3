"""Opening a recording for a command that prints from it, with warnings about unreadable parts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from zerotop.analysis.views.notices import describe_damage, describe_thinning
from zerotop.session import catalog
from zerotop.session.reader import Session


@contextlib.contextmanager
def open_named(name: str) -> Iterator[Session]:
    """Open the session that the user named; at the end report damage on standard error. Raises SessionError."""
    session = Session.open(catalog.find_session(name))
    yield session
    # Records are checked when they are read.
    for sentence in (*describe_damage(session), *describe_thinning(session.at(session.end_ns))):
        print(f"zerotop: {sentence}", file=sys.stderr)
