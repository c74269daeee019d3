"""Opening a recording for a command that prints from it."""

from __future__ import annotations

import sys

from zerotop.analysis.views.notices import describe_damage, describe_thinning
from zerotop.session import catalog
from zerotop.session.reader import Session


def open_named(name: str) -> Session:
    """Open the session that the user named and report damage on standard error. Raises SessionError."""
    session = Session.open(catalog.find_session(name))
    for sentence in (*describe_damage(session), *describe_thinning(session, session.end_ns)):
        print(f"zerotop: {sentence}", file=sys.stderr)
    return session
