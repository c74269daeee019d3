"""From facts to meaning: steps, what to show at a cursor. Pure functions over a session's tables."""
