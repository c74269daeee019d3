"""Modes that slow down each step: debugging modes, and a cache that is emptied in each step."""
