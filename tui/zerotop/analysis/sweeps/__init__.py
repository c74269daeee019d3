"""Sweeps: the points of a matrix of settings, their measurements, and the line through their memory."""
