"""Numerical methods on plain arrays: change points and trends. Knows no recording."""
