"""Sweeps: which points a matrix of settings has, what each measured, and the line through their memory."""
