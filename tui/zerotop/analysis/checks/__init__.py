"""Checks of a recording in CI: limits from a budget file, forbidden findings, and the pace against a baseline."""
