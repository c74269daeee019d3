"""Judging a recording in CI: bounds from a budget file, findings that must not occur, and the pace against a baseline."""
