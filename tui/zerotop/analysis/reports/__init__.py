"""Whole recordings: list entries, comparison, exported tables. Nothing here depends on a cursor."""
