"""The analysis of recordings: finished steps, findings, the values of screens. Pure functions over a session's tables."""

import zerotop.session  # noqa: F401  (first: see there)
