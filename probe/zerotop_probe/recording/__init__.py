"""The recording format: tables, events, writers, recording folder. Standard library only, Python 3.9 and newer."""
