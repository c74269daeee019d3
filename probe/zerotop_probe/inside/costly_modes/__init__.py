"""Modes that slow each step down: those for debugging, and a cache that is emptied in each step."""
