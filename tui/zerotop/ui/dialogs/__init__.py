"""Dialogs over any screen: help, findings, go to, delete, quit."""
