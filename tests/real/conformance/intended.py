"""Differences that are intended, each with its reason."""

REASONS: dict[str, str] = {}
