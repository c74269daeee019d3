"""From facts to meaning: steps, what to show at a cursor. Pure functions over a session's tables."""

import zerotop.session  # noqa: F401  (first: see there)
