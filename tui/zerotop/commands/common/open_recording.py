"""Opening a recording for a command that prints what is in it."""

from __future__ import annotations

import sys

from zerotop.analysis.views.notices import describe_damage
from zerotop.session import catalog
from zerotop.session.reader import Session


def open_named(name: str) -> Session:
    """The one that a user named; what of it cannot be read is told beside what is printed. Raises SessionError."""
    session = Session.open(catalog.find_session(name))
    for sentence in describe_damage(session):
        print(f"zerotop: {sentence}", file=sys.stderr)
    return session
