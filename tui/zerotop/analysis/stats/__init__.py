"""Numerical methods on plain arrays: change points and trends. Independent of recordings."""
