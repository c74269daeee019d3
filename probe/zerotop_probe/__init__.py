"""Measures a training job and writes what it saw to a session directory. Never reads a recording."""
