"""The recording format: tables, events, writers, session directory. Standard library only, Python 3.9 and newer."""
