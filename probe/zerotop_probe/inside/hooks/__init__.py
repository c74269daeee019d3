"""Hooks into DeepSpeed, the Trainer and data loaders. Standard library only, Python 3.9 and newer."""
