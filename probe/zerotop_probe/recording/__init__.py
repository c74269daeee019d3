"""The recording: its tables, its writers, its directory. Standard library only, Python 3.9 and newer."""
