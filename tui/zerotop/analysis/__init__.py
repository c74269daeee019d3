"""The analysis of recordings: finished steps, findings, the values of screens. Pure functions over a recording's tables."""

import zerotop.recording  # noqa: F401  (first: see there)
