"""Modes that slow down each step, a cache that is emptied in each step, and graphs that no backward uses."""
