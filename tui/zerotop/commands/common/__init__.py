"""Shared by the commands: session lookup, errors, exit messages and text output."""
